"""What the executor really did: bubbles on the executed grid, activations in flight."""

import time

import pytest
import torch
from torch import nn

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.parallel.pipeline import PipelineParallel
from stagemesh.parallel.pipeline.results import RunRecord, executed_grid
from stagemesh.schedule.actions import Action
from stagemesh.schedule.builders import gpipe
from stagemesh.schedule.grid import Costs, max_in_flight, simulate
from tests.support.ranks import run_ranks


class Sleeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, seconds: float, backward_seconds: float) -> torch.Tensor:
        ctx.seconds = backward_seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        time.sleep(ctx.seconds)
        return gradient, None, None


class Stage(nn.Module):
    """Takes the same time for each forward and backward; with `halves` for either half of it."""

    def __init__(self, *, has_halves: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.bias = nn.Parameter(torch.zeros(2))
        self.seconds = 0.0
        self.has_halves = has_halves

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = Sleeping.apply(self.linear(x), self.seconds, self.seconds)
        # Leads to a weight alone, so it is walked in the half for the weights.
        return y + Sleeping.apply(self.bias, 0.0, self.seconds) if self.has_halves else y


def records_of(
    num_ranks: int,
    num_microbatches: int,
    schedule: str,
    *,
    stages_per_rank: int = 1,
    slot: float = 0.0,
    has_halves: bool = False,
) -> list[RunRecord]:
    def run(group: ProcessGroup) -> RunRecord:
        stages = [Stage(has_halves=has_halves) for _ in range(stages_per_rank)]
        pipeline = PipelineParallel(
            stages,
            process_group=group,
            num_microbatches=num_microbatches,
            schedule=schedule,
            loss_fn=nn.functional.mse_loss,
        )
        batch = torch.ones(num_microbatches, 2)
        if slot:  # what the first step of a process costs beyond the others is no bubble
            pipeline.step(batch, batch)
        for stage in stages:
            stage.seconds = slot
        group.barrier()
        return pipeline.step(batch, batch).record

    return run_ranks(num_ranks, run)


def executed(records: list[RunRecord]) -> list[list[Action]]:
    return [[timed.action for timed in record.timings] for record in records]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("num_microbatches", [1, 3, 5])
def test_bubbles_of_the_executed_order(num_ranks: int, num_microbatches: int) -> None:
    idle = {}
    for schedule in ("gpipe", "one_f_one_b", "interleaved", "zero_bubble"):
        v = 2 if schedule == "interleaved" else 1
        records = records_of(num_ranks, num_microbatches, schedule, stages_per_rank=v)
        ran = gpipe(num_ranks, num_microbatches, stages_per_rank=v).with_programs(executed(records))
        costs = Costs(backward=2) if schedule == "zero_bubble" else Costs()
        grid = simulate(ran, costs=costs)
        idle[schedule] = [grid.bubble_slots(rank) / v for rank in range(num_ranks)]
    formula = 2 * (num_ranks - 1)
    assert idle["gpipe"] == idle["one_f_one_b"] == [formula] * num_ranks
    for schedule in ("interleaved", "zero_bubble"):
        # In the slots of 1F1B: there the whole backward of zero-bubble's costs has two.
        of_1f1b = formula if schedule == "interleaved" else 3 * (num_ranks - 1)
        if num_microbatches > 1 or schedule == "zero_bubble":
            assert all(slots < of_1f1b for slots in idle[schedule])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
def test_bubbles_on_the_clock(schedule: str) -> None:
    slot, num_ranks, num_microbatches = 0.15, 3, 4
    grid = executed_grid(records_of(num_ranks, num_microbatches, schedule, slot=slot))
    for rank in range(num_ranks):
        assert grid.bubble_slots(rank, slot=slot) == 2 * (num_ranks - 1)
    planned = simulate(gpipe(num_ranks, num_microbatches))
    assert grid.makespan / slot == pytest.approx(planned.makespan, rel=0.1)
    assert "F0" in grid.render(slot=slot)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "stages_per_rank", "of_1f1b"),
    # In slots of the schedule: half a stage, and half a backward (as long as a forward).
    [("interleaved", 2, 4), ("zero_bubble", 1, 3)],
)
def test_smaller_bubbles_on_the_clock(schedule: str, stages_per_rank: int, of_1f1b: int) -> None:
    slot, num_ranks, num_microbatches = 0.1, 3, 4
    records = records_of(
        num_ranks,
        num_microbatches,
        schedule,
        stages_per_rank=stages_per_rank,
        slot=slot,
        has_halves=schedule == "zero_bubble",
    )
    grid = executed_grid(records)
    for rank in range(num_ranks):
        assert grid.bubble_slots(rank, slot=slot) < of_1f1b * (num_ranks - 1)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("num_microbatches", [1, 3, 8])
def test_activations_in_flight(num_ranks: int, num_microbatches: int) -> None:
    for schedule, most in (
        ("one_f_one_b", lambda stage: min(num_microbatches, num_ranks - stage)),
        ("gpipe", lambda stage: num_microbatches),
        ("zero_bubble", lambda stage: min(num_microbatches, num_ranks)),
    ):
        records = records_of(num_ranks, num_microbatches, schedule)
        for stage, record in enumerate(records):
            assert record.max_in_flight == {stage: most(stage)}
            assert max_in_flight([timed.action for timed in record.timings]) == {stage: most(stage)}


class Saved:
    """What autograd holds in a tensor's place until a backward lets go of it."""

    def __init__(self, tensor: torch.Tensor, counts: list[int]) -> None:
        self.tensor = tensor
        self._counts = counts
        counts.append(counts[-1] + 1)

    def __del__(self) -> None:
        self._counts.append(self._counts[-1] - 1)


class Counted(nn.Module):
    """Knows how many of its activations autograd holds; one for each micro-batch in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.counts = [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def pack(tensor: torch.Tensor) -> object:
            is_weight = tensor.untyped_storage().data_ptr() == self.linear.weight.data_ptr()
            return tensor if is_weight else Saved(tensor, self.counts)

        with torch.autograd.graph.saved_tensors_hooks(
            pack, lambda held: getattr(held, "tensor", held)
        ):
            return self.linear(x)


@pytest.mark.parametrize("schedule", ["one_f_one_b", "gpipe"])
def test_autograd_holds_no_more_than_the_schedule_says(schedule: str) -> None:
    """Measured on the graphs themselves: links, outputs and losses keep none of them alive."""
    num_ranks, num_microbatches = 4, 6

    def run(group: ProcessGroup) -> list[int]:
        stage = Counted()
        pipeline = PipelineParallel(
            stage,
            process_group=group,
            num_microbatches=num_microbatches,
            schedule=schedule,
            loss_fn=nn.functional.mse_loss,
        )
        batch = torch.ones(num_microbatches, 2)
        for _ in range(2):
            pipeline.step(batch, batch)
        return [max(stage.counts), stage.counts[-1]]

    most = [num_microbatches] * num_ranks if schedule == "gpipe" else [4, 3, 2, 1]
    assert run_ranks(num_ranks, run) == [[number, 0] for number in most]


def test_the_clock_is_an_argument() -> None:
    def run(group: ProcessGroup) -> RunRecord:
        ticks = iter(range(1000))
        pipeline = PipelineParallel(
            Stage(),
            process_group=group,
            num_microbatches=2,
            loss_fn=nn.functional.mse_loss,
            clock=lambda: next(ticks),
        )
        return pipeline.step(torch.ones(2, 2), torch.ones(2, 2)).record

    (record,) = run_ranks(1, run)
    assert [(t.start, t.end) for t in record.timings] == [(0, 1), (2, 3), (4, 5), (6, 7)]
