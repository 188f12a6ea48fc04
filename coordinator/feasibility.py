"""Which cuts of a model into contiguous spans fit which nodes: an exact search.

A span's need never falls as it grows, so for each node and first layer the ends that fit form a
range, and a set of reachable borders is a bit mask. "Uses node, takes layers" is then one shift and
one OR per reachable border.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from coordinator.model_cost import NodeCapacity, StageCosts


def _bits(number: int) -> list[int]:
    """Positions of the set bits, ascending."""
    positions = []
    while number:
        low = number & -number
        positions.append(low.bit_length() - 1)
        number ^= low
    return positions


class Holders(Protocol):
    """What may each hold a span of layers: nodes, or nodes that share a stage.

    What a longer span needs is never less.
    """

    def __len__(self) -> int:
        """How many there are."""
        ...

    def fits(self, index: int, start: int, end: int) -> bool:
        """Whether one can hold layers [start, end)."""
        ...

    def fullness(self, index: int, start: int, end: int) -> float:
        """What part of its memory they take."""
        ...


@dataclass(frozen=True, slots=True)
class SingleNodes:
    """Nodes that run a stage each, alone."""

    costs: StageCosts
    nodes: Sequence[NodeCapacity]

    def __len__(self) -> int:
        return len(self.nodes)

    def fits(self, index: int, start: int, end: int) -> bool:
        """See `Holders`."""
        return self.costs.stage_bytes(start, end) <= self.nodes[index].memory_bytes

    def fullness(self, index: int, start: int, end: int) -> float:
        """See `Holders`."""
        return self.costs.stage_bytes(start, end) / self.nodes[index].memory_bytes


class CutSearch:
    """Cuts of a model over an ordered list of holders, some of which may stay unused."""

    def __init__(self, holders: Holders, *, num_layers: int) -> None:
        self._holders = holders
        self._num_layers = num_layers
        self._longest_end = cache(self._find_longest_end)
        # _reach[i][k]: borders b such that k of the first i nodes can hold layers [0, b).
        self._reach: list[list[int]] = []

    def feasible_counts(self, max_stages: int) -> list[int]:
        """Numbers of stages up to the limit with which some cut fits, descending."""
        self._fill(max_stages)
        last = self._reach[len(self._holders)]
        return [k for k in range(max_stages, 0, -1) if last[k] >> self._num_layers & 1]

    def choose_nodes(self, num_stages: int) -> list[int]:
        """Indices of nodes over which some cut into so many stages fits; one must exist."""
        self._fill(num_stages)
        chosen: list[int] = []
        border = self._num_layers
        for i in range(len(self._holders), 0, -1):
            k = num_stages - len(chosen)
            starts = self._reach[i - 1][k - 1] if k else 0
            fitting = [s for s in _bits(starts) if s < border <= self._longest_end(i - 1, s)]
            if fitting:
                chosen.append(i - 1)
                border = fitting[-1]
        assert border == 0, f"no cut into {num_stages} stages fits"
        return chosen[::-1]

    def fits_all(self) -> bool:
        """Whether some cut fits that uses each node."""
        borders = 1
        for i in range(len(self._holders)):
            borders = self._extend(i, borders)
        return bool(borders >> self._num_layers & 1)

    def best_counts(self, wanted: Sequence[int]) -> list[int] | None:
        """Layers per node, using each node, that fit and lie nearest to the wanted ones.

        Nearest is the least sum of squared differences, so that a repair is spread over the nodes
        and a wanted split that fits is returned as it is; of equals, the one whose fullest node is
        least full. A dynamic program over (node, border) finds the optimum: the sum adds up, and
        among prefixes of equal sum the less full one is never worse.

        Returns:
            None when no cut fits.
        """
        best: list[dict[int, tuple[int, float, int]]] = [{0: (0, 0.0, 0)}]
        for i in range(len(self._holders)):
            column: dict[int, tuple[int, float, int]] = {}
            for start, (deviation, fill, _) in best[i].items():
                for end in range(start + 1, self._longest_end(i, start) + 1):
                    difference = end - start - wanted[i]
                    cost = (
                        deviation + difference * difference,
                        max(fill, self._holders.fullness(i, start, end)),
                        start,
                    )
                    if end not in column or cost < column[end]:
                        column[end] = cost
            best.append(column)
        if self._num_layers not in best[-1]:
            return None
        counts: list[int] = []
        border = self._num_layers
        for column in reversed(best[1:]):
            start = column[border][2]
            counts.append(border - start)
            border = start
        return counts[::-1]

    def _find_longest_end(self, node_index: int, start: int) -> int:
        """The last border that the node reaches from a first layer; `start` if it holds none."""
        low, high = start, self._num_layers
        while low < high:
            middle = (low + high + 1) // 2
            if self._holders.fits(node_index, start, middle):
                low = middle
            else:
                high = middle - 1
        return low

    def _extend(self, node_index: int, borders: int) -> int:
        """Borders reachable when the node takes at least one layer after one of the borders."""
        reached = 0
        for start in _bits(borders):
            if start < self._num_layers:
                end = self._longest_end(node_index, start)
                reached |= (1 << end + 1) - (1 << start + 1)
        return reached

    def _fill(self, max_stages: int) -> None:
        if self._reach and len(self._reach[0]) > max_stages:
            return
        self._reach = [[1] + [0] * max_stages]
        for i in range(len(self._holders)):
            row = list(self._reach[i])
            for k in range(max_stages):
                row[k + 1] |= self._extend(i, self._reach[i][k])
            self._reach.append(row)
