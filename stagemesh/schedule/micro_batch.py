"""MicroBatchSchedule: a schedule as a list of (stage, micro-batch, forward or backward).

A plainer view of the same data as stagemesh.schedule.schedule, for one stage per rank and whole
backwards. Torch-free.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from stagemesh.errors import ConfigError
from stagemesh.schedule.actions import Action, ActionKind
from stagemesh.schedule.builders import gpipe, one_f_one_b
from stagemesh.schedule.grid import TimeGrid, simulate
from stagemesh.schedule.schedule import Schedule


class ScheduleEntry(NamedTuple):
    """One thing that a stage does."""

    stage: int
    micro_batch: int
    is_forward: bool


@dataclass(frozen=True, kw_only=True)
class MicroBatchSchedule:
    """What each stage does, and when, if a forward and a backward take one slot each."""

    schedule: Schedule

    @classmethod
    def gpipe(cls, stages: int, micro_batches: int) -> "MicroBatchSchedule":
        """All forwards, then all backwards.

        Raises:
            ConfigError: a number is below 1.
        """
        return cls(schedule=gpipe(stages, micro_batches))

    @classmethod
    def one_f_one_b(cls, stages: int, micro_batches: int) -> "MicroBatchSchedule":
        """Warm-up, then a forward and a backward in turn, then cool-down.

        Raises:
            ConfigError: a number is below 1.
        """
        return cls(schedule=one_f_one_b(stages, micro_batches))

    @cached_property
    def grid(self) -> TimeGrid:
        """The time grid, in slots."""
        return simulate(self.schedule)

    @cached_property
    def entries(self) -> tuple[ScheduleEntry, ...]:
        """All entries in the order of time; within a slot in the order of stages."""
        cells = [cell for row in self.grid.rows for cell in row]
        cells.sort(key=lambda cell: (cell.start, cell.action.stage))
        return tuple(_entry(cell.action) for cell in cells)

    def stage_schedule(self, stage: int) -> tuple[ScheduleEntry, ...]:
        """The entries of a stage, in order.

        Raises:
            ConfigError: there is no such stage.
        """
        self._check_stage(stage)
        return tuple(_entry(action) for action in self.schedule.programs[stage])

    def bubble_slots(self, stage: int | None = None) -> int:
        """Idle slots of a stage, or of all stages together, from the first slot to the last.

        Raises:
            ConfigError: there is no such stage.
        """
        if stage is not None:
            self._check_stage(stage)
            return self.grid.bubble_slots(stage)
        return sum(self.grid.bubble_slots(rank) for rank in range(self.schedule.num_stages))

    def _check_stage(self, stage: int) -> None:
        if not 0 <= stage < self.schedule.num_stages:
            raise ConfigError(f"stage must be in [0, {self.schedule.num_stages}), got {stage}")


def _entry(action: Action) -> ScheduleEntry:
    return ScheduleEntry(
        stage=action.stage,
        micro_batch=action.microbatch,
        is_forward=action.kind is ActionKind.FORWARD,
    )
