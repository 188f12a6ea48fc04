"""TensorParallel: which heads, columns and rows of a layer a rank has.

Query heads that share a key-value head form a group, and a cut never goes through a group while
there are enough of them:

    8 query heads, 2 KV heads, 2 ranks        8 query heads, 2 KV heads, 4 ranks
      rank 0   q 0..4   kv 0                    rank 0   q 0..2   kv 0
      rank 1   q 4..8   kv 1                    rank 1   q 2..4   kv 0   (a copy)
                                                rank 2   q 4..6   kv 1
                                                rank 3   q 6..8   kv 1   (a copy)

With more ranks than groups each rank belongs to one group, holds a copy of its KV head, and the
group's query heads are divided among its ranks. Remainders are spread, one each, over the first
ranks; with weights the parts follow the ranks' speeds.
"""

from collections.abc import Sequence
from typing import Literal

from stagemesh.errors import ConfigError
from stagemesh.placement.counts import proportional_counts, range_of

Range = tuple[int, int]
"""[start, end)."""

BYTES_PER_MB = 10**6

DIRECT_BYTES = 256 * 1024
"""Up to this size an all-reduce is one exchange of whole tensors; as in `stagemesh.comm`."""


class TensorParallel:
    """One rank's part of each layer.

    Args:
        world_size: ranks that share a layer.
        rank: this one.
        weights: how fast each rank is, in any unit; equal by default.

    Raises:
        ConfigError: a value is out of range.
    """

    def __init__(
        self, world_size: int, rank: int, *, weights: Sequence[int | float] | None = None
    ) -> None:
        if world_size < 1:
            raise ConfigError(f"world_size must be at least 1, got {world_size}")
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank must be in [0, {world_size}), got {rank}")
        if weights is not None and (len(weights) != world_size or min(weights) <= 0):
            raise ConfigError(
                f"weights must be {world_size} positive numbers, one per rank, got {list(weights)}"
            )
        self.world_size = world_size
        self.rank = rank
        self.weights = tuple(weights or (1,) * world_size)
        self.num_heads: int | None = None
        self.num_kv_heads: int | None = None
        self.ffn_dim: int | None = None

    def configure(self, num_heads: int, ffn_dim: int, *, num_kv_heads: int | None = None) -> None:
        """Say what the layers look like.

        Args:
            num_heads: query heads.
            ffn_dim: columns of the MLP.
            num_kv_heads: key-value heads; as many as query heads by default.

        Raises:
            ConfigError: the heads form no groups, or there is less of something than ranks.
        """
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if kv_heads < 1 or num_heads % kv_heads:
            raise ConfigError(
                f"{num_heads} heads cannot share {kv_heads} KV heads evenly, whatever tp is"
            )
        self._check_enough("heads", num_heads)
        self._check_enough("MLP columns", ffn_dim)
        self.num_heads, self.num_kv_heads, self.ffn_dim = num_heads, kv_heads, ffn_dim

    def head_range(self, total: int | None = None) -> Range:
        """This rank's query heads.

        Args:
            total: query heads; those of `configure` by default. KV groups are known for these only,
                other numbers are cut anywhere.

        Raises:
            ConfigError: no number is known, or there are fewer heads than ranks.
        """
        total = self._known("heads", total, self.num_heads)
        groups = self.num_kv_heads if total == self.num_heads else None
        groups = groups or total
        self._check_enough("heads", total)
        heads_per_group = total // groups
        if self.world_size <= groups:
            start, end = self._cut(groups)
            return start * heads_per_group, end * heads_per_group
        group, ranks = self._group(groups)
        if heads_per_group < len(ranks):
            raise ConfigError(
                f"tp of {self.world_size} puts {len(ranks)} ranks on KV head {group}, which has "
                f"only {heads_per_group} query heads ({total} heads, {groups} KV heads)"
            )
        counts = proportional_counts(heads_per_group, [self.weights[r] for r in ranks])
        start, end = range_of(self.rank - ranks.start, counts)
        return group * heads_per_group + start, group * heads_per_group + end

    def kv_head_range(self) -> Range:
        """The KV heads that this rank's query heads read; several ranks may hold copies of one.

        Raises:
            ConfigError: `configure` was not called.
        """
        groups = self._known("KV heads", None, self.num_kv_heads)
        if self.world_size <= groups:
            return self._cut(groups)
        group, _ = self._group(groups)
        return group, group + 1

    def ffn_range(self, total: int | None = None) -> Range:
        """This rank's columns of the MLP; `total` is that of `configure` by default.

        Raises:
            ConfigError: no number is known, or there are fewer columns than ranks.
        """
        return self._cut(self._known("MLP columns", total, self.ffn_dim))

    def column_split(self, shape: tuple[int, int], *, unit: int = 1) -> tuple[int, int]:
        """Shape of this rank's part of an [in, out] weight that is cut by columns.

        Args:
            shape: [in, out].
            unit: columns that stay together, such as the width of a head.
        """
        return shape[0], self._part(shape[1], unit)

    def row_split(self, shape: tuple[int, int], *, unit: int = 1) -> tuple[int, int]:
        """Shape of this rank's part of an [in, out] weight that is cut by rows."""
        return self._part(shape[0], unit), shape[1]

    def all_reduce_volume_mb(
        self,
        hidden: int,
        seq: int,
        dtype_bytes: int,
        *,
        algorithm: Literal["auto", "direct", "ring"] = "auto",
    ) -> float:
        """MB (10^6 bytes) that this rank sends in one all-reduce of [seq, hidden].

        direct: the whole tensor to each of the others, (R - 1) B; ring, or reduce-scatter and
        all-gather: 2 (R - 1) / R of it in all. "auto" is what `stagemesh.comm` takes: direct while
        that is up to 256 KiB, where the number of hops counts and not that of bytes.
        """
        num_bytes = hidden * seq * dtype_bytes
        others = self.world_size - 1
        is_small = others * num_bytes <= DIRECT_BYTES
        is_direct = algorithm == "direct" or (algorithm == "auto" and is_small)
        moved = others * num_bytes if is_direct else 2 * others * num_bytes / self.world_size
        return moved / BYTES_PER_MB

    def _group(self, groups: int) -> tuple[int, range]:
        """The KV head of this rank, and the ranks that share it."""
        counts = proportional_counts(self.world_size, [1] * groups)
        for group in range(groups):
            start, end = range_of(group, counts)
            if start <= self.rank < end:
                return group, range(start, end)
        raise AssertionError("each rank belongs to a group")

    def _part(self, size: int, unit: int) -> int:
        if unit < 1 or size % unit:
            raise ConfigError(f"{size} columns are no multiple of the unit {unit}")
        start, end = self._cut(size // unit)
        return (end - start) * unit

    def _cut(self, total: int) -> Range:
        self._check_enough("parts", total)
        return range_of(self.rank, proportional_counts(total, self.weights))

    def _check_enough(self, what: str, total: int) -> None:
        if total < self.world_size:
            raise ConfigError(
                f"{total} {what} cannot be divided over tp of {self.world_size}: "
                f"use tp of at most {max(total, 1)}"
            )

    def _known(self, what: str, total: int | None, configured: int | None) -> int:
        number = configured if total is None else total
        if number is None:
            raise ConfigError(f"the number of {what} is not known: call configure first")
        return number
