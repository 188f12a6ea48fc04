"""From chains of least time to the best pipeline for an objective.

Latency is the time of a chain, so one search does it. Throughput wants the least cycle,

    max(time of a chain at b streams per step, m * its bottleneck),

where b and m follow from the number of stages (`step_ranges`). For each range of numbers of stages
with the same b and m: the least time among chains whose bottleneck is within a limit only grows as
the limit falls, while m * limit falls with it, so bisection comes near to where they meet. From
there the limit goes down to just below what is known to be possible for as long as anything better
is found. The result is the optimum over the search's chains. Ranges that a lower bound rules out
are not searched, and stages are counted only where the best chain of any number is out of range.
"""

from dataclasses import dataclass
from itertools import pairwise

from coordinator.planner.chain import Chain, ChainSearch, StageCounts
from coordinator.planner.lower_bound import LowerBound
from coordinator.planner.profiles import Workload
from coordinator.planner.step_ranges import StepRange, step_ranges
from coordinator.planner.step_times import StepShape, decode_shape, message_bytes
from coordinator.planner.units import UnitCosts, Ways

_BISECTIONS = 6
_BELOW = 1 - 1e-9
"""Improvements smaller than this are rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A pipeline and what it is worth."""

    value: float
    """Seconds per token: of one stream, or of all of this pipeline together."""
    chain: Chain
    """The pipeline."""
    shape: StepShape
    """The step that its shares are best for."""


class Optimiser:
    """Finds the best pipeline of one replica.

    Args:
        costs: of the units, with the replica's streams.
        ways: between nodes.
        bound: of any pipeline on the cluster.
        allowed: numbers of stages.
        most_stages: nodes and layers allow no more.
    """

    def __init__(
        self,
        costs: UnitCosts,
        ways: Ways,
        *,
        bound: LowerBound,
        allowed: StageCounts,
        most_stages: int,
    ) -> None:
        self._costs = costs
        self._ways = ways
        self._bound = bound
        self._allowed = allowed
        self._most = most_stages

    def best(self, search: ChainSearch, *, below: float = float("inf")) -> Candidate | None:
        """The best pipeline that the search knows, if its value is below a bound."""
        workload, streams = self._costs.workload, self._costs.streams
        if workload.objective == "latency":
            return self._least_time(search, workload, below=below)
        best: Candidate | None = None
        ranges = step_ranges(streams, allowed=self._allowed, most=self._most)
        bounds = [(*self._bound.of_steps(steps), steps) for steps in ranges]
        for cycle, bottleneck, steps in sorted(bounds, key=lambda entry: entry[:2]):
            if cycle < below * streams * _BELOW:
                found = self._least_cycle(
                    search, steps, below=below * streams, least_bottleneck=bottleneck
                )
                if found is not None:
                    best, below = found, found.value
        return best

    def _least_time(
        self, search: ChainSearch, workload: Workload, *, below: float
    ) -> Candidate | None:
        shape = decode_shape(workload, rows=1)
        if self._bound.step_seconds(shape) >= below:
            return None
        chain = search.best(shape, counts=self._allowed, limit_seconds=float("inf"))
        if chain is None or chain.seconds >= below * _BELOW:
            return None
        return Candidate(value=chain.seconds, chain=chain, shape=shape)

    def _least_cycle(
        self, search: ChainSearch, steps: StepRange, *, below: float, least_bottleneck: float
    ) -> Candidate | None:
        shape = decode_shape(self._costs.workload, rows=steps.rows)
        best: Chain | None = None

        def improve(limit: float) -> bool:
            """Search within a limit; whether that gave something better."""
            nonlocal best, below
            chain = self._quickest(search, shape, steps, limit=limit, below=below * _BELOW)
            if chain is None:
                return False
            cycle = max(chain.seconds, steps.steps * self._bottleneck(chain, shape))
            if cycle >= below * _BELOW:
                return False
            best, below = chain, cycle
            return True

        improve(below / steps.steps * _BELOW)
        low = least_bottleneck
        for _ in range(_BISECTIONS if best is not None else 0):
            # Where the time of the chain is what counts, a lower limit only makes it longer.
            if best is not None and best.seconds >= below:
                break
            middle = (low + below / steps.steps) / 2
            if not improve(middle):
                low = middle
        while best is not None and improve(below / steps.steps * _BELOW):
            pass
        if best is None:
            return None
        return Candidate(value=below / self._costs.streams, chain=best, shape=shape)

    def _quickest(
        self,
        search: ChainSearch,
        shape: StepShape,
        steps: StepRange,
        *,
        limit: float,
        below: float,
    ) -> Chain | None:
        """The quickest chain of the range within a limit, if its time is below a bound."""
        chain = search.best(shape, counts=self._allowed, limit_seconds=limit)
        if chain is None or chain.seconds >= below or steps.counts.contain(len(chain.stages)):
            return chain if chain is not None and chain.seconds < below else None
        chain = search.best(shape, counts=steps.counts, limit_seconds=limit)
        return chain if chain is not None and chain.seconds < below else None

    def _bottleneck(self, chain: Chain, shape: StepShape) -> float:
        size = message_bytes(self._costs.model, rows=shape.rows)
        units = [stage.unit for stage in chain.stages]
        occupied = (self._ways.occupied(a, b, num_bytes=size) for a, b in pairwise(units))
        return max((chain.slowest_stage, *occupied))
