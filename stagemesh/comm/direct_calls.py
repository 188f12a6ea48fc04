"""DirectCalls: the numbered calls of connected ranks, whose errors are those of their group.

Each message begins with the call that it is of, so that ranks which call something else raise
CollectiveMismatch, and stay in step. Any other failure ends the links: nobody could tell where in
a message the next one begins.
"""

import contextlib
import threading
from collections.abc import Iterator, Mapping

import torch

from stagemesh.comm.direct_links import DirectLinks, LinkEnded, PairSwap, SwapTimeout
from stagemesh.comm.direct_message import (
    byte_view,
    describe,
    encode_call,
    is_of,
    pack_head,
)
from stagemesh.comm.process_group import ProcessGroup
from stagemesh.comm.reduce import ReduceOp
from stagemesh.comm.transport import TensorSpec
from stagemesh.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    ConfigError,
    GroupAborted,
    NotReady,
    PeerLost,
)

_FIND_ABORT_SECONDS = 1.5

_KEPT_BYTES = 16 * 2**20
"""Up to this size the memory for what arrives is kept."""

_KEPT_PAIRS = 16


def sum_call(tensor: torch.Tensor, op: ReduceOp) -> bytes:
    """The call of a reduction."""
    return encode_call(f"all_reduce({op.value}) on {TensorSpec.of(tensor)}")


class DirectCalls:
    """What one thread of each rank calls, one call at a time."""

    def __init__(self, group: ProcessGroup, links: DirectLinks) -> None:
        """Take over links between the ranks of a group."""
        self._group = group
        self.links = links
        self._names = group.async_group.names
        self._busy = threading.Lock()
        self._sequence = 0
        self._ended = ""
        self._kept = torch.empty(0, dtype=torch.uint8)
        self._pairs: dict[tuple[torch.dtype, torch.Size], PairSwap] = {}
        self.peers = links.peers
        """All other ranks."""
        self.pair_bytes = links.pair_bytes
        """Up to this size `add_pair` takes tensors."""

    @contextlib.contextmanager
    def calling(self, timeout: float | None) -> Iterator[float]:
        """One call; gives its seconds, and makes its errors those of the group."""
        seconds = self._group.timeout_seconds if timeout is None else timeout
        with self._busy:
            try:
                self._check_usable()
                yield seconds
            except BaseException as error:
                self._fail(error, seconds)
                raise

    def add_pair(self, tensor: torch.Tensor) -> None:
        """Sum of a small tensor of two ranks, in place: what does not change is made once.

        Args:
            tensor: contiguous, on the CPU, of a type whose sums of two have one rounding.
        """
        key = (tensor.dtype, tensor.shape)
        pair = self._pairs.get(key) or self._prepare(tensor)
        flat = tensor.view(-1)
        seconds = self._group.timeout_seconds
        with self._busy:
            try:
                if self._ended:
                    self._check_usable()
                sequence = self._sequence
                self._sequence = sequence + 1
                received = pair.run(flat, sequence, seconds=seconds)
            except BaseException as error:
                self._fail(error, seconds)
                raise
            if received is None:
                told = describe(pair.told_head)
                raise self._mismatch({1 - self._group.rank: told}, describe(pair.own_head))
            flat.add_(received)

    def swap(
        self,
        call: bytes,
        outgoing: Mapping[int, torch.Tensor],
        num_bytes: int,
        *,
        seconds: float,
    ) -> dict[int, torch.Tensor]:
        """Send each peer its bytes; so many of each one, in memory that is used again."""
        memory = self._memory(num_bytes * len(self.peers), outgoing[self.peers[0]].dtype)
        parts = {
            peer: memory[index * num_bytes : (index + 1) * num_bytes]
            for index, peer in enumerate(self.peers)
        }
        self.exchange(call, outgoing, parts, seconds=seconds)
        return parts

    def exchange(
        self,
        call: bytes,
        outgoing: Mapping[int, torch.Tensor],
        incoming: Mapping[int, torch.Tensor],
        *,
        seconds: float,
    ) -> None:
        """One round, in which every rank tells every other its call.

        Raises:
            CollectiveMismatch: a rank called something else.
        """
        sequence = self._sequence
        self._sequence += 1
        other: dict[int, str] = {}

        def is_expected(peer: int, head: memoryview) -> bool:
            if is_of(head, sequence, call):
                return True
            other[peer] = describe(head)
            return False

        def message(payload: torch.Tensor) -> list[memoryview]:
            head = memoryview(pack_head(sequence, call, payload.numel()))
            return [head, byte_view(payload)] if payload.numel() else [head]

        self.links.swap(
            {peer: message(outgoing[peer]) for peer in self.peers},
            {peer: byte_view(incoming[peer]) for peer in self.peers},
            is_expected=is_expected,
            seconds=seconds,
        )
        if other:
            raise self._mismatch(other, describe(pack_head(sequence, call, 0)))

    def end(self) -> None:
        """Wake who is in a call, which frees the links; else free them here. Thread-safe."""
        self._ended = self._ended or "the group was aborted or left"
        self.links.shut()
        if self._busy.acquire(blocking=False):
            try:
                self.links.close()
            finally:
                self._busy.release()

    def _prepare(self, tensor: torch.Tensor) -> PairSwap:
        if len(self._pairs) >= _KEPT_PAIRS:
            self._pairs.clear()
        # Not of inference mode, if this call is and a later one is not.
        with torch.inference_mode(False):
            pair = self.links.prepare(tensor, sum_call(tensor, ReduceOp.SUM))
        self._pairs[tensor.dtype, tensor.shape] = pair
        return pair

    def _memory(self, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        if num_bytes > _KEPT_BYTES:
            return torch.empty(num_bytes, dtype=dtype)
        if self._kept.numel() < num_bytes:
            with torch.inference_mode(False):
                self._kept = torch.empty(num_bytes, dtype=torch.uint8)
        return self._kept[:num_bytes].view(dtype)

    def _mismatch(self, other: dict[int, str], own: str) -> CollectiveMismatch:
        told = other | {self._group.rank: own}
        text = ", ".join(f"{self._names.of(rank)} called {told[rank]}" for rank in sorted(told))
        return CollectiveMismatch(f"ranks disagree in group {self._group.group_id}: {text}")

    def _fail(self, error: BaseException, seconds: float) -> None:
        """End the links, unless the ranks are still in step, and say what the group would say."""
        if isinstance(error, (CollectiveMismatch, ConfigError)):
            return
        what = "a call timed out" if isinstance(error, SwapTimeout) else type(error).__name__
        self._ended = self._ended or f"{what}: {error}"
        self.links.close()
        if isinstance(error, LinkEnded):
            # Who aborts ends its links first: perhaps that is what we have seen.
            with contextlib.suppress(NotReady):
                self._group.find_abort(_FIND_ABORT_SECONDS)
            who = self._names.of(error.peer)
            raise PeerLost(f"{who} is lost: {error}", rank=error.peer) from error
        if isinstance(error, SwapTimeout):
            raise CollectiveTimeout(
                f"a call in group {self._group.group_id} timed out on "
                f"{self._names.of(self._group.rank)} after {seconds:g} s: waiting for "
                f"{self._names.of_all(error.peers)}"
            ) from error

    def _check_usable(self) -> None:
        if self._ended:
            with contextlib.suppress(NotReady):
                self._group.find_abort(0.0)
            raise GroupAborted(
                f"the links of group {self._group.group_id} have ended: {self._ended}"
            )
