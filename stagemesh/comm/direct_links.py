"""DirectLinks: how the computing threads of a group's ranks exchange messages themselves.

    direct_sockets    a TCP connection between each two ranks
    direct_memory     memory that ranks of one host share, beside the connections
    direct_opener     makes one or the other

A message over the group's own backend passes at least two more threads, the event loops', and on a
busy machine each wake costs as much as the message. Here the thread that needs the sum writes and
reads itself. What is written is plain, as it is over a channel without TLS.
"""

import contextlib
import socket
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch

SPIN_SECONDS = 2e-3
"""How long a thread looks again and again before it sleeps. A rank that sleeps is woken on the core
of who wakes it, where the two then take turns."""


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


class PairSwap(ABC):
    """The exchange of a small tensor of one dtype and shape between two ranks, made once."""

    @abstractmethod
    def run(self, flat: torch.Tensor, sequence: int, *, seconds: float) -> torch.Tensor | None:
        """Send and receive.

        Args:
            flat: this rank's, [elements].
            sequence: number of the call.
            seconds: until it must have ended.

        Returns:
            The peer's, [elements], in memory that the next but one exchange may write to; None
            where its call is another one.

        Raises:
            LinkEnded, SwapTimeout: as in `DirectLinks.swap`.
        """

    @property
    @abstractmethod
    def own_head(self) -> memoryview:
        """The head that was sent last."""

    @property
    @abstractmethod
    def told_head(self) -> memoryview:
        """The head that came with another call."""


class DirectLinks(ABC):
    """Messages to and from all other ranks. One thread swaps; any may `shut`."""

    pair_bytes: int
    """Up to this size `prepare` takes tensors."""

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        """Take over a connected socket to each other rank."""
        self.sockets = dict(sockets)
        for each in self.sockets.values():
            each.setblocking(False)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Also for a group that nobody closes, as its process ends.
        self._free = weakref.finalize(self, _close_all, tuple(self.sockets.values()))

    @property
    def peers(self) -> list[int]:
        """All other ranks."""
        return sorted(self.sockets)

    @abstractmethod
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
            outgoing: head and payload of each peer's message; no payload where it is empty.
            incoming: where each payload goes, by rank.
            is_expected: is asked with each head. A message with another one is dropped, with the
                payload that its head tells.
            seconds: until it must have ended.

        Raises:
            LinkEnded: a peer's connection is at its end.
            SwapTimeout: the time has passed.
        """

    @abstractmethod
    def prepare(self, like: torch.Tensor, call: bytes) -> PairSwap:
        """What `PairSwap` says, for two ranks.

        Args:
            like: a tensor of that dtype and shape, of up to `pair_bytes`.
            call: as heads have it.
        """

    def shut(self) -> None:
        """End all connections: who waits in one, here or there, is woken. Thread-safe."""
        for each in self.sockets.values():
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the sockets; no swap may be under way."""
        self.shut()
        self._free()


def _close_all(sockets: Sequence[socket.socket]) -> None:
    for each in sockets:
        each.close()


def reason_of(error: OSError) -> str:
    """What the system says, in a few words."""
    return error.strerror or type(error).__name__
