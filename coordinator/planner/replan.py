"""From a running plan to one for a changed cluster, moving as little as possible. Pure.

Wanted is, of all plans within 5 % of the best, the one that loads the fewest bytes. On the
planner's own units and shares, for a placement of one replica:

- for few nodes `fewest_bytes` finds it;
- beyond, searches for seconds + weight * bytes with rising weights find the plans on the lower edge
  of (seconds, bytes), not those between.

The running plan itself, where its nodes are still there, and the best plan are candidates too. With
several replicas only these two are.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from coordinator.model_cost import ModelCost
from coordinator.planner.candidates import Selection, select_nodes
from coordinator.planner.chain import Chain, ChainSearch
from coordinator.planner.fewest_bytes import Choices, fewest_bytes
from coordinator.planner.moves import Move, MoveCosts, held_by_node, list_moves, total_bytes
from coordinator.planner.optimise import Candidate
from coordinator.planner.ordered import OrderedSearch
from coordinator.planner.plan import PlacementPlan, PlanResult
from coordinator.planner.planner import Found, explain, plan_placement, spell_out
from coordinator.planner.profiles import ClusterProfile, Constraints, Workload
from coordinator.planner.recheck import still_fits
from coordinator.planner.replicas import ReplicaSearch
from coordinator.planner.spans import Floats
from coordinator.planner.step_ranges import StepRange, step_ranges
from coordinator.planner.step_times import StepShape, decode_shape, message_bytes
from coordinator.planner.time_model import TimeModel, objective_value
from coordinator.planner.units import Unit, UnitCosts

_ANYTHING = Constraints()
_TOLERANCE = 0.05
_NUM_WEIGHTS = 12
_WEIGHT_STEP = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanned:
    """The plan to change to."""

    result: PlanResult
    """The plan."""
    best_value: float
    """Objective value of the best plan, whatever it moves."""
    moves: tuple[Move, ...]
    """What nodes must load; what they hold beyond the plan they may drop."""

    @property
    def moved_bytes(self) -> int:
        """Of all moves."""
        return total_bytes(self.moves)


def replan(
    running: PlacementPlan,
    model: ModelCost,
    *,
    cluster: ClusterProfile,
    workload: Workload,
    constraints: Constraints = _ANYTHING,
    tolerance: float = _TOLERANCE,
) -> Replanned:
    """The plan that moves the fewest bytes among those near the best.

    Args:
        running: the plan that is loaded; its nodes may be gone.
        model: the same model.
        cluster: the nodes that are there now.
        workload: what is asked.
        constraints: what the user wants.
        tolerance: how much worse than the best it may be.

    Raises:
        ConfigError: see `plan_placement`.
        PlacementError: nothing fits.
    """
    best = plan_placement(model, cluster=cluster, workload=workload, constraints=constraints)
    work = _Replan(running, model, cluster, workload, constraints)
    limit = best.objective_value * (1 + tolerance)
    plan, value, size = best.plan, best.objective_value, work.size(best.plan)
    for other in work.candidates(best, limit):
        other_value, other_size = work.value(other), work.size(other)
        is_less = (other_size, other_value) < (size, value)
        if other_value <= limit * (1 + 1e-9) and is_less:
            plan, value, size = other, other_value, other_size
        if size == 0:
            break
    result = best if plan is best.plan else work.result(plan)
    return Replanned(result=result, best_value=best.objective_value, moves=work.moves(plan))


class _Replan:
    """What a replan works on."""

    def __init__(
        self,
        running: PlacementPlan,
        model: ModelCost,
        cluster: ClusterProfile,
        workload: Workload,
        constraints: Constraints,
    ) -> None:
        self._running = running
        self._model = model
        self._workload = workload
        self._constraints = constraints
        self._selection: Selection = select_nodes(
            model, cluster=cluster, workload=workload, constraints=constraints
        )
        nodes = self._selection.cluster.nodes
        self._members = range(len(nodes))
        # What a node holds counts only while it can be used, and in the dtype it is needed in.
        is_same = running.dtype == model.dtype and running.num_layers == model.num_layers
        self._present = frozenset(node.node_id for node in nodes if is_same)
        self._search = ReplicaSearch(
            model, cluster=self._selection.cluster, workload=workload, constraints=constraints
        )
        self._timer = TimeModel(model, cluster=self._selection.cluster, workload=workload)
        held = {n: h for n, h in held_by_node(running).items() if n in self._present}
        self._loads = MoveCosts(model, held)

    def value(self, plan: PlacementPlan) -> float:
        """Objective value."""
        return objective_value(plan.replicas, timer=self._timer, workload=self._workload)

    def moves(self, plan: PlacementPlan) -> tuple[Move, ...]:
        """What a plan loads."""
        return list_moves(self._model, running=self._running, target=plan, present=self._present)

    def size(self, plan: PlacementPlan) -> int:
        """Bytes that it loads."""
        return total_bytes(self.moves(plan))

    def result(self, plan: PlacementPlan) -> PlanResult:
        """The plan, explained."""
        return explain(
            plan,
            search=self._search,
            model=self._model,
            selection=self._selection,
            workload=self._workload,
            is_exact=False,
        )

    def candidates(self, best: PlanResult, limit: float) -> Iterator[PlacementPlan]:
        """Plans worth comparing with the best one."""
        kept = still_fits(
            self._running,
            self._model,
            cluster=self._selection.cluster,
            workload=self._workload,
            constraints=self._constraints,
        )
        if kept is not None:
            yield kept
        if len(best.plan.replicas) > 1:
            return
        streams = self._workload.concurrency
        for steps in self._steps():
            shape = decode_shape(self._workload, rows=steps.rows)
            cycle = limit * (streams if self._workload.objective == "throughput" else 1)
            for chain in self._chains(shape, steps, cycle):
                found = Candidate(value=chain.seconds, chain=chain, shape=shape)
                yield spell_out(
                    self._search,
                    Found(value=found.value, replicas=((found, streams),), is_exact=False),
                    model=self._model,
                    workload=self._workload,
                )

    def _steps(self) -> Iterator[StepRange]:
        allowed = self._search.allowed
        if self._workload.objective == "latency":
            # One stream is never limited by a bottleneck.
            yield StepRange(counts=allowed, rows=1, steps=0)
            return
        most = min(len(self._members), self._model.num_layers)
        yield from step_ranges(self._workload.concurrency, allowed=allowed, most=most)

    def _chains(self, shape: StepShape, steps: StepRange, cycle: float) -> Iterator[Chain]:
        limit = cycle / steps.steps if steps.steps else float("inf")
        if len(self._members) <= self._search.exact_limit:
            units = self._search.groups(self._members)
            found = fewest_bytes(
                self._choices(units, shape, steps, limit), limit_seconds=cycle * (1 + 1e-12)
            )
            if found is not None:
                yield found[1]
                return
        total = float(sum(self._model.layer_bytes))
        weight = cycle / total / _WEIGHT_STEP ** (_NUM_WEIGHTS // 2)
        for _ in range(_NUM_WEIGHTS):
            costs = _WeighedCosts(
                self._search.costs(self._workload.concurrency),
                self._loads,
                weight=weight,
                limit=limit,
            )
            for order in self._search.orders(self._members):
                search: ChainSearch = OrderedSearch(costs, self._search.ways, order)
                chain = search.best(shape, counts=steps.counts, limit_seconds=float("inf"))
                if chain is not None:
                    yield chain
            weight *= _WEIGHT_STEP

    def _choices(
        self, units: list[Unit], shape: StepShape, steps: StepRange, limit: float
    ) -> Choices:
        costs, ways = self._search.costs(self._workload.concurrency), self._search.ways
        hops, occupied = ways.between(units, num_bytes=message_bytes(self._model, rows=shape.rows))
        seconds = [costs.matrix(unit, shape) for unit in units]
        return Choices(
            units=units,
            seconds=[np.where(matrix > limit, np.inf, matrix) for matrix in seconds],
            loads=[self._loads.matrix(unit, costs, shape) for unit in units],
            hops=np.where(occupied > limit, np.inf, hops),
            entries=[ways.entry(unit) for unit in units],
            exits=[ways.exit(unit) for unit in units],
            counts=steps.counts,
            is_order_fixed=self._constraints.is_order_fixed,
        )


class _WeighedCosts:
    """Seconds + weight * bytes in place of seconds."""

    def __init__(self, costs: UnitCosts, loads: MoveCosts, *, weight: float, limit: float) -> None:
        self._costs = costs
        self._loads = loads
        self._weight = weight
        self._limit = limit
        self.model = costs.model

    def matrix(self, unit: Unit, shape: StepShape) -> Floats:
        """By [start, end]; infinite where a stage takes longer than the limit."""
        seconds = self._costs.matrix(unit, shape)
        loads = self._loads.matrix(unit, self._costs, shape)
        return np.where(seconds > self._limit, np.inf, seconds + self._weight * loads)
