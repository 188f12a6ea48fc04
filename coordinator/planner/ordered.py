"""The best chain over units in one order: a dynamic program, for clusters of any size.

Units come in an order of nodes and may be skipped, so the best of all ways to choose nodes and cut
the layers is found; only the order is given. A node more is a choice more: the result cannot get
worse. Nodes from which equal ways lead are merged (`Ways.sites`), which leaves one minimum per unit
where all links are alike: n * layers^2 steps for n nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coordinator.planner.chain import NO_RECORD, Chain, ChainTable, StageCounts, limited
from coordinator.planner.spans import Floats, Ints
from coordinator.planner.step_times import StepShape, message_bytes
from coordinator.planner.units import StageMatrices, Unit, Ways


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A unit in an order: it takes positions [start, end)."""

    unit: Unit
    start: int
    end: int


class OrderedSearch:
    """Chains along one order of nodes.

    Args:
        costs: of the units.
        ways: between nodes.
        order: units; those of a chain do not overlap and keep the order.
    """

    def __init__(self, costs: StageMatrices, ways: Ways, order: Sequence[Placed]) -> None:
        self._costs = costs
        self._ways = ways
        self._order = sorted(order, key=lambda placed: (placed.start, placed.end))
        heads = ways.sites()[np.array([placed.unit[0] for placed in self._order], dtype=np.int64)]
        sources, site = np.unique(heads, return_inverse=True)
        self._sources: Ints = sources
        self._site = [int(s) for s in site]

    def best(self, shape: StepShape, *, counts: StageCounts, limit_seconds: float) -> Chain | None:
        """See `ChainSearch`."""
        costs, ways = self._costs, self._ways
        units = [placed.unit for placed in self._order]
        hops, occupied = ways.hops(
            self._sources, units, num_bytes=message_bytes(costs.model, rows=shape.rows)
        )
        hops[occupied > limit_seconds] = np.inf
        table = ChainTable(costs.model.num_layers, counts)
        # Per site: the best chains that end on a unit before the current one.
        running = np.full((len(self._sources), *table.shape), np.inf)
        record = np.full(running.shape, NO_RECORD, dtype=np.int64)
        waiting: list[tuple[int, int, int]] = []
        values: dict[int, Floats] = {}
        for i, placed in enumerate(self._order):
            while waiting and waiting[0][0] <= placed.start:
                _, number, site = waiting.pop(0)
                better = values[number] < running[site]
                running[site][better] = values.pop(number)[better]
                record[site][better] = number
            ways_in = running + hops[:, i][:, None, None]
            which = ways_in.argmin(axis=0)[None]
            matrix = costs.matrix(placed.unit, shape)
            found = table.add(
                placed.unit,
                limited(matrix, limit_seconds),
                seconds=np.take_along_axis(ways_in, which, axis=0)[0],
                record=np.take_along_axis(record, which, axis=0)[0],
                entry_seconds=ways.entry(placed.unit),
                exit_seconds=ways.exit(placed.unit),
            )
            if found is not None:
                values[table.last_record] = found
                waiting.append((placed.end, table.last_record, self._site[i]))
                waiting.sort()
        return table.chain()
