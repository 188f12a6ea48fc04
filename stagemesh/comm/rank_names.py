"""Who the ranks of a group are, for errors."""

from collections.abc import Iterable, Sequence


class RankNames:
    """A name per rank: "rank 1", or in a sub-group "rank 1 (rank 3 of the world, node x)"."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        """Take names in rank order; none means that the rank says it all."""
        self._names = tuple(names)

    def of(self, rank: int) -> str:
        """Who a rank is."""
        return self._names[rank] if rank < len(self._names) else f"rank {rank}"

    def of_all(self, ranks: Iterable[int]) -> str:
        """Who several are: "rank 0, 2", or the long names."""
        ranks = list(ranks)
        if self._names:
            return ", ".join(self.of(rank) for rank in ranks)
        return "rank " + ", ".join(map(str, ranks))
