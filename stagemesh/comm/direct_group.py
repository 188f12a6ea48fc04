"""DirectGroup: what a computing thread asks of its group in each step, over sockets of its own.

    until `connect`, and where ranks cannot connect      the group's own operations
    after it                                             direct_links

The results are those of the group, bit for bit, and so are the errors: each message begins with the
call that it is of, so that ranks which call something else raise CollectiveMismatch, and stay in
step. R is the number of ranks, N the bytes of a tensor.

    all_reduce     two ranks, or small    each sends its N bytes to each other, and adds up
                   else                   rank p adds up piece p of R, and sends the sum to all
    all_gather     always                 each sends its bytes to each other
"""

import contextlib
import logging
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from stagemesh.comm.arguments import check_tensor, rows_per_rank
from stagemesh.comm.collectives import split_evenly
from stagemesh.comm.direct_links import HEAD_BYTES, DirectLinks, LinkEnded, SwapTimeout
from stagemesh.comm.direct_opener import open_links
from stagemesh.comm.process_group import ProcessGroup
from stagemesh.comm.raw import flat_bytes, write, write_elements
from stagemesh.comm.reduce import ReduceOp, check_reducible, reduce_in_order
from stagemesh.comm.transport import TensorSpec
from stagemesh.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    ConfigError,
    GroupAborted,
    NotReady,
    PeerLost,
)

logger = logging.getLogger(__name__)

_CONNECT_SECONDS = 10.0
_FIND_ABORT_SECONDS = 1.5
_WHOLE_BYTES = 256 * 1024
"""Up to this size tensors of more than two ranks travel whole: one hop instead of two."""
_KEPT_BYTES = 16 * 2**20
"""Up to this size the memory for what arrives is kept."""

_CALL_BYTES = HEAD_BYTES - 16
_HEAD = struct.Struct(f"<Q{_CALL_BYTES}sQ")
"""Sequence number, call as text, bytes of the payload."""

_SEQUENCE = struct.Struct("<Q")

_PAIR_ELEMENTS = 16 * 1024
_KEPT_PAIRS = 16

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


class _Pair:
    """The memory of a small sum of two ranks, made once for each dtype and shape."""

    __slots__ = ("_own", "call", "head", "message", "payload", "received")

    def __init__(self, like: torch.Tensor) -> None:
        num_bytes = like.numel() * like.element_size()
        self.call = _encode(f"all_reduce({ReduceOp.SUM.value}) on {TensorSpec.of(like)}")
        ours = torch.empty(HEAD_BYTES + num_bytes, dtype=torch.uint8)
        theirs = torch.empty_like(ours)
        self.message, arrived = _view(ours), _view(theirs)
        self.head, self.payload = arrived[:HEAD_BYTES], arrived[HEAD_BYTES:]
        self._own = ours[HEAD_BYTES:].view(like.dtype)
        self.received = theirs[HEAD_BYTES:].view(like.dtype)
        """What the peer has sent. Shapes: [elements]."""
        _HEAD.pack_into(self.message, 0, 0, self.call, num_bytes)

    def begin(self, sequence: int, flat: torch.Tensor) -> None:
        """Put a call's number and elements into the message."""
        _SEQUENCE.pack_into(self.message, 0, sequence)
        self._own.copy_(flat)


