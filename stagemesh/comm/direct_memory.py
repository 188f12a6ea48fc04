"""MemoryLinks: messages through memory that all ranks map; their connections tell who has gone.

A rank writes a message into the next slot of its channel to a peer and then its number; the peer
looks at that number until it is the one it waits for. Neither enters the kernel unless it waits
for long: then it also watches the connections, which end when a peer dies, leaves or aborts.

Two slots are enough, without any word that a message was read: every message to a peer is answered
by one from it, so who has received message n of the peer, which it wrote after it had read n - 1,
may write n + 1 into the slot of n - 1.

Large payloads go in parts of `SLOT_BYTES`, each of them a message; only the first has a head, so
ranks whose calls differ send no second part.
"""

import os
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from stagemesh.comm.direct_links import (
    SPIN_SECONDS,
    DirectLinks,
    LinkEnded,
    PairSwap,
    SwapTimeout,
    reason_of,
)
from stagemesh.comm.direct_message import pack_head, renumber
from stagemesh.comm.direct_region import SLOT_BYTES, SharedRegion, Slot

# So many looks between two turns that are offered to others.
_LOOKS = 64

# Who sleeps looks again after this part of the time that it has waited, and at least each
# millisecond.
_NAP_SHARE = 0.125
_LONGEST_NAP_SECONDS = 1e-3


class _Channel:
    """Both directions between this rank and a peer."""

    __slots__ = ("count", "incoming", "outgoing")

    def __init__(self, region: SharedRegion, rank: int, peer: int) -> None:
        self.outgoing = region.slots(rank, peer)
        self.incoming = region.slots(peer, rank)
        self.count = 0
        """Messages so far, the same in both directions."""

    def has_arrived(self, number: int) -> bool:
        """Whether the peer has written its message of this number."""
        return self.incoming[number & 1].number[0] == number


