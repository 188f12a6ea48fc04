"""Flat bytes over a Gloo group of torch.distributed: blocking primitives, and messages.

Gloo mostly moves only: its own reductions refuse dtypes, give a wrong avg, change the tensors of
ranks that are not the root, and sum in an order of their own. Its all_to_all is the fastest of what
moves, so that it stands for all but the broadcast.
"""

import datetime
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroupGloo, Work
from torch.distributed.distributed_c10d import (
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
)

from stagemesh.errors import CollectiveTimeout, CommError, PeerLost

MAX_TAG = 2**31 - 1
"""Largest tag of a message."""


class Wire(Protocol):
    """What moves flat bytes between all ranks. For one thread, but for `abort`."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def device(self) -> torch.device:
        """Where the bytes lie."""

    def exchange(
        self,
        outgoing: torch.Tensor,
        incoming: torch.Tensor,
        *,
        send_sizes: Sequence[int],
        receive_sizes: Sequence[int],
        seconds: float,
    ) -> None:
        """Send each rank its part of the outgoing bytes, and receive theirs.

        Shapes:
            outgoing: [sum of send_sizes], in rank order.
            incoming: [sum of receive_sizes], in rank order.
        """

    def broadcast(self, flat: torch.Tensor, *, src: int, seconds: float) -> None:
        """Put the bytes of rank `src` into those of all others."""

    def all_reduce_sum(self, tensor: torch.Tensor, *, seconds: float) -> None:
        """Add up a float32 or float64 tensor over all ranks, in place, in an order of torch's."""

    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it; nothing on a CPU."""

    def abort(self) -> None:
        """Cut all connections: what waits in them, here and on the other ranks, fails."""


class GlooWire:
    """One rank's end of a Gloo group. Collectives are for one thread; messages for any."""

    device = torch.device("cpu")

    def __init__(self, group: ProcessGroupGloo) -> None:
        """Wrap a connected group."""
        self._group: ProcessGroupGloo | None = group
        self.rank = group.rank()
        self.size = group.size()

    def exchange(
        self,
        outgoing: torch.Tensor,
        incoming: torch.Tensor,
        *,
        send_sizes: Sequence[int],
        receive_sizes: Sequence[int],
        seconds: float,
    ) -> None:
        """As Wire."""
        options = AllToAllOptions()
        options.timeout = datetime.timedelta(seconds=seconds)
        with translated("a collective"):
            self._live().alltoall_base(
                incoming, outgoing, list(receive_sizes), list(send_sizes), options
            ).wait()

    def broadcast(self, flat: torch.Tensor, *, src: int, seconds: float) -> None:
        """As Wire."""
        options = BroadcastOptions()
        options.rootRank = src
        options.timeout = datetime.timedelta(seconds=seconds)
        with translated("broadcast"):
            self._live().broadcast([flat], options).wait()

    def all_reduce_sum(self, tensor: torch.Tensor, *, seconds: float) -> None:
        """As Wire."""
        options = AllreduceOptions()
        options.timeout = datetime.timedelta(seconds=seconds)
        with translated("all_reduce"):
            self._live().allreduce([tensor], options).wait()

    def send(self, flat: torch.Tensor, *, peer: int, tag: int) -> Work:
        """Begin to send bytes to a rank; `wait_for` it."""
        with translated(f"send to rank {peer}"):
            work: Work = self._live().send([flat], peer, tag)
            return work

    def receive(self, flat: torch.Tensor, *, peer: int | None, tag: int) -> Work:
        """Begin to receive bytes of a rank, or of any; `wait_for` it."""
        with translated("recv"):
            live = self._live()
            work: Work = (
                live.recv_anysource([flat], tag) if peer is None else live.recv([flat], peer, tag)
            )
            return work

    def synchronize(self) -> None:
        """As Wire."""

    def abort(self) -> None:
        """As Wire."""
        group, self._group = self._group, None
        if group is not None:
            # Ends what waits here. Only the end of the object closes the connections.
            group.abort()

    def _live(self) -> Any:
        # Any: torch's stubs of this class lack its operations.
        if self._group is None:
            raise PeerLost("the group's connections are cut")
        return self._group


def wait_for(work: Work, *, operation: str) -> None:
    """Wait for a message; ended by `abort` at the latest."""
    with translated(operation):
        work.wait()


def source_of(work: Work) -> int:
    """Which rank sent a message that has arrived."""
    return work._source_rank()


class translated:  # noqa: N801
    """Within the block torch's errors become ours. It names addresses, but no ranks."""

    def __init__(self, operation: str, *, library: str = "Gloo") -> None:
        self._operation = operation
        self._library = library

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RuntimeError):
            raise self._error(str(error).partition("\n")[0]) from error

    def _error(self, text: str) -> CommError:
        where = f"{self._operation} over {self._library}"
        if "Timed out" in text or "timeout" in text:
            return CollectiveTimeout(f"{where} timed out: {text}")
        return PeerLost(f"{where} failed, a rank is lost: {text}")
