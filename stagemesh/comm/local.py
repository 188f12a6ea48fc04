"""A transport between the ranks of one process: for tests, and for trying a group without hosts.

    network = LocalNetwork(size=2)
    groups = [AsyncGroup(network.join(rank), group_id="g", timeout_seconds=5.0) for rank in (0, 1)]

It keeps the promises of the real one (own memory for the receiver, bounded mailboxes, order only
per source and tag) and no more: with an `order` it delays deliveries by a seeded number of turns of
the loop, so that interleavings are many and can be repeated.
"""

import asyncio
import random
from collections import defaultdict

import torch

from stagemesh.comm.mailbox import DEFAULT_CAPACITY_BYTES, CreditWindow, Mailbox, message_cost
from stagemesh.comm.transport import Envelope, Message
from stagemesh.errors import ConfigError, GroupAborted, PeerLost

_MAX_DELAY_TURNS = 12


class LocalNetwork:
    """The wires between `size` ranks of one process."""

    def __init__(
        self,
        *,
        size: int,
        order: random.Random | None = None,
        capacity_bytes: int = DEFAULT_CAPACITY_BYTES,
    ) -> None:
        """Make the wires; ranks join later.

        Args:
            size: number of ranks.
            order: when given, deliveries of different (source, tag) pairs overtake each other.
            capacity_bytes: bound of what one source may have waiting at one rank.
        """
        if size < 1:
            raise ConfigError(f"size must be at least 1, got {size}")
        self.size = size
        self._order = order
        self._capacity = capacity_bytes
        self._mailboxes: dict[int, Mailbox[Message]] = {}
        self._dropped: set[int] = set()
        self._joined = asyncio.Event()
        self._lanes: defaultdict[tuple[int, int, int], asyncio.Lock] = defaultdict(asyncio.Lock)
        self._windows: dict[tuple[int, int], CreditWindow] = {}

    def join(self, rank: int, *, incarnation: int = 1) -> "LocalTransport":
        """The transport of a rank. A later incarnation takes the place of the one before."""
        if not 0 <= rank < self.size:
            raise ConfigError(f"rank must be in [0, {self.size}), got {rank}")
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

    def drop_peer(self, rank: int) -> None:
        """Lose a rank, as if its process had died."""
        self._dropped.add(rank)
        for peer, mailbox in self._mailboxes.items():
            if peer != rank:
                mailbox.fail_source(rank, f"rank {rank} is lost: it was dropped")
        for (source, target), window in self._windows.items():
            if rank in (source, target):
                window.fail(lambda: _dropped_error(rank))

    def leave(self, rank: int, *, incarnation: int) -> None:
        """Tell the other ranks of an incarnation that a rank has left."""
        for peer, mailbox in self._mailboxes.items():
            if peer != rank and mailbox.incarnation == incarnation:
                mailbox.fail_source(rank, f"rank {rank} is lost: it left the group")

    def window(self, source: int, target: int) -> CreditWindow:
        """Credit from one rank to another."""
        return self._windows[source, target]

    async def deliver(self, message: Message, target: int) -> None:
        """Bring a message to a rank's mailbox, once that rank has joined."""
        async with self._lanes[message.source_rank, target, message.tag]:
            mailbox = await self._mailbox_for(target, message.incarnation)
            await self._delay()
            await self.window(message.source_rank, target).acquire(message_cost(message.num_bytes))
            if {message.source_rank, target} & self._dropped:
                raise _dropped_error(target)
            if not mailbox.put(message):
                raise GroupAborted(f"rank {target} has left incarnation {message.incarnation}")

    async def abort_peers(self, rank: int, *, incarnation: int, cause: str) -> None:
        """Abort the mailboxes of all other ranks of an incarnation."""
        for peer, mailbox in self._mailboxes.items():
            if peer != rank and mailbox.incarnation == incarnation:
                mailbox.abort(f"rank {rank} aborted the group: {cause}")

    async def _mailbox_for(self, target: int, incarnation: int) -> Mailbox[Message]:
        while True:
            if target in self._dropped:
                raise _dropped_error(target)
            mailbox = self._mailboxes.get(target)
            if mailbox is not None and mailbox.incarnation >= incarnation:
                return mailbox
            self._joined.clear()
            await self._joined.wait()

    async def _delay(self) -> None:
        if self._order is not None:
            for _ in range(self._order.randrange(_MAX_DELAY_TURNS)):
                await asyncio.sleep(0)


def _dropped_error(rank: int) -> PeerLost:
    return PeerLost(f"rank {rank} is lost: it was dropped", rank=rank)


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
            tensor=tensor.detach().clone(memory_format=torch.contiguous_format),
        )
        await self._network.deliver(message, peer_rank)

    async def notify_abort(self, cause: str) -> None:
        """Abort the other ranks' mailboxes."""
        await self._network.abort_peers(
            self._rank, incarnation=self._mailbox.incarnation, cause=cause
        )

    async def close(self) -> None:
        """Leave; the other ranks find this one gone."""
        self._mailbox.abort(f"rank {self._rank} has left the group")
        self._network.leave(self._rank, incarnation=self._mailbox.incarnation)