class MemoryLinks(DirectLinks):
    """See the module's text. For ranks that have a core each."""

    pair_bytes = SLOT_BYTES

    def __init__(
        self, sockets: Mapping[int, socket.socket], region: SharedRegion, *, rank: int
    ) -> None:
        """Take over the sockets; `rank` is this one."""
        super().__init__(sockets)
        self.region = region
        self.channels = {peer: _Channel(region, rank, peer) for peer in self.sockets}

    def swap(
        self,
        outgoing: Mapping[int, Sequence[memoryview]],
        incoming: Mapping[int, memoryview],
        *,
        is_expected: Callable[[int, memoryview], bool],
        seconds: float,
    ) -> None:
        """See DirectLinks."""
        deadline = time.perf_counter() + seconds
        payloads = {
            peer: pieces[1] if len(pieces) > 1 else pieces[0][:0]
            for peer, pieces in outgoing.items()
        }
        pending = self.peers
        others: set[int] = set()
        start = 0
        while pending:
            end = start + SLOT_BYTES
            for peer in pending:
                channel = self.channels[peer]
                channel.count += 1
                slot = channel.outgoing[channel.count & 1]
                if not start:
                    slot.head[:] = outgoing[peer][0]
                part = payloads[peer][start:end]
                slot.payload[: len(part)] = part
                slot.number[0] = channel.count
            unread = list(pending)
            for peer in pending:
                slot = self.receive(peer, unread, deadline)
                unread.remove(peer)
                if not start and not is_expected(peer, slot.head):
                    others.add(peer)
                    continue
                room = incoming[peer][start:end]
                room[:] = slot.payload[: len(room)]
            start = end
            pending = [
                peer
                for peer in pending
                if peer not in others and start < max(len(payloads[peer]), len(incoming[peer]))
            ]

    def prepare(self, like: torch.Tensor, call: bytes) -> PairSwap:
        """See DirectLinks."""
        return _MemoryPair(self, like, call)

    def receive(self, peer: int, unread: Sequence[int], deadline: float) -> Slot:
        """Wait for the message that answers the last one to `peer`.

        Args:
            peer: whose.
            unread: peers of which a message is still waited for: their end is noticed, too.
            deadline: on the clock of `time.perf_counter`.

        Raises:
            LinkEnded, SwapTimeout: as in `swap`.
        """
        channel = self.channels[peer]
        wanted = channel.count
        slot = channel.incoming[wanted & 1]
        number = slot.number
        for _ in range(_LOOKS):
            if number[0] == wanted:
                return slot
        began = time.perf_counter()
        while time.perf_counter() - began < SPIN_SECONDS:
            os.sched_yield()
            for _ in range(_LOOKS):
                if number[0] == wanted:
                    return slot
        self._sleep(channel, wanted, unread, began=began, deadline=deadline)
        return slot

    def _sleep(
        self,
        channel: _Channel,
        wanted: int,
        unread: Sequence[int],
        *,
        began: float,
        deadline: float,
    ) -> None:
        peers = {self.sockets[peer].fileno(): peer for peer in unread}
        poll = select.poll()
        for descriptor, peer in peers.items():
            if descriptor < 0:
                raise LinkEnded(peer, "its connection was closed")
            poll.register(descriptor, select.POLLIN)
        while not channel.has_arrived(wanted):
            now = time.perf_counter()
            if now >= deadline:
                raise SwapTimeout([p for p in unread if not self._is_here(p)])
            nap = (now - began) * _NAP_SHARE
            if nap < _LONGEST_NAP_SECONDS:
                time.sleep(nap)
                ended = poll.poll(0)
            else:
                ended = poll.poll(_LONGEST_NAP_SECONDS * 1e3)
            for descriptor, _ in ended:
                # What a peer has written before it left counts.
                if not self._is_here(peers[descriptor]):
                    raise LinkEnded(peers[descriptor], self._reason(peers[descriptor]))
                poll.unregister(descriptor)

    def _is_here(self, peer: int) -> bool:
        channel = self.channels[peer]
        return channel.has_arrived(channel.count)

    def _reason(self, peer: int) -> str:
        try:
            more = self.sockets[peer].recv(1, socket.MSG_PEEK)
        except OSError as error:
            return reason_of(error)
        return "it sent what nobody waits for" if more else "its connection was closed"


class _MemoryPair(PairSwap):
    """Tensors that lie in both slots of both directions."""

    def __init__(self, links: MemoryLinks, like: torch.Tensor, call: bytes) -> None:
        self._links = links
        [self._peer] = links.peers
        self._unread = [self._peer]
        self._channel = links.channels[self._peer]
        num_bytes = like.numel() * like.element_size()
        self._head = pack_head(0, call, num_bytes)
        self._told = memoryview(self._head)

        def placed(slot: Slot) -> torch.Tensor:
            return torch.frombuffer(
                links.region.memory, dtype=like.dtype, count=like.numel(), offset=slot.offset
            )

        self._own = tuple(placed(slot) for slot in self._channel.outgoing)
        self._theirs = tuple(placed(slot) for slot in self._channel.incoming)

    @property
    def own_head(self) -> memoryview:
        """See PairSwap."""
        return memoryview(self._head)

    @property
    def told_head(self) -> memoryview:
        """See PairSwap."""
        return self._told

    def run(self, flat: torch.Tensor, sequence: int, *, seconds: float) -> torch.Tensor | None:
        """See PairSwap."""
        deadline = time.perf_counter() + seconds
        channel = self._channel
        channel.count = count = channel.count + 1
        turn = count & 1
        slot = channel.outgoing[turn]
        self._own[turn].copy_(flat)
        renumber(self._head, sequence)
        slot.head[:] = self._head
        slot.number[0] = count
        told = self._links.receive(self._peer, self._unread, deadline).head
        if told.tobytes() != self._head:
            self._told = told
            return None
        return self._theirs[turn]
