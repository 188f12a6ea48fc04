"""DirectGroup: what a computing thread asks of its group in each step, without its event loops.

    until `connect`, and where ranks cannot connect      the group's own operations
    after it                                             direct_calls, over direct_links

The results are those of the group, bit for bit, and so are the errors. R is the number of ranks, N
the bytes of a tensor.

    all_reduce     two ranks, or small    each sends its N bytes to each other, and adds up
                   else                   rank p adds up piece p of R, and sends the sum to all
    all_gather     always                 each sends its bytes to each other
"""

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from stagemesh.comm.arguments import check_tensor, rows_per_rank
from stagemesh.comm.collectives import split_evenly
from stagemesh.comm.direct_calls import DirectCalls, sum_call
from stagemesh.comm.direct_links import DirectLinks
from stagemesh.comm.direct_message import encode_call
from stagemesh.comm.direct_opener import open_links
from stagemesh.comm.process_group import ProcessGroup
from stagemesh.comm.raw import flat_bytes, write, write_elements
from stagemesh.comm.reduce import ReduceOp, check_reducible, reduce_in_order
from stagemesh.comm.transport import TensorSpec

logger = logging.getLogger(__name__)

_CONNECT_SECONDS = 10.0
_WHOLE_BYTES = 256 * 1024
"""Up to this size tensors of more than two ranks travel whole: one hop instead of two."""

# Sums of two have one order, and one rounding, in each of these types.
_ADDED_IN_PLACE = frozenset((torch.float32, torch.float64, torch.bfloat16, torch.float16))


