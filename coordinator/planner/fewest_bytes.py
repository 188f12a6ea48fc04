"""The chain that loads the fewest bytes among those that are quick enough: best-first search.

Chains grow in the order of the bytes that they load. Of two that use the same nodes, end on the
same unit and reach the same border, the one that loads more goes on only if it is quicker. A chain
whose rest cannot be quick enough is dropped; the rest is bounded by the least time over all units,
used or not. The first whole chain is the answer.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from coordinator.planner.chain import Chain, ChainStage, StageCounts
from coordinator.planner.spans import Floats
from coordinator.planner.units import Unit

_MAX_CHAINS = 200_000
"""Chains looked at before it is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What a chain can be made of; lists are by unit, matrices by [start, end]."""

    units: Sequence[Unit]
    seconds: Sequence[Floats]
    """Infinite where a stage is not allowed."""
    loads: Sequence[Floats]
    """Bytes."""
    hops: Floats
    """Seconds from unit to unit."""
    entries: Sequence[float]
    exits: Sequence[float]
    counts: StageCounts
    is_order_fixed: bool


@dataclass(frozen=True, slots=True)
class _Partial:
    """A chain that is not whole yet."""

    used: int
    last: int
    border: int
    count: int
    before: "_Partial | None"

    @property
    def state(self) -> tuple[int, int, int, int]:
        """What the rest depends on."""
        return self.used, self.last, self.border, self.count


def fewest_bytes(choices: Choices, *, limit_seconds: float) -> tuple[float, Chain] | None:
    """The chain that loads the fewest bytes within a time.

    Returns:
        Bytes and chain; None when there is none, or when the search was given up.
    """
    search = _Search(choices, limit_seconds)
    return search.run()


class _Search:
    def __init__(self, choices: Choices, limit_seconds: float) -> None:
        self._choices = choices
        self._limit = limit_seconds
        self._num_layers = choices.seconds[0].shape[0] - 1
        self._masks = [sum(1 << i for i in unit) for unit in choices.units]
        self._rest = _least_rest(choices, self._num_layers)
        self._heap: list[tuple[float, float, int, _Partial]] = []
        self._pushed = 0

    def run(self) -> tuple[float, Chain] | None:
        quickest: dict[tuple[int, int, int, int], float] = {}
        self._push(0.0, 0.0, _Partial(0, -1, 0, 0, None))
        while self._heap and self._pushed < _MAX_CHAINS:
            load, seconds, _, partial = heapq.heappop(self._heap)
            if quickest.get(partial.state, np.inf) <= seconds:
                continue
            quickest[partial.state] = seconds
            if partial.border == self._num_layers:
                if self._choices.counts.contain(partial.count):
                    return load, self._chain(partial, seconds)
                continue
            for after, more_seconds, more_load in self._extensions(partial, seconds):
                if quickest.get(after.state, np.inf) > more_seconds:
                    self._push(load + more_load, more_seconds, after)
        return None

    def _push(self, load: float, seconds: float, partial: _Partial) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (load, seconds, self._pushed, partial))

    def _extensions(
        self, partial: _Partial, seconds: float
    ) -> Iterator[tuple[_Partial, float, float]]:
        """One stage more."""
        choices, highest = self._choices, self._choices.counts.highest
        if highest is not None and partial.count >= highest:
            return
        for i, unit in enumerate(choices.units):
            is_late = choices.is_order_fixed and partial.used >= 1 << unit[0]
            if partial.used & self._masks[i] or is_late:
                continue
            way = choices.entries[i] if partial.last < 0 else float(choices.hops[partial.last, i])
            after = seconds + way + choices.seconds[i][partial.border]
            rest = self._rest.copy()
            rest[-1] = choices.exits[i]
            for end in np.flatnonzero(after + rest <= self._limit):
                border = int(end)
                yield (
                    _Partial(partial.used | self._masks[i], i, border, partial.count + 1, partial),
                    float(after[border]) + (choices.exits[i] if border == len(rest) - 1 else 0.0),
                    float(choices.loads[i][partial.border, border]),
                )

    def _chain(self, whole: _Partial, seconds: float) -> Chain:
        stages: list[ChainStage] = []
        slowest, partial = 0.0, whole
        while partial.before is not None:
            start = partial.before.border
            slowest = max(
                slowest, float(self._choices.seconds[partial.last][start, partial.border])
            )
            stages.append(
                ChainStage(
                    unit=self._choices.units[partial.last],
                    start_layer=start,
                    end_layer=partial.border,
                )
            )
            partial = partial.before
        return Chain(stages=tuple(stages[::-1]), seconds=seconds, slowest_stage=slowest)


def _least_rest(choices: Choices, num_layers: int) -> Floats:
    """By border: the least time from there to the end, over all units."""
    least = np.min(np.stack(choices.seconds), axis=0)
    hop = float(choices.hops.min())
    rest = np.full(num_layers + 1, np.inf)
    rest[num_layers] = min(choices.exits)
    for border in range(num_layers - 1, -1, -1):
        rest[border] = hop + float((least[border] + rest).min())
    return rest
