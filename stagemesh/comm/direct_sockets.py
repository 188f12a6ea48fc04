"""SocketLinks: messages over a TCP connection between each two ranks.

rank 0  <-- one TCP connection -->  rank 1        one for each pair, made by `direct_opener`
"""

import contextlib
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
from stagemesh.comm.direct_message import (
    HEAD_BYTES,
    byte_view,
    pack_head,
    payload_bytes,
    renumber,
)

_SCRAP_BYTES = 64 * 1024


class _Incoming:
    """One peer's message: its head, and then as many bytes as were expected, or as it tells."""

    __slots__ = ("head", "num_scrap", "payload", "position")

    def __init__(self, payload: memoryview, head: memoryview | None = None) -> None:
        self.head = memoryview(bytearray(HEAD_BYTES)) if head is None else head
        self.payload = payload
        self.position = 0
        self.num_scrap = 0

    def room(self, scrap: memoryview) -> memoryview:
        """Where the next bytes go; nothing once all are here."""
        if self.position < HEAD_BYTES:
            return self.head[self.position :]
        if self.num_scrap:
            return scrap[: self.num_scrap]
        return self.payload[self.position - HEAD_BYTES :]

    def take(self, count: int) -> bool:
        """So many bytes came; whether the head is whole with them."""
        if self.num_scrap and self.position >= HEAD_BYTES:
            self.num_scrap -= count
            return False
        before = self.position
        self.position += count
        return before < HEAD_BYTES <= self.position

    def drop(self) -> None:
        """The peer's call is another one: read what it sends, and keep nothing."""
        self.payload = self.payload[:0]
        self.num_scrap = payload_bytes(self.head)


