"""A transport between the ranks of one process: for tests, and for trying a group without hosts.

    network = LocalNetwork(size=2)
    groups = [AsyncGroup(network.join(rank), group_id="g", timeout_seconds=5.0) for rank in (0, 1)]

It keeps the promises of the real one (own memory for the receiver, bounded mailboxes, order only
per source and tag) and no more: with an `order` it delays deliveries by a seeded number of turns of
the loop, so that interleavings are many and can be repeated.

Faults have coordinates, not times: a rank, and the number of the message that it is about to send.

    network.fail_at(rank=1, step=3)     its 4th send raises on rank 1; the others hear nothing
    network.hang_at(rank=1, step=3)     its 4th send and all later ones never end, as if stopped
    network.drop_peer(1, step=3)        it is lost to all, as if its process had died

`network.num_sent(rank)` after a run without faults tells which steps there are.
"""

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from stagemesh.comm.mailbox import DEFAULT_CAPACITY_BYTES, CreditWindow, Mailbox, message_cost
from stagemesh.comm.rank_names import RankNames
from stagemesh.comm.raw import own_copy
from stagemesh.comm.transport import Envelope, Message
from stagemesh.errors import CommError, ConfigError, GroupAborted, PeerLost

_MAX_DELAY_TURNS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fault:
    """What happens to a rank at a step."""

    kind: Literal["fail", "hang", "drop"]
    error: Exception | None = None


