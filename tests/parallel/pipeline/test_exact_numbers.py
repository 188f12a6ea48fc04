"""Small pipelines whose losses and gradients are known by hand."""

import time
from typing import Any

import pytest
import torch
from torch import nn

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import ConfigError, GroupAborted
from stagemesh.parallel.pipeline import PipelineParallel
from tests.support.ranks import run_ranks

SCHEDULES = ("gpipe", "one_f_one_b", "zero_bubble")


class Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def mean_of_outputs(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.mean()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_mean_is_taken_once(schedule: str) -> None:
    # h = 2x, y = 3h, loss = mean(y): a sum would give 30 and 20, a mean per stage 1.875.
    def run(group: ProcessGroup) -> tuple[Any, Any]:
        stage = Scale((2.0, 3.0)[group.rank])
        pipeline = PipelineParallel(
            stage,
            process_group=group,
            num_microbatches=4,
            schedule=schedule,
            loss_fn=mean_of_outputs,
        )
        x = torch.tensor([1.0, 2.0, 3.0, 4.0])
        result = pipeline.step(x, x, share_loss=True)
        return result.loss.item(), stage.factor.grad.item()

    assert run_ranks(2, run) == [(15.0, 7.5), (15.0, 5.0)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("num_samples", "num_microbatches"), [(8, 3), (2, 4), (1, 5)])
def test_a_batch_that_does_not_divide(
    schedule: str, num_samples: int, num_microbatches: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_samples, generator=generator)
    y = torch.randn(num_samples, generator=generator)
    ws = [torch.tensor(w, requires_grad=True) for w in (2.0, 3.0)]
    reference = nn.functional.mse_loss(x * ws[0] * ws[1], y)
    reference.backward()

    def run(group: ProcessGroup) -> tuple[float, float]:
        stage = Scale((2.0, 3.0)[group.rank])
        pipeline = PipelineParallel(
            stage,
            process_group=group,
            num_microbatches=num_microbatches,
            schedule=schedule,
            loss_fn=nn.functional.mse_loss,
        )
        loss = pipeline.step(x, y, share_loss=True).loss
        return loss.item(), stage.factor.grad.item()

    for rank, (loss, gradient) in enumerate(run_ranks(2, run)):
        assert loss == pytest.approx(reference.item(), rel=1e-6)
        assert gradient == pytest.approx(ws[rank].grad.item(), rel=1e-6)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_fewer_microbatches_than_stages_end_soon(num_stages: int) -> None:
    for schedule in SCHEDULES:
        for num_microbatches in (1, 2, 3, 4, 5):
            began = time.perf_counter()

            def run(group: ProcessGroup, schedule=schedule, m=num_microbatches) -> float:
                stage = Scale(2.0)
                pipeline = PipelineParallel(
                    stage,
                    process_group=group,
                    num_microbatches=m,
                    schedule=schedule,
                    loss_fn=mean_of_outputs,
                )
                pipeline.step(torch.ones(m), torch.ones(m))
                return stage.factor.grad.item()

            assert run_ranks(num_stages, run) == [2.0 ** (num_stages - 1)] * num_stages
            assert time.perf_counter() - began < 5


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.0], [2.0], [3.0]]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.weight[tokens]


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # Not the table: the copies are made equal when the pipeline is made.
        self.weight = nn.Parameter(torch.zeros(3, 1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.weight.T


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("num_steps", [1, 2])
def test_tied_embedding_and_head_have_both_gradients(num_ranks: int, num_steps: int) -> None:
    def run(group: ProcessGroup) -> tuple[Any, Any]:
        is_end = group.rank in (0, group.size - 1)
        stage = [Embed(), Head()][group.rank > 0] if is_end else nn.Identity()
        tied = [stage.weight] if is_end else []
        pipeline = PipelineParallel(
            stage,
            process_group=group,
            num_microbatches=1,
            schedule="gpipe",
            loss_fn=lambda logits, _: logits.sum(),
            tied_parameters=tied,
        )
        for _ in range(num_steps):  # gradients add up over steps, each summed over the ranks once
            pipeline.step(torch.tensor([1]), torch.tensor([1]))
        if not is_end:
            return None, None
        gradient = stage.weight.grad.flatten().tolist()
        torch.optim.SGD([stage.weight], lr=0.1).step()
        return gradient, stage.weight.flatten().tolist()

    results = run_ranks(num_ranks, run)
    first, last = results[0], results[-1]
    assert first[0] == last[0] == [2.0 * num_steps, 8.0 * num_steps, 2.0 * num_steps]
    assert first[1] == last[1]


def test_without_the_tie_each_end_has_a_part() -> None:
    def run(group: ProcessGroup) -> Any:
        stage = [Embed(), Head()][group.rank]
        stage.weight.data = torch.tensor([[1.0], [2.0], [3.0]])
        pipeline = PipelineParallel(
            stage,
            process_group=group,
            num_microbatches=1,
            loss_fn=lambda logits, _: logits.sum(),
        )
        pipeline.step(torch.tensor([1]), torch.tensor([1]))
        return stage.weight.grad.flatten().tolist()

    assert run_ranks(2, run) == [[0.0, 6.0, 0.0], [2.0, 2.0, 2.0]]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_microbatches_of_different_lengths_meet_their_own_targets(schedule: str) -> None:
    parts = [torch.arange(length, dtype=torch.float32)[None] + 100 * length for length in (4, 7, 5)]

    def run(group: ProcessGroup) -> Any:
        pipeline = PipelineParallel(
            nn.Identity(),
            process_group=group,
            num_microbatches=3,
            schedule=schedule,
            loss_fn=lambda output, target: (output - target).abs().sum(),
        )
        # Two steps, so that nothing is remembered from the first.
        lengths = [parts, parts[::-1]]
        for batch in lengths:
            result = pipeline.step(batch, batch)
        return [loss.item() for loss in result.microbatch_losses]

    assert run_ranks(2, run) == [[], [0.0, 0.0, 0.0]]


def test_weights_other_than_samples() -> None:
    # Token means over 1 and 3 tokens: the mean of all four, not of the two means.
    values = [torch.tensor([[8.0, 0.0, 0.0]]), torch.tensor([[1.0, 2.0, 3.0]])]
    masks = [torch.tensor([[1.0, 0.0, 0.0]]), torch.ones(1, 3)]

    def run(group: ProcessGroup) -> float:
        stage = Scale(1.0)
        pipeline = PipelineParallel(
            stage,
            process_group=group,
            num_microbatches=2,
            loss_fn=lambda output, mask: (output * mask).sum() / mask.sum(),
            weight_fn=lambda mask: mask.sum().item(),
        )
        result = pipeline.step(values, masks, share_loss=True)
        assert result.loss.item() == 14 / 4
        return stage.factor.grad.item()

    assert run_ranks(2, run) == [14 / 4, 14 / 4]


@pytest.mark.parametrize(
    ("inputs", "targets", "says"),
    [
        (torch.ones(0, 2), torch.ones(0), "batch has no samples|must not be negative, nor all 0"),
        (torch.ones(4), torch.ones(2), "samples in only one of"),
        ([torch.ones(1)] * 3, torch.ones(4), "got a list of 3 micro-batches, the schedule has 4"),
        (torch.tensor(1.0), torch.ones(4), "0-d tensor has no samples"),
        (None, torch.ones(4), "inputs are needed"),
        (torch.ones(4), None, "targets and loss_fn are needed"),
        (torch.ones(4), torch.ones(4), "must give a mean, 0-d"),
        ((torch.ones(4), torch.ones(3)), torch.ones(4), "same number of rows, got"),
    ],
)
def test_batches_that_do_not_fit_are_refused_on_all_ranks(inputs, targets, says: str) -> None:
    raised: dict[int, BaseException] = {}

    def run(group: ProcessGroup) -> None:
        pipeline = PipelineParallel(
            nn.Identity(),
            process_group=group,
            num_microbatches=4,
            loss_fn=lambda output, _: output if "mean, 0-d" in says else output.mean(),
        )
        with pytest.raises((ConfigError, GroupAborted)) as caught:
            pipeline.step(inputs, targets)
        raised[group.rank] = caught.value

    run_ranks(2, run)
    assert len(raised) == 2
    errors = [error for error in raised.values() if isinstance(error, ConfigError)]
    assert errors
    with pytest.raises(ConfigError, match=says):
        raise errors[0]