class DirectGroup:
    """The sums and gathers of one thread of a rank. Not for several threads at once."""

    def __init__(self, group: ProcessGroup) -> None:
        """Wrap a group; nothing is sent yet."""
        self._group = group
        self._names = group.async_group.names
        self._links: DirectLinks | None = None
        self._is_bypassed = False
        self._busy = threading.Lock()
        self._sequence = 0
        self._ended = ""
        self._kept = torch.empty(0, dtype=torch.uint8)
        self._pairs: dict[tuple[torch.dtype, torch.Size], _Pair] = {}
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
        return self._links is not None

    @property
    def time_spent(self) -> TimeSpent:
        """Calls since it was made, and the time in them."""
        return TimeSpent(num_calls=self._num_calls, seconds=self._seconds)

    def connect(self, *, within_process: bool = False) -> None:
        """Connect the ranks directly, where that is possible. All call it, as a collective.

        Args:
            within_process: also ranks that are threads of one process.
        """
        if self._links is not None or self.size == 1:
            return
        seconds = min(_CONNECT_SECONDS, self._group.timeout_seconds)
        self._links = open_links(
            self._group, timeout_seconds=seconds, within_process=within_process
        )
        if self._links is None:
            logger.debug("no direct links", extra={"group_id": self._group.group_id})
            return
        self._group.call_on_abort(self._end)

    def bypass(self, *, is_on: bool) -> None:
        """Ask the group itself, as if there were no links, to compare the two; all ranks alike."""
        self._is_bypassed = is_on

    def close(self) -> None:
        """Let go of the connections; the group stays."""
        self._end()

    def all_reduce(
        self, tensor: torch.Tensor, *, op: ReduceOp = ReduceOp.SUM, timeout: float | None = None
    ) -> torch.Tensor:
        """As ProcessGroup's; a failure, other than a mismatch, ends the links."""
        if op is ReduceOp.SUM and timeout is None and self._can_pair(tensor):
            return self._add_pair(tensor)
        with self._timed():
            links = self._links
            if links is None or self._is_bypassed:
                total: torch.Tensor = self._group.all_reduce(tensor, op=op, timeout=timeout)
                return total
            check_tensor(tensor, is_written=True)
            check_reducible(tensor.dtype, op)
            call = _encode(f"all_reduce({op.value}) on {TensorSpec.of(tensor)}")
            own = flat_bytes(tensor)
            with self._using(links, timeout) as seconds:
                if self.size > 2 and own.numel() * (self.size - 1) > _WHOLE_BYTES:
                    self._reduce_pieces(links, tensor, own, call, op=op, seconds=seconds)
                else:
                    outgoing = dict.fromkeys(links.peers, own)
                    parts = self._swap(links, call, outgoing, own.numel(), seconds=seconds)
                    self._add_up(tensor, own, parts, op=op)
            return tensor

    def all_gather_tensor(
        self, output: torch.Tensor, input: torch.Tensor, *, timeout: float | None = None
    ) -> torch.Tensor:
        """As ProcessGroup's."""
        with self._timed():
            links = self._links
            if links is None or self._is_bypassed:
                self._group.all_gather_tensor(output, input, timeout=timeout)
                return output
            check_tensor(output, name="output", is_written=True)
            rows = rows_per_rank(output, input, size=self.size, names=("output", "input"))
            call = _encode(f"all_gather on {TensorSpec.of(input)}")
            own = flat_bytes(input)
            with self._using(links, timeout) as seconds:
                outgoing = dict.fromkeys(links.peers, own)
                parts = self._swap(links, call, outgoing, own.numel(), seconds=seconds)
                for rank, row in enumerate(rows):
                    write(row, [parts.get(rank, own)])
            return output

    def _can_pair(self, tensor: torch.Tensor) -> bool:
        """Whether this is the usual sum of a decode step, that of a small tensor of two ranks."""
        return (
            self.size == 2
            and self._links is not None
            and not self._is_bypassed
            and tensor.dtype in _ADDED_IN_PLACE
            and 0 < tensor.numel() <= _PAIR_ELEMENTS
            and tensor.is_cpu
            and tensor.is_contiguous()
            and torch.is_inference_mode_enabled()
        )

    def _add_pair(self, tensor: torch.Tensor) -> torch.Tensor:
        """`all_reduce`, with all that does not change from one call to the next made once."""
        started = time.perf_counter()
        links = self._links
        assert links is not None
        key = (tensor.dtype, tensor.shape)
        pair = self._pairs.get(key)
        if pair is None:
            if len(self._pairs) >= _KEPT_PAIRS:
                self._pairs.clear()
            with torch.inference_mode(False):
                pair = self._pairs[key] = _Pair(tensor)
        seconds = self._group.timeout_seconds
        flat = tensor.view(-1)
        with self._busy:
            try:
                self._check_usable()
                sequence = self._sequence
                self._sequence += 1
                pair.begin(sequence, flat)
                is_same = links.pair(pair.message, pair.head, pair.payload, seconds=seconds)
            except BaseException as error:
                self._fail(links, error, seconds)
                raise
        if not is_same:
            told_sequence, told_call, _ = _HEAD.unpack(pair.head)
            other = {1 - self.rank: f"{_decode(told_call)} as its call {told_sequence}"}
            raise self._mismatch(other, pair.call, sequence)
        flat.add_(pair.received)
        self._num_calls += 1
        self._seconds += time.perf_counter() - started
        return tensor

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
        links: DirectLinks,
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
        parts = self._swap(links, call, dict(enumerate(pieces)), ours.numel(), seconds=seconds)
        reduced = flat_bytes(self._reduced(ours, parts, tensor.dtype, op))
        sizes = {peer: pieces[peer].numel() for peer in links.peers}
        received = {peer: torch.empty(size, dtype=own.dtype) for peer, size in sizes.items()}
        self._exchange(
            links,
            _encode("the sums of all_reduce"),
            dict.fromkeys(links.peers, reduced),
            received,
            seconds=max(deadline - time.monotonic(), 0.0),
        )
        write(tensor, [received.get(rank, reduced) for rank in range(self.size)])

    def _swap(
        self,
        links: DirectLinks,
        call: bytes,
        outgoing: Mapping[int, torch.Tensor],
        num_bytes: int,
        *,
        seconds: float,
    ) -> dict[int, torch.Tensor]:
        """Send each peer its bytes; so many of each one, in memory that is used again."""
        memory = self._memory(num_bytes * len(links.peers), outgoing[links.peers[0]].dtype)
        parts = {
            peer: memory[index * num_bytes : (index + 1) * num_bytes]
            for index, peer in enumerate(links.peers)
        }
        self._exchange(links, call, outgoing, parts, seconds=seconds)
        return parts

    def _exchange(
        self,
        links: DirectLinks,
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
            told_sequence, told_call, _ = _HEAD.unpack(head)
            if told_call == call and told_sequence == sequence:
                return True
            other[peer] = f"{_decode(told_call)} as its call {told_sequence}"
            return False

        links.swap(
            {
                peer: [memoryview(_HEAD.pack(sequence, call, outgoing[peer].numel()))]
                + ([_view(outgoing[peer])] if outgoing[peer].numel() else [])
                for peer in links.peers
            },
            {peer: _view(incoming[peer]) for peer in links.peers},
            is_expected=is_expected,
            seconds=seconds,
        )
        if other:
            raise self._mismatch(other, call, sequence)

    def _mismatch(self, other: dict[int, str], call: bytes, sequence: int) -> CollectiveMismatch:
        told = other | {self.rank: f"{_decode(call)} as its call {sequence}"}
        text = ", ".join(f"{self._names.of(rank)} called {told[rank]}" for rank in sorted(told))
        return CollectiveMismatch(f"ranks disagree in group {self._group.group_id}: {text}")

    def _memory(self, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        if num_bytes > _KEPT_BYTES:
            return torch.empty(num_bytes, dtype=dtype)
        if self._kept.numel() < num_bytes:
            # Not of inference mode, if this call is and a later one is not.
            with torch.inference_mode(False):
                self._kept = torch.empty(num_bytes, dtype=torch.uint8)
        return self._kept[:num_bytes].view(dtype)

    @contextlib.contextmanager
    def _using(self, links: DirectLinks, timeout: float | None) -> Iterator[float]:
        """One call on the links; gives its deadline, and makes its errors those of the group."""
        seconds = self._group.timeout_seconds if timeout is None else timeout
        with self._busy:
            try:
                self._check_usable()
                yield seconds
            except BaseException as error:
                self._fail(links, error, seconds)
                raise

    def _fail(self, links: DirectLinks, error: BaseException, seconds: float) -> None:
        """End the links, unless the ranks are still in step, and say what the group would say."""
        if isinstance(error, (CollectiveMismatch, ConfigError)):
            return
        # Cut off in the middle of a message: nobody could tell where the next one begins.
        what = "a call timed out" if isinstance(error, SwapTimeout) else type(error).__name__
        self._ended = self._ended or f"{what}: {error}"
        links.close()
        if isinstance(error, LinkEnded):
            # Who aborts ends its links first: perhaps that is what we have seen.
            with contextlib.suppress(NotReady):
                self._group.find_abort(_FIND_ABORT_SECONDS)
            who = self._names.of(error.peer)
            raise PeerLost(f"{who} is lost: {error}", rank=error.peer) from error
        if isinstance(error, SwapTimeout):
            raise CollectiveTimeout(
                f"a call in group {self._group.group_id} timed out on "
                f"{self._names.of(self.rank)} after {seconds:g} s: waiting for "
                f"{self._names.of_all(error.peers)}"
            ) from error

    def _check_usable(self) -> None:
        if self._ended:
            with contextlib.suppress(NotReady):
                self._group.find_abort(0.0)
            raise GroupAborted(
                f"the links of group {self._group.group_id} have ended: {self._ended}"
            )

    def _end(self) -> None:
        """Wake who is in a call; free the sockets, unless there is one, which will."""
        self._ended = self._ended or "the group was aborted or left"
        if self._links is None:
            return
        self._links.shut()
        if self._busy.acquire(blocking=False):
            try:
                self._links.close()
            finally:
                self._busy.release()

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._num_calls += 1
            self._seconds += time.perf_counter() - started


def _view(flat: torch.Tensor) -> memoryview:
    """The memory of flat bytes."""
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _encode(call: str) -> bytes:
    raw = call.encode()
    if len(raw) > _CALL_BYTES:
        raise ConfigError(f"a tensor with so many dims cannot travel over direct links: {call}")
    return raw.ljust(_CALL_BYTES, b"\0")


def _decode(call: bytes) -> str:
    return call.rstrip(b"\0").decode(errors="replace")