class SocketLinks(DirectLinks):
    """See the module's text."""

    pair_bytes = 64 * 1024

    def __init__(self, sockets: Mapping[int, socket.socket], *, spins: bool) -> None:
        """Take over sockets.

        Args:
            sockets: by rank.
            spins: whether to look for bytes for a moment before sleeping.
        """
        super().__init__(sockets)
        self._spin_seconds = SPIN_SECONDS if spins else 0.0
        self._scrap = memoryview(bytearray(_SCRAP_BYTES))

    def swap(
        self,
        outgoing: Mapping[int, Sequence[memoryview]],
        incoming: Mapping[int, memoryview],
        *,
        is_expected: Callable[[int, memoryview], bool],
        seconds: float,
    ) -> None:
        """See DirectLinks. A message that is not expected is read to its end, and dropped."""
        sending = {peer: list(pieces) for peer, pieces in outgoing.items()}
        receiving = {peer: _Incoming(view) for peer, view in incoming.items()}
        quiet_since = time.perf_counter()
        deadline = quiet_since + seconds
        while sending or receiving:
            is_busy = self._send(sending)
            is_busy = self._receive(receiving, is_expected) or is_busy
            if is_busy:
                quiet_since = 0.0
                continue
            now = time.perf_counter()
            quiet_since = quiet_since or now
            if now - quiet_since < self._spin_seconds:
                os.sched_yield()
                continue
            if now >= deadline:
                raise SwapTimeout(sorted({*sending, *receiving}))
            self._sleep(sending, receiving, deadline - now)

    def prepare(self, like: torch.Tensor, call: bytes) -> PairSwap:
        """See DirectLinks."""
        return _SocketPair(self, like, call)

    def pair(
        self, message: memoryview, head: memoryview, payload: memoryview, *, seconds: float
    ) -> bool:
        """As `swap`, of two ranks that expect the same head of each other, with fewer steps.

        Args:
            message: head and payload for the peer.
            head: where the peer's head goes.
            payload: where its payload goes.
            seconds: until it must have ended.

        Returns:
            Whether the heads are equal; where not, the payload was read and dropped.

        Raises:
            LinkEnded, SwapTimeout: as in `swap`.
        """
        [(peer, link)] = self.sockets.items()
        expected = bytes(message[:HEAD_BYTES])
        incoming = _Incoming(payload, head)
        room = head
        quiet_since = 0.0
        deadline = time.perf_counter() + seconds
        is_same = True
        while len(message) or len(room):
            count = 0
            try:
                if len(message):
                    # Both take what arrives even while neither can send.
                    with contextlib.suppress(BlockingIOError):
                        message = message[link.send(message) :]
                if len(room):
                    count = link.recv_into(room)
                elif len(message):
                    raise BlockingIOError
            except BlockingIOError:
                now = time.perf_counter()
                quiet_since = quiet_since or now
                if now - quiet_since < self._spin_seconds:
                    os.sched_yield()
                elif now < deadline:
                    sending: dict[int, Sequence[memoryview]] = {peer: ()} if len(message) else {}
                    self._sleep(sending, {peer: incoming}, deadline - now)
                else:
                    raise SwapTimeout([peer]) from None
                continue
            except OSError as error:
                raise LinkEnded(peer, reason_of(error)) from error
            if not count and len(room):
                raise LinkEnded(peer, "its connection was closed")
            quiet_since = 0.0
            if incoming.take(count) and head != expected:
                is_same = False
                incoming.drop()
            room = incoming.room(self._scrap)
        return is_same

    def _send(self, sending: dict[int, list[memoryview]]) -> bool:
        is_busy = False
        for peer in list(sending):
            pieces = sending[peer]
            try:
                count = self.sockets[peer].sendmsg(pieces)
            except BlockingIOError:
                continue
            except OSError as error:
                raise LinkEnded(peer, reason_of(error)) from error
            is_busy = True
            while pieces and count >= len(pieces[0]):
                count -= len(pieces.pop(0))
            if pieces:
                pieces[0] = pieces[0][count:]
            else:
                del sending[peer]
        return is_busy

    def _receive(
        self,
        receiving: dict[int, _Incoming],
        is_expected: Callable[[int, memoryview], bool],
    ) -> bool:
        is_busy = False
        for peer in list(receiving):
            message = receiving[peer]
            room = message.room(self._scrap)
            if len(room):
                try:
                    count = self.sockets[peer].recv_into(room)
                except BlockingIOError:
                    continue
                except OSError as error:
                    raise LinkEnded(peer, reason_of(error)) from error
                if not count:
                    raise LinkEnded(peer, "its connection was closed")
                is_busy = True
                if message.take(count) and not is_expected(peer, message.head):
                    message.drop()
            if not len(message.room(self._scrap)):
                del receiving[peer]
        return is_busy

    def _sleep(
        self,
        sending: Mapping[int, Sequence[memoryview]],
        receiving: Mapping[int, _Incoming],
        seconds: float,
    ) -> None:
        poll = select.poll()
        for peer in {*sending, *receiving}:
            events = (select.POLLOUT if peer in sending else 0) | (
                select.POLLIN if peer in receiving else 0
            )
            with contextlib.suppress(ValueError):  # closed: the next send or receive says so
                poll.register(self.sockets[peer], events)
        poll.poll(max(seconds, 1e-3) * 1e3)


class _SocketPair(PairSwap):
    """Buffers of one message in each direction."""

    def __init__(self, links: SocketLinks, like: torch.Tensor, call: bytes) -> None:
        self._links = links
        num_bytes = like.numel() * like.element_size()
        ours = torch.empty(HEAD_BYTES + num_bytes, dtype=torch.uint8)
        theirs = torch.empty_like(ours)
        self._message, arrived = byte_view(ours), byte_view(theirs)
        self._message[:HEAD_BYTES] = pack_head(0, call, num_bytes)
        self._head, self._payload = arrived[:HEAD_BYTES], arrived[HEAD_BYTES:]
        self._own = ours[HEAD_BYTES:].view(like.dtype)
        self._received = theirs[HEAD_BYTES:].view(like.dtype)

    @property
    def own_head(self) -> memoryview:
        """See PairSwap."""
        return self._message[:HEAD_BYTES]

    @property
    def told_head(self) -> memoryview:
        """See PairSwap."""
        return self._head

    def run(self, flat: torch.Tensor, sequence: int, *, seconds: float) -> torch.Tensor | None:
        """See PairSwap."""
        renumber(self._message, sequence)
        self._own.copy_(flat)
        is_same = self._links.pair(self._message, self._head, self._payload, seconds=seconds)
        return self._received if is_same else None
