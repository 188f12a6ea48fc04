"""A matrix product shared out over the ranks of a group."""

import torch

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import ConfigError
from stagemesh.parallel.tensor.operators import (
    copy_to_group,
    gather_from_group,
    split_to_group,
)
from stagemesh.parallel.tensor.shards import balanced_sizes


class TensorParallel:
    """Products of matrices that each rank of a group has, of which each computes a part."""

    def __init__(self, process_group: ProcessGroup) -> None:
        """Compute with the ranks of a group."""
        self._process_group = process_group

    @property
    def process_group(self) -> ProcessGroup:
        """The ranks."""
        return self._process_group

    def matmul(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """a b^T. Rank r multiplies with its rows of b, and all put the columns together.

            forward     y = concatenation of a b_0^T, ..., a b_(R-1)^T along dim 1
            backward    da = sum over r of dy_r b_r,    db = concatenation of dy_r^T a along dim 0

        Shapes:
            a: [batch, in], the same values on each rank.
            b: [out, in], the same values on each rank; any `out`, also one below R.
            result: [batch, out], the same bits on each rank.

        Raises:
            ConfigError: a or b is not 2-D, or their inner sizes differ.
        """
        if a.dim() != 2 or b.dim() != 2:
            raise ConfigError(
                f"matmul takes matrices [batch, in] and [out, in], got a of shape {list(a.shape)} "
                f"and b of shape {list(b.shape)}"
            )
        if a.shape[1] != b.shape[1]:
            raise ConfigError(
                f"the inner sizes of a and b must agree: a is [{a.shape[0]}, {a.shape[1]}], b is "
                f"[{b.shape[0]}, {b.shape[1]}], and {a.shape[1]} is not {b.shape[1]}"
            )
        group = self._process_group
        if group.size == 1:
            return a @ b.t()
        sizes = balanced_sizes(b.shape[0], num_ranks=group.size)
        rows = split_to_group(b, process_group=group, dim=0, sizes=sizes)
        columns = copy_to_group(a, process_group=group) @ rows.t()
        return gather_from_group(columns, process_group=group, dim=1, sizes=sizes)
