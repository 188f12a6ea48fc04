"""Sockets between the computing threads of a group's ranks, and one swap of messages over them.

    rank 0  <-- one TCP connection -->  rank 1        one for each pair, made by `direct_opener`

A message over the group's own backend passes at least two more threads, the event loops', and on a
busy machine each wake costs as much as the message. Here the thread that needs the sum writes and
reads itself. What is written is plain, as it is over a channel without TLS.
"""

import contextlib
import os
import select
import socket
import struct
import time
import weakref
from collections.abc import Callable, Mapping, Sequence

HEAD_BYTES = 128
"""Of each message."""

_SCRAP_BYTES = 64 * 1024
_LENGTH = struct.Struct("<Q")

# How long a thread looks again and again before it sleeps. A rank that sleeps is woken on the core
# of who wakes it, where the two then take turns.
_SPIN_SECONDS = 2e-3


class LinkEnded(Exception):
    """A peer's connection is at its end. For callers inside `stagemesh.comm`."""

    def __init__(self, peer: int, reason: str) -> None:
        super().__init__(reason)
        self.peer = peer


class SwapTimeout(Exception):
    """A deadline passed while these peers were waited for."""

    def __init__(self, peers: Sequence[int]) -> None:
        super().__init__(f"waiting for ranks {list(peers)}")
        self.peers = list(peers)


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
        self.num_scrap = _LENGTH.unpack_from(self.head, HEAD_BYTES - _LENGTH.size)[0]


class DirectLinks:
    """A connected socket to each other rank. One thread swaps; any may `shut`."""

    def __init__(self, sockets: Mapping[int, socket.socket], *, spins: bool) -> None:
        """Take over sockets.

        Args:
            sockets: by rank.
            spins: whether to look for bytes for a moment before sleeping.
        """
        self._sockets = dict(sockets)
        self._spin_seconds = _SPIN_SECONDS if spins else 0.0
        self._scrap = memoryview(bytearray(_SCRAP_BYTES))
        for each in self._sockets.values():
            each.setblocking(False)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Also for a group that nobody closes, as its process ends.
        self._free = weakref.finalize(self, _close_all, tuple(self._sockets.values()))

    @property
    def peers(self) -> list[int]:
        """All other ranks."""
        return sorted(self._sockets)

    def swap(
        self,
        outgoing: Mapping[int, Sequence[memoryview]],
        incoming: Mapping[int, memoryview],
        *,
        is_expected: Callable[[int, memoryview], bool],
        seconds: float,
    ) -> None:
        """Send each peer its message, and receive each one's.

        Args:
            outgoing: the pieces of a message by rank, of which the first is its head.
            incoming: where each payload goes, by rank.
            is_expected: is asked with each head. A message with another one is read to its end, as
                long as it says it is in its last eight bytes, and dropped.
            seconds: until it must have ended.

        Raises:
            LinkEnded: a peer's connection is at its end.
            SwapTimeout: the time has passed.
        """
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
        [(peer, link)] = self._sockets.items()
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
                raise LinkEnded(peer, _text(error)) from error
            if not count and len(room):
                raise LinkEnded(peer, "its connection was closed")
            quiet_since = 0.0
            if incoming.take(count) and head != expected:
                is_same = False
                incoming.drop()
            room = incoming.room(self._scrap)
        return is_same

    def shut(self) -> None:
        """End all connections: who waits in one, here or there, is woken. Thread-safe."""
        for each in self._sockets.values():
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the sockets; no swap may be under way."""
        self.shut()
        self._free()

    def _send(self, sending: dict[int, list[memoryview]]) -> bool:
        is_busy = False
        for peer in list(sending):
            pieces = sending[peer]
            try:
                count = self._sockets[peer].sendmsg(pieces)
            except BlockingIOError:
                continue
            except OSError as error:
                raise LinkEnded(peer, _text(error)) from error
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
                    count = self._sockets[peer].recv_into(room)
                except BlockingIOError:
                    continue
                except OSError as error:
                    raise LinkEnded(peer, _text(error)) from error
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
                poll.register(self._sockets[peer], events)
        poll.poll(max(seconds, 1e-3) * 1e3)


def _close_all(sockets: Sequence[socket.socket]) -> None:
    for each in sockets:
        each.close()


def _text(error: OSError) -> str:
    return error.strerror or type(error).__name__