class RankGroup(Protocol):
    """What draws over ranks need of a group: a DirectGroup or a ProcessGroup."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up over all ranks, in place."""

    def all_gather_tensor(self, output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        """Bring the tensors of all ranks to all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSpent:
    """What a thread has asked of its group so far."""

    num_calls: int
    seconds: float
    """Within them, waiting for the other ranks included."""


class DirectGroup:
    """The sums and gathers of one thread of a rank. Not for several threads at once."""

    def __init__(self, group: ProcessGroup) -> None:
        """Wrap a group; nothing is sent yet."""
        self._group = group
        self._calls: DirectCalls | None = None
        self._is_bypassed = False
        self._is_pair = group.size == 2
        self._num_calls = 0
        self._seconds = 0.0

    @property
    def rank(self) -> int:
        """This rank."""
        return self._group.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._group.size

    @property
    def is_direct(self) -> bool:
        """Whether the ranks are connected."""
        return self._calls is not None

    @property
    def links(self) -> DirectLinks | None:
        """Between the ranks, where they are connected."""
        return None if self._calls is None else self._calls.links

    @property
    def time_spent(self) -> TimeSpent:
        """Calls since it was made, and the time in them."""
        return TimeSpent(num_calls=self._num_calls, seconds=self._seconds)

    def connect(self, *, within_process: bool = False, shares_memory: bool = True) -> None:
        """Connect the ranks directly, where that is possible. All call it alike, as a collective.

        Args:
            within_process: also ranks that are threads of one process.
            shares_memory: let ranks of one host exchange messages through memory.
        """
        if self._calls is not None or self.size == 1:
            return
        links = open_links(
            self._group,
            timeout_seconds=min(_CONNECT_SECONDS, self._group.timeout_seconds),
            within_process=within_process,
            shares_memory=shares_memory,
        )
        if links is None:
            logger.debug("no direct links", extra={"group_id": self._group.group_id})
            return
        self._calls = DirectCalls(self._group, links)
        self._group.call_on_abort(self._calls.end)

    def bypass(self, *, is_on: bool) -> None:
        """Ask the group itself, as if there were no links, to compare the two; all ranks alike."""
        self._is_bypassed = is_on

    def close(self) -> None:
        """Let go of the connections; the group stays."""
        if self._calls is not None:
            self._calls.end()

    def all_reduce(
        self, tensor: torch.Tensor, *, op: ReduceOp = ReduceOp.SUM, timeout: float | None = None
    ) -> torch.Tensor:
        """As ProcessGroup's; a failure, other than a mismatch, ends the links."""
        started = time.perf_counter()
        calls = None if self._is_bypassed else self._calls
        try:
            if calls is None:
                self._group.all_reduce(tensor, op=op, timeout=timeout)
            elif op is ReduceOp.SUM and timeout is None and self._can_pair(tensor, calls):
                calls.add_pair(tensor)
            else:
                self._reduce(calls, tensor, op=op, timeout=timeout)
        finally:
            self._num_calls += 1
            self._seconds += time.perf_counter() - started
        return tensor

    def all_gather_tensor(
        self, output: torch.Tensor, input: torch.Tensor, *, timeout: float | None = None
    ) -> torch.Tensor:
        """As ProcessGroup's."""
        with self._timed():
            calls = self._calls
            if calls is None or self._is_bypassed:
                self._group.all_gather_tensor(output, input, timeout=timeout)
                return output
            check_tensor(output, name="output", is_written=True)
            rows = rows_per_rank(output, input, size=self.size, names=("output", "input"))
            call = encode_call(f"all_gather on {TensorSpec.of(input)}")
            own = flat_bytes(input)
            with calls.calling(timeout) as seconds:
                outgoing = dict.fromkeys(calls.peers, own)
                parts = calls.swap(call, outgoing, own.numel(), seconds=seconds)
                for rank, row in enumerate(rows):
                    write(row, [parts.get(rank, own)])
            return output

    def _can_pair(self, tensor: torch.Tensor, calls: DirectCalls) -> bool:
        """Whether this is the usual sum of a decode step, that of a small tensor of two ranks."""
        return (
            self._is_pair
            and tensor.dtype in _ADDED_IN_PLACE
            and 0 < tensor.nbytes <= calls.pair_bytes
            and tensor.is_cpu
            and tensor.is_contiguous()
            and torch.is_inference_mode_enabled()
        )

    def _reduce(
        self, calls: DirectCalls, tensor: torch.Tensor, *, op: ReduceOp, timeout: float | None
    ) -> None:
        """Any tensor of any number of ranks."""
        check_tensor(tensor, is_written=True)
        check_reducible(tensor.dtype, op)
        call = sum_call(tensor, op)
        own = flat_bytes(tensor)
        with calls.calling(timeout) as seconds:
            if self.size > 2 and own.numel() * (self.size - 1) > _WHOLE_BYTES:
                self._reduce_pieces(calls, tensor, own, call, op=op, seconds=seconds)
            else:
                outgoing = dict.fromkeys(calls.peers, own)
                parts = calls.swap(call, outgoing, own.numel(), seconds=seconds)
                self._add_up(tensor, own, parts, op=op)

    def _add_up(
        self,
        tensor: torch.Tensor,
        own: torch.Tensor,
        parts: Mapping[int, torch.Tensor],
        *,
        op: ReduceOp,
    ) -> None:
        # Outside of its mode torch lets nobody write to a tensor of inference mode.
        is_open = not tensor.is_inference() or torch.is_inference_mode_enabled()
        is_sum = op is ReduceOp.SUM and tensor.dtype in _ADDED_IN_PLACE
        if len(parts) == 1 and is_sum and is_open and tensor.is_contiguous():
            [part] = parts.values()
            tensor.view(-1).add_(part.view(tensor.dtype))
            return
        write_elements(tensor, self._reduced(own, parts, tensor.dtype, op))

    def _reduced(
        self,
        own: torch.Tensor,
        parts: Mapping[int, torch.Tensor],
        dtype: torch.dtype,
        op: ReduceOp,
    ) -> torch.Tensor:
        """The ranks' bytes, reduced in rank order."""
        in_order = [parts.get(rank, own) for rank in range(self.size)]
        return reduce_in_order([part.view(dtype) for part in in_order], op=op)

    def _reduce_pieces(
        self,
        calls: DirectCalls,
        tensor: torch.Tensor,
        own: torch.Tensor,
        call: bytes,
        *,
        op: ReduceOp,
        seconds: float,
    ) -> None:
        deadline = time.monotonic() + seconds
        pieces = split_evenly(own, self.size, unit=tensor.element_size())
        ours = pieces[self.rank]
        parts = calls.swap(call, dict(enumerate(pieces)), ours.numel(), seconds=seconds)
        reduced = flat_bytes(self._reduced(ours, parts, tensor.dtype, op))
        sizes = {peer: pieces[peer].numel() for peer in calls.peers}
        received = {peer: torch.empty(size, dtype=own.dtype) for peer, size in sizes.items()}
        calls.exchange(
            encode_call("the sums of all_reduce"),
            dict.fromkeys(calls.peers, reduced),
            received,
            seconds=max(deadline - time.monotonic(), 0.0),
        )
        write(tensor, [received.get(rank, reduced) for rank in range(self.size)])

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._num_calls += 1
            self._seconds += time.perf_counter() - started
