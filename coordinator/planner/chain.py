"""Chains of stages: the step that both searches share, and how a chain is read back.

F[k, e] is the least time of a chain of k stages that covers layers [0, e). One more stage on a unit
u whose matrix is C extends it:

    F_u[k + 1, e] = min over s < e of (min over v of (F_v[k, s] + hop(v, u)) + C[s, e])

The searches differ in which v may come before u: `ordered` takes those before it in one order,
`subsets` those that share no node with it.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from coordinator.planner.spans import Floats, Ints
from coordinator.planner.step_times import StepShape
from coordinator.planner.units import Unit

NO_RECORD = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainStage:
    """A unit and its layers."""

    unit: Unit
    start_layer: int
    end_layer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A pipeline as a search found it."""

    stages: tuple[ChainStage, ...]
    """In order."""
    seconds: float
    """All stages and hops, and the way through the coordinator."""
    slowest_stage: float
    """The largest entry of a matrix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCounts:
    """Numbers of stages that are allowed."""

    lowest: int = 1
    highest: int | None = None
    """None allows any."""
    degrees: tuple[int, ...] = ()
    """Ranks of each stage; with these the number of stages is fixed. Empty leaves them open."""

    @property
    def num_counters(self) -> int:
        """Numbers that a search must tell apart: from the last on all are alike."""
        if self.highest is not None:
            return self.highest + 1
        return self.lowest + 1 if self.lowest > 1 else 1

    def contain(self, count: int) -> bool:
        """Whether a chain may have so many stages."""
        return self.lowest <= count and (self.highest is None or count <= self.highest)

    def final(self) -> range:
        """Counters that a whole chain may have."""
        last = self.num_counters - 1
        return range(last if self.highest is None else self.lowest, last + 1)


class ChainSearch(Protocol):
    """Finds the chain of least time."""

    def best(self, shape: StepShape, *, counts: StageCounts, limit_seconds: float) -> Chain | None:
        """The quickest chain none of whose stages or links takes longer than the limit."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The best ways into a unit, [count, border]: time, the record before, its count."""

    seconds: Floats
    record: Ints
    count: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """Chains that end on a unit."""

    unit: Unit
    matrix: Floats
    borders: Ints
    """At which its stage may begin, in order."""
    reach: Reach

    def start(self, count: int, end_layer: int) -> int:
        """Where its stage begins in the best chain to that layer, the first of equals.

        Only a chain that is read back asks, so a search looks for least times alone: to find where
        each lies takes several times as long.
        """
        sums = self.reach.seconds[count, self.borders] + self.matrix[self.borders, end_layer]
        return int(self.borders[sums.argmin()])


def limited(matrix: Floats, limit_seconds: float) -> Floats:
    """The matrix without what takes longer than the limit."""
    if limit_seconds == np.inf:
        return matrix
    return np.where(matrix > limit_seconds, np.inf, matrix)


class ChainTable:
    """Chains found so far, each with what it was extended from."""

    def __init__(self, num_layers: int, counts: StageCounts) -> None:
        self.num_layers = num_layers
        self.counts = counts
        self._records: list[_Record] = []
        self._best = np.inf
        self._end = (NO_RECORD, 0)

    @property
    def shape(self) -> tuple[int, int]:
        """Of a table of chains: [count, border]."""
        return self.counts.num_counters, self.num_layers + 1

    def add(
        self,
        unit: Unit,
        matrix: Floats,
        *,
        seconds: Floats,
        record: Ints,
        entry_seconds: float,
        exit_seconds: float,
    ) -> Floats | None:
        """Extend chains by a stage on a unit.

        Args:
            unit: the unit.
            matrix: its seconds by [start, end].
            seconds: the best chains that may come before, with the hop, [count, border].
            record: which chains those are.
            entry_seconds: for a chain that starts here.
            exit_seconds: for one that ends here.

        Returns:
            The chains that end on the unit, [count, border]; they are the record `last_record`.
            None when there are none.
        """
        reach = self._after_one_more(seconds, record, entry_seconds)
        for count, degree in enumerate(self.counts.degrees, start=1):
            # As stage number `count` only units of that many ranks are allowed.
            if degree != len(unit):
                reach.seconds[count] = np.inf
        # A border is worth extending only if some chain reaches it.
        borders = np.flatnonzero(np.isfinite(reach.seconds).any(axis=0))
        if not borders.size:
            return None
        sums = reach.seconds[:, borders, None] + matrix[None, borders]
        values: Floats = sums.min(axis=1)
        if not np.isfinite(values).any():
            return None
        self._records.append(_Record(unit=unit, matrix=matrix, borders=borders, reach=reach))
        for count in self.counts.final():
            if values[count, -1] + exit_seconds < self._best:
                self._best = float(values[count, -1]) + exit_seconds
                self._end = (self.last_record, count)
        return values

    @property
    def last_record(self) -> int:
        """The latest chains' record."""
        return len(self._records) - 1

    def chain(self) -> Chain | None:
        """The best whole chain."""
        record, count = self._end
        if record == NO_RECORD:
            return None
        stages: list[ChainStage] = []
        border, slowest = self.num_layers, 0.0
        while record != NO_RECORD:
            found = self._records[record]
            start = found.start(count, border)
            slowest = max(slowest, float(found.matrix[start, border]))
            stages.append(ChainStage(unit=found.unit, start_layer=start, end_layer=border))
            record, count = (
                int(found.reach.record[count, start]),
                int(found.reach.count[count, start]),
            )
            border = start
        assert border == 0
        return Chain(stages=tuple(stages[::-1]), seconds=self._best, slowest_stage=slowest)

    def _after_one_more(self, seconds: Floats, record: Ints, entry_seconds: float) -> Reach:
        """Chains as they are counted once a stage is added; the empty chain is one of them."""
        number = self.counts.num_counters
        seconds, record = seconds.copy(), record.copy()
        if entry_seconds < seconds[0, 0]:
            seconds[0, 0], record[0, 0] = entry_seconds, NO_RECORD
        if number == 1:
            return Reach(seconds=seconds, record=record, count=np.zeros_like(record))
        after = np.full_like(seconds, np.inf)
        before = np.full_like(record, NO_RECORD)
        count = np.broadcast_to(np.arange(-1, number - 1)[:, None], record.shape).copy()
        after[1:], before[1:] = seconds[:-1], record[:-1]
        if self.counts.highest is None:
            stays = seconds[-1] < after[-1]
            after[-1][stays], before[-1][stays] = seconds[-1][stays], record[-1][stays]
            count[-1][stays] = number - 1
        return Reach(seconds=after, record=before, count=count)
