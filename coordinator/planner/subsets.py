"""The best chain over all orders of all choices of nodes: exact, for a handful of nodes.

A state is the set of nodes used so far and the unit that the chain ends on, as in the dynamic
program for shortest Hamiltonian paths (Bellman 1962; Held, Karp 1962), with the layer border as a
third coordinate.
"""

from collections.abc import Sequence

import numpy as np

from coordinator.planner.chain import NO_RECORD, Chain, ChainTable, StageCounts, limited
from coordinator.planner.spans import Floats
from coordinator.planner.step_times import StepShape, message_bytes
from coordinator.planner.units import StageMatrices, Unit, Ways


class SubsetSearch:
    """Chains over all orders.

    Args:
        costs: of the units.
        ways: between nodes.
        units: candidates; those of a chain share no node.
        is_order_fixed: whether each unit's nodes must come after those of the unit before.
    """

    def __init__(
        self, costs: StageMatrices, ways: Ways, units: Sequence[Unit], *, is_order_fixed: bool
    ) -> None:
        self._costs = costs
        self._ways = ways
        self._units = list(units)
        self._masks = [sum(1 << i for i in unit) for unit in units]
        self._is_order_fixed = is_order_fixed

    def best(self, shape: StepShape, *, counts: StageCounts, limit_seconds: float) -> Chain | None:
        """See `ChainSearch`."""
        costs, ways = self._costs, self._ways
        hops, occupied = ways.between(
            self._units, num_bytes=message_bytes(costs.model, rows=shape.rows)
        )
        hops[occupied > limit_seconds] = np.inf
        matrices = [costs.matrix(unit, shape) for unit in self._units]
        matrices = [limited(matrix, limit_seconds) for matrix in matrices]
        table = ChainTable(costs.model.num_layers, counts)
        # By set of used nodes: chains, their last units and records.
        states: dict[int, list[tuple[int, int, Floats]]] = {0: []}
        every = 0
        for mask in self._masks:
            every |= mask
        nothing = np.full(table.shape, np.inf)
        no_record = np.full(table.shape, NO_RECORD, dtype=np.int64)
        # A union is a larger number than its parts, so ascending order meets each set complete.
        for used in range(every + 1):
            before = states.pop(used, None)
            if before is None:
                continue
            if before:
                last = np.array([unit for unit, _, _ in before])
                records = np.array([record for _, record, _ in before])
                stack = np.stack([values for _, _, values in before])
            for i, unit in enumerate(self._units):
                if used & self._masks[i] or (self._is_order_fixed and used >= 1 << unit[0]):
                    continue
                seconds, record = nothing, no_record
                if before:
                    ways_in = stack + hops[last, i][:, None, None]
                    which = ways_in.argmin(axis=0)
                    seconds = np.take_along_axis(ways_in, which[None], axis=0)[0]
                    record = records[which]
                found = table.add(
                    unit,
                    matrices[i],
                    seconds=seconds,
                    record=record,
                    entry_seconds=ways.entry(unit) if not used else np.inf,
                    exit_seconds=ways.exit(unit),
                )
                if found is not None:
                    states.setdefault(used | self._masks[i], []).append(
                        (i, table.last_record, found)
                    )
        return table.chain()