class LocalNetwork:
    """The wires between `size` ranks of one process."""

    def __init__(
        self,
        *,
        size: int,
        order: random.Random | None = None,
        capacity_bytes: int = DEFAULT_CAPACITY_BYTES,
        rank_names: Sequence[str] = (),
    ) -> None:
        """Make the wires; ranks join later.

        Args:
            size: number of ranks.
            order: when given, deliveries of different (source, tag) pairs overtake each other.
            capacity_bytes: bound of what one source may have waiting at one rank.
            rank_names: who the ranks are, for errors; without, "rank 0", "rank 1", ...
        """
        if size < 1:
            raise ConfigError(f"size must be at least 1, got {size}")
        self.size = size
        self._order = order
        self._names = RankNames(rank_names)
        self._capacity = capacity_bytes
        self._mailboxes: dict[int, Mailbox[Message]] = {}
        self._dropped: set[int] = set()
        self._joined = asyncio.Event()
        self._lanes: defaultdict[tuple[int, int, int], asyncio.Lock] = defaultdict(asyncio.Lock)
        self._windows: dict[tuple[int, int], CreditWindow] = {}
        self._num_sent: Counter[int] = Counter()
        self._faults: dict[tuple[int, int], _Fault] = {}
        self._hung: set[int] = set()

    def join(self, rank: int, *, incarnation: int = 1) -> "LocalTransport":
        """The transport of a rank. A later incarnation takes the place of the one before."""
        self._check_rank(rank)
        before = self._mailboxes.get(rank)
        if before is not None and before.incarnation >= incarnation:
            raise ConfigError(f"rank {rank} has joined incarnation {before.incarnation} already")
        if before is not None:
            before.abort(f"rank {rank} joined incarnation {incarnation}")
        mailbox: Mailbox[Message] = Mailbox(
            incarnation=incarnation,
            capacity_bytes=self._capacity,
            on_taken=lambda source, cost: self.window(source, rank).release(cost),
        )
        for source in range(self.size):
            if before is not None:
                self._windows[source, rank].fail(lambda: GroupAborted(f"rank {rank} joined again"))
            self._windows[source, rank] = CreditWindow(capacity_bytes=self._capacity)
        self._mailboxes[rank] = mailbox
        self._joined.set()
        return LocalTransport(self, rank=rank, mailbox=mailbox)

    def num_sent(self, rank: int) -> int:
        """How many messages a rank has begun to send: the step that comes next."""
        return self._num_sent[rank]

    def fail_at(self, *, rank: int, step: int, error: Exception | None = None) -> None:
        """Make a rank's send number `step` (0 is its first) raise, on that rank only.

        Args:
            rank: who fails.
            step: which of its messages.
            error: what is raised; without one a CommError that names rank and step.
        """
        error = error or CommError(f"rank {rank} fails at step {step}, as was asked for")
        self._set_fault(rank, step, _Fault(kind="fail", error=error))

    def hang_at(self, *, rank: int, step: int) -> None:
        """Make a rank's send number `step` and all later ones wait until they are cancelled."""
        self._set_fault(rank, step, _Fault(kind="hang"))

    def drop_peer(self, rank: int, *, step: int | None = None) -> None:
        """Lose a rank, as if its process had died: now, or when it begins to send message `step`.

        What it sent before can still be received.
        """
        if step is not None:
            self._set_fault(rank, step, _Fault(kind="drop"))
            return
        self._check_rank(rank)
        self._dropped.add(rank)
        for peer, mailbox in self._mailboxes.items():
            if peer != rank:
                mailbox.fail_source(rank, str(self._dropped_error(rank)))
        for (source, target), window in self._windows.items():
            if rank in (source, target):
                window.fail(lambda: self._dropped_error(rank))
        self._joined.set()

    def leave(self, rank: int, *, incarnation: int) -> None:
        """Tell the other ranks of an incarnation that a rank has left."""
        for peer, mailbox in self._mailboxes.items():
            if peer != rank and mailbox.incarnation == incarnation:
                mailbox.fail_source(rank, f"{self._names.of(rank)} is lost: it left the group")

    def window(self, source: int, target: int) -> CreditWindow:
        """Credit from one rank to another."""
        return self._windows[source, target]

    async def deliver(self, message: Message, target: int) -> None:
        """Bring a message to a rank's mailbox, once that rank has joined."""
        await self._suffer_faults(message.source_rank)
        async with self._lanes[message.source_rank, target, message.tag]:
            mailbox = await self._mailbox_for(target, message.incarnation)
            await self._delay()
            await self.window(message.source_rank, target).acquire(message_cost(message.num_bytes))
            self._raise_if_dropped(message.source_rank, target)
            if not mailbox.put(message):
                raise GroupAborted(
                    f"{self._names.of(target)} has left incarnation {message.incarnation}"
                )

    async def abort_peers(self, rank: int, *, incarnation: int, cause: str) -> None:
        """Abort the mailboxes of all other ranks of an incarnation."""
        for peer, mailbox in self._mailboxes.items():
            if peer != rank and mailbox.incarnation == incarnation:
                mailbox.abort(f"{self._names.of(rank)} aborted the group: {cause}")

    async def _mailbox_for(self, target: int, incarnation: int) -> Mailbox[Message]:
        while True:
            self._raise_if_dropped(target)
            mailbox = self._mailboxes.get(target)
            if mailbox is not None and mailbox.incarnation >= incarnation:
                return mailbox
            self._joined.clear()
            await self._joined.wait()

    async def _delay(self) -> None:
        if self._order is not None:
            for _ in range(self._order.randrange(_MAX_DELAY_TURNS)):
                await asyncio.sleep(0)

    async def _suffer_faults(self, rank: int) -> None:
        step = self._num_sent[rank]
        self._num_sent[rank] += 1
        fault = self._faults.get((rank, step))
        if fault is not None and fault.error is not None:
            raise fault.error
        if fault is not None and fault.kind == "drop":
            self.drop_peer(rank)
        if fault is not None and fault.kind == "hang":
            self._hung.add(rank)
        if rank in self._hung:
            await asyncio.Event().wait()
        self._raise_if_dropped(rank)

    def _raise_if_dropped(self, *ranks: int) -> None:
        for rank in ranks:
            if rank in self._dropped:
                raise self._dropped_error(rank)

    def _dropped_error(self, rank: int) -> PeerLost:
        return PeerLost(f"{self._names.of(rank)} is lost: it was dropped", rank=rank)

    def _set_fault(self, rank: int, step: int, fault: _Fault) -> None:
        self._check_rank(rank)
        if step < self._num_sent[rank]:
            raise ConfigError(
                f"step must be one to come: rank {rank} has sent {self._num_sent[rank]} messages, "
                f"got {step}"
            )
        self._faults[rank, step] = fault

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ConfigError(f"rank must be in [0, {self.size}), got {rank}")


class LocalTransport:
    """One rank's end of a LocalNetwork."""

    def __init__(self, network: LocalNetwork, *, rank: int, mailbox: Mailbox[Message]) -> None:
        self._network = network
        self._rank = rank
        self._mailbox = mailbox

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._network.size

    @property
    def mailbox(self) -> Mailbox[Message]:
        """Where messages to this rank wait."""
        return self._mailbox

    async def send(self, peer_rank: int, *, envelope: Envelope, tensor: torch.Tensor) -> None:
        """Deliver a copy of the tensor."""
        message = Message(
            source_rank=self._rank,
            incarnation=self._mailbox.incarnation,
            envelope=envelope,
            tensor=own_copy(tensor),
        )
        await self._network.deliver(message, peer_rank)

    def can_send_now(self, peer_rank: int, *, num_bytes: int) -> bool:
        """Never: each delivery may be delayed on purpose."""
        return False

    async def notify_abort(self, cause: str) -> None:
        """Abort the other ranks' mailboxes."""
        await self._network.abort_peers(
            self._rank, incarnation=self._mailbox.incarnation, cause=cause
        )

    async def close(self) -> None:
        """Leave; the other ranks find this one gone."""
        self._mailbox.abort(f"rank {self._rank} has left the group")
        self._network.leave(self._rank, incarnation=self._mailbox.incarnation)
