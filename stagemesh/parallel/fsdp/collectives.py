"""The collectives of one flat parameter, each of them started and not waited for.

Gathers and reductions have a group each: during a backward they mix in an order that may differ
between ranks, but the gathers among themselves do not, nor the reductions.

Units of equal size would let ranks that run different units mix up their shards unseen. So a
tensor travels in a shape that tells which unit it is (dims of size 1 before and after its elements)
and the agreement on shapes that each collective begins with refuses the rest, on all ranks.
"""

from typing import Any

import torch

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.comm.reduce import ReduceOp
from stagemesh.comm.work import Work

_NUM_MARKS = 16
"""Most dims of size 1 on either side, less one. Flat parameters number k and k + 256 look equal."""


class FlatCollectives:
    """Gathers and reduces one flat parameter."""

    def __init__(self, *, index: int, gather_group: ProcessGroup, reduce_group: ProcessGroup):
        """Use two groups of the same ranks.

        Args:
            index: number of the flat parameter; the same on all ranks.
            gather_group: of all gathers.
            reduce_group: of all reductions.
        """
        before, after = divmod(index % _NUM_MARKS**2, _NUM_MARKS)
        self._before = (1,) * before
        self._after = (1,) * after
        self._gather_group = gather_group
        self._reduce_group = reduce_group

    @property
    def size(self) -> int:
        """Number of ranks, R."""
        return self._gather_group.size

    def all_gather(self, output: torch.Tensor, shard: torch.Tensor) -> Work[Any]:
        """Begin to bring all shards to all ranks. Shapes: shard [L], output [R * L]."""
        work: Work[Any] = self._gather_group.all_gather_tensor(
            self._mark(output, rows=self.size), self._mark(shard), async_op=True
        )
        return work

    def reduce_scatter(self, output: torch.Tensor, gradient: torch.Tensor) -> Work[Any]:
        """Begin to average, each rank's part for itself. Shapes: output [L], gradient [R * L]."""
        work: Work[Any] = self._reduce_group.reduce_scatter_tensor(
            self._mark(output),
            self._mark(gradient, rows=self.size),
            op=ReduceOp.AVG,
            async_op=True,
        )
        return work

    def all_reduce(self, gradient: torch.Tensor) -> Work[Any]:
        """Begin to average, in place. Shapes: [N]."""
        work: Work[Any] = self._reduce_group.all_reduce(
            self._mark(gradient), op=ReduceOp.AVG, async_op=True
        )
        return work

    def _mark(self, flat: torch.Tensor, *, rows: int | None = None) -> torch.Tensor:
        if rows is None:
            return flat.view(*self._before, flat.numel(), *self._after)
        return flat.view(rows, *self._before, flat.numel() // rows, *self._after)
