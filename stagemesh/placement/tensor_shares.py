"""TensorShares: what each rank of a stage has of every layer, of the embedding and of the head.

A share is a count of query heads, of MLP columns and of words; the parts follow each other in rank
order. Query heads that share a key/value head form a group. A rank has whole groups, or a part of
one group and a copy of that group's key/value head:

    9 heads, 3 KV heads, 2 ranks: 2 + 1 groups      8 heads, 2 KV heads, 4 ranks
      rank 0   q 0..6   kv 0..2                       rank 0   q 0..2   kv 0
      rank 1   q 6..9   kv 2                          rank 1   q 2..4   kv 0   (a copy)
                                                      rank 2   q 4..6   kv 1
                                                      rank 3   q 6..8   kv 1   (a copy)

All checks of sizes are made here, torch-free, so that a planner refuses what no rank could load.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stagemesh.errors import ConfigError
from stagemesh.placement.counts import proportional_counts, range_of
from stagemesh.placement.tensor_split import Range, TensorParallel


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShares:
    """How the ranks of a stage divide its layers; each tuple has one entry per rank.

    Raises:
        ConfigError: not one entry per rank in each, an entry below 1, or a cut that goes through a
            group of query heads whose other part is not the rank's neighbour alone.
    """

    num_kv_heads: int
    """Key/value heads of the model."""
    query_heads: tuple[int, ...]
    """Query heads of each rank."""
    mlp_columns: tuple[int, ...]
    """MLP columns of each rank."""
    vocab_rows: tuple[int, ...]
    """Words of the embedding and of the head of each rank."""

    def __post_init__(self) -> None:
        for name in ("query_heads", "mlp_columns", "vocab_rows"):
            counts = getattr(self, name)
            if len(counts) != self.num_ranks or not counts or min(counts) < 1:
                raise ConfigError(
                    f"{name} must be one number >= 1 for each of {self.num_ranks} ranks, got "
                    f"{list(counts)}"
                )
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} heads cannot share {self.num_kv_heads} KV heads evenly"
            )
        for rank in range(self.num_ranks):
            self._check_groups(rank)

    @classmethod
    def divide(
        cls,
        *,
        num_ranks: int,
        num_heads: int,
        num_kv_heads: int,
        mlp_columns: int,
        vocab_size: int,
        weights: Sequence[int | float] | None = None,
    ) -> "TensorShares":
        """Shares in proportion to the ranks' weights, as equal as can be without.

        Raises:
            ConfigError: there is less of something than ranks; names the numbers.
        """
        heads: list[int] = []
        for rank in range(num_ranks):
            splitter = TensorParallel(num_ranks, rank, weights=weights)
            splitter.configure(num_heads, mlp_columns, num_kv_heads=num_kv_heads)
            start, end = splitter.head_range()
            heads.append(end - start)
        return cls(
            num_kv_heads=num_kv_heads,
            query_heads=tuple(heads),
            mlp_columns=tuple(proportional_counts(mlp_columns, weights or [1] * num_ranks)),
            vocab_rows=_even(vocab_size, num_ranks),
        )

    @classmethod
    def of_groups(
        cls,
        *,
        kv_groups: Sequence[int],
        mlp_columns: Sequence[int],
        num_heads: int,
        num_kv_heads: int,
        vocab_size: int,
    ) -> "TensorShares":
        """The shares that a planner writes down: whole KV groups, and MLP columns, of each rank.

        Raises:
            ConfigError: the groups do not add up to the model's KV heads, or a part is missing.
        """
        if sum(kv_groups) != num_kv_heads or num_heads % num_kv_heads:
            raise ConfigError(
                f"KV groups {list(kv_groups)} must add up to the {num_kv_heads} KV heads that "
                f"{num_heads} query heads share"
            )
        per_group = num_heads // num_kv_heads
        return cls(
            num_kv_heads=num_kv_heads,
            query_heads=tuple(groups * per_group for groups in kv_groups),
            mlp_columns=tuple(mlp_columns),
            vocab_rows=_even(vocab_size, len(kv_groups)),
        )

    @property
    def num_ranks(self) -> int:
        """Ranks of the stage."""
        return len(self.query_heads)

    @property
    def num_heads(self) -> int:
        """Query heads of the model."""
        return sum(self.query_heads)

    def query_range(self, rank: int) -> Range:
        """The query heads of a rank."""
        return self._range(self.query_heads, rank)

    def kv_range(self, rank: int) -> Range:
        """The KV heads that the query heads of a rank read."""
        start, end = self.query_range(rank)
        per_group = self.num_heads // self.num_kv_heads
        return start // per_group, -(-end // per_group)

    def column_range(self, rank: int) -> Range:
        """The MLP columns of a rank."""
        return self._range(self.mlp_columns, rank)

    def vocab_range(self, rank: int) -> Range:
        """The words of a rank."""
        return self._range(self.vocab_rows, rank)

    def owned_kv_heads(self, rank: int) -> tuple[bool, ...]:
        """For each KV head of a rank whether it is the first to have it, and not a copy."""
        start, end = self.kv_range(rank)
        taken = self.kv_range(rank - 1)[1] if rank else 0
        return tuple(head >= taken for head in range(start, end))

    def _range(self, counts: tuple[int, ...], rank: int) -> Range:
        if not 0 <= rank < self.num_ranks:
            raise ConfigError(f"rank must be in [0, {self.num_ranks}), got {rank}")
        return range_of(rank, counts)

    def _check_groups(self, rank: int) -> None:
        start, end = self.query_range(rank)
        per_group = self.num_heads // self.num_kv_heads
        is_whole = start % per_group == 0 and end % per_group == 0
        if not is_whole and start // per_group != (end - 1) // per_group:
            raise ConfigError(
                f"tp of {self.num_ranks}: query heads [{start}, {end}) of rank {rank} are neither "
                f"whole groups of {per_group} nor part of one ({self.num_heads} heads, "
                f"{self.num_kv_heads} KV heads)"
            )


def _even(vocab_size: int, num_ranks: int) -> tuple[int, ...]:
    if vocab_size < num_ranks:
        raise ConfigError(f"{vocab_size} words cannot be divided over tp of {num_ranks}")
    return tuple(proportional_counts(vocab_size, [1] * num_ranks))
