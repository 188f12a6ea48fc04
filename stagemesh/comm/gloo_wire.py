"""Flat bytes over a Gloo group of torch.distributed: three blocking primitives, and messages.

Only what moves goes through Gloo: its own reductions refuse dtypes, give a wrong avg, change the
tensors of ranks that are not the root, and sum in an order of their own. All memory here is ours
until a call returns, so a call that fails changes nothing of the caller's.
"""

import datetime
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, Work
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
    AllgatherOptions,
    AllToAllOptions,
    BroadcastOptions,
)

from stagemesh.errors import CollectiveTimeout, CommError, PeerLost

MAX_TAG = 2**31 - 1
"""Largest tag of a message."""


class GlooWire:
    """One rank's end of a Gloo group. Collectives are for one thread; messages for any."""

    def __init__(self, group: ProcessGroupGloo) -> None:
        """Wrap a connected group."""
        self._group: ProcessGroupGloo | None = group
        self.rank = group.rank()
        self.size = group.size()

    def all_gather(self, flat: torch.Tensor, *, seconds: float) -> list[torch.Tensor]:
        """Every rank's bytes, on all ranks.

        Shapes:
            flat: [bytes], the same on each rank.
        """
        if not flat.numel():
            return [flat for _ in range(self.size)]
        options = AllgatherOptions()
        options.timeout = datetime.timedelta(seconds=seconds)
        outputs = [torch.empty_like(flat, dtype=torch.uint8) for _ in range(self.size)]
        with translated("all_gather"):
            self._live().allgather([outputs], [flat.view(torch.uint8)], options).wait()
        return outputs

    def all_to_all(
        self, outgoing: Sequence[torch.Tensor], *, incoming: Sequence[int], seconds: float
    ) -> list[torch.Tensor]:
        """Bytes for each rank, and of each rank.

        Shapes:
            outgoing: R of [bytes], of any sizes.
            incoming: R sizes: what the other ranks have for this one.
        """
        options = AllToAllOptions()
        options.timeout = datetime.timedelta(seconds=seconds)
        output = torch.empty(sum(incoming), dtype=torch.uint8)
        flat = torch.cat([piece.view(torch.uint8) for piece in outgoing])
        sizes = [piece.numel() for piece in outgoing]
        with translated("all_to_all"):
            self._live().alltoall_base(output, flat, list(incoming), sizes, options).wait()
        edges = [0, *itertools.accumulate(incoming)]
        return [output[start:end] for start, end in itertools.pairwise(edges)]

    def broadcast(self, flat: torch.Tensor, *, src: int, seconds: float) -> None:
        """Put the bytes of rank `src` into those of all ranks."""
        if not flat.numel():
            return
        options = BroadcastOptions()
        options.rootRank = src
        options.timeout = datetime.timedelta(seconds=seconds)
        with translated("broadcast"):
            self._live().broadcast([flat.view(torch.uint8)], options).wait()

    def send(self, flat: torch.Tensor, *, peer: int, tag: int) -> Work:
        """Begin to send bytes to a rank; `wait` for it."""
        with translated(f"send to rank {peer}"):
            work: Work = self._live().send([flat.view(torch.uint8)], peer, tag)
            return work

    def receive(self, flat: torch.Tensor, *, peer: int, tag: int) -> Work:
        """Begin to receive bytes of a rank; `wait` for it."""
        with translated(f"recv from rank {peer}"):
            work: Work = self._live().recv([flat.view(torch.uint8)], peer, tag)
            return work

    def abort(self) -> None:
        """Cut all connections: what waits in them, here and on the other ranks, fails."""
        group, self._group = self._group, None
        if group is not None:
            # Ends what waits here. Only the end of the object closes the connections.
            group.abort()

    def _live(self) -> Any:
        # Any: torch's stubs of this class lack its operations.
        if self._group is None:
            raise PeerLost("the group's connections are cut")
        return self._group


def wait(work: Work, *, operation: str) -> None:
    """Wait for a message; ended by `abort` at the latest."""
    with translated(operation):
        work.wait()


class translated:  # noqa: N801
    """Within the block Gloo's errors become ours. Gloo names addresses, but no ranks."""

    def __init__(self, operation: str) -> None:
        self._operation = operation

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RuntimeError):
            raise self._error(str(error).partition("\n")[0]) from error

    def _error(self, text: str) -> CommError:
        if "Timed out" in text or "timeout" in text:
            return CollectiveTimeout(f"{self._operation} over Gloo timed out: {text}")
        return PeerLost(f"{self._operation} over Gloo failed, a rank is lost: {text}")
