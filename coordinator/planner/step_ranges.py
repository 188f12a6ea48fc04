"""Numbers of stages for which the scheduler makes equal steps."""

from collections.abc import Iterator
from dataclasses import dataclass

from coordinator.planner.chain import StageCounts
from coordinator.planner.time_model import step_sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRange:
    """Numbers of stages for which steps are alike."""

    counts: StageCounts
    rows: int
    """Streams in a step."""
    steps: int
    """Steps in flight."""


def step_ranges(streams: int, *, allowed: StageCounts, most: int) -> Iterator[StepRange]:
    """Ranges of numbers of stages, up to `most`, with equal steps."""
    highest = most if allowed.highest is None else min(most, allowed.highest)
    start = allowed.lowest
    for count in range(allowed.lowest, highest + 1):
        sizes = step_sizes(streams, num_stages=count)
        if count < highest and step_sizes(streams, num_stages=count + 1) == sizes:
            continue
        is_open = count == most and allowed.highest is None
        yield StepRange(
            counts=StageCounts(lowest=start, highest=None if is_open else count),
            rows=sizes[0],
            steps=sizes[1],
        )
        start = count + 1
