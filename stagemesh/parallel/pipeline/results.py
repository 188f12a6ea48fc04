"""What a run of a pipeline tells."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from stagemesh.schedule.grid import TimedAction, TimeGrid


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What one rank did, and when."""

    timings: tuple[TimedAction, ...]
    """Compute actions in the order in which they ran; seconds of the pipeline's clock."""
    max_in_flight: Mapping[int, int]
    """Of each stage here, the most micro-batches whose activations were held at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one rank has of a step."""

    loss: torch.Tensor | None
    """Mean over the batch, 0-d; None where the last stage is elsewhere and the loss not shared."""
    microbatch_losses: tuple[torch.Tensor | None, ...]
    """On the last stage, of each micro-batch; None for one without samples. Else empty."""
    record: RunRecord
    """What was done, and when."""


def executed_grid(records: Sequence[RunRecord]) -> TimeGrid:
    """The grid of all ranks' records of one step, whose clocks must agree."""
    return TimeGrid(rows=tuple(record.timings for record in records))
