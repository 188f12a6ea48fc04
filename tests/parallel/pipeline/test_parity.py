"""Every schedule gives the loss, gradients and parameters of a single process."""

import pytest
import torch
from torch import nn

from tests.parallel.pipeline.reference import (
    SCHEDULES,
    assert_same,
    make_batch,
    make_model,
    train_alone,
    train_in_pipeline,
)

MICROBATCHES = (1, 2, 3, 4, 5, 8)


def stages_per_rank_of(schedule: str) -> int:
    return 2 if schedule == "interleaved" else 1


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_any_number_of_microbatches_gives_the_gradients_of_one_process(
    schedule: str, num_ranks: int
) -> None:
    # 5 samples in 8 micro-batches leave some empty; in 2, 3 and 4 the last ones are smaller.
    for num_microbatches in MICROBATCHES:
        batches = [make_batch(5)]
        ours = train_in_pipeline(
            make_model(),
            batches,
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            schedule=schedule,
            stages_per_rank=stages_per_rank_of(schedule),
        )
        assert_same(ours, train_alone(make_model(), batches))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("checkpoint", [False, True])
def test_twenty_optimizer_steps(schedule: str, checkpoint: bool) -> None:
    batches = [make_batch(7, seed=seed) for seed in range(20)]
    ours = train_in_pipeline(
        make_model(),
        batches,
        num_ranks=2,
        num_microbatches=4,
        schedule=schedule,
        stages_per_rank=stages_per_rank_of(schedule),
        checkpoint_activations=checkpoint,
    )
    assert_same(ours, train_alone(make_model(), batches))


@pytest.mark.parametrize("backend", ["grpc", "gloo"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_over_real_connections(backend: str, schedule: str) -> None:
    batches = [make_batch(6, seed=seed) for seed in range(3)]
    ours = train_in_pipeline(
        make_model(),
        batches,
        num_ranks=2,
        num_microbatches=4,
        schedule=schedule,
        stages_per_rank=stages_per_rank_of(schedule),
        backend=backend,
    )
    assert_same(ours, train_alone(make_model(), batches))


def test_uneven_stages_and_three_stages_per_rank() -> None:
    batches = [make_batch(4, seed=seed) for seed in range(2)]
    reference = train_alone(make_model(9), batches)
    for options in (
        {"num_ranks": 3, "counts": [1, 6, 2]},
        {"num_ranks": 2, "schedule": "interleaved", "stages_per_rank": 3},
        {"num_ranks": 2, "schedule": "gpipe", "stages_per_rank": 3},
        {"num_ranks": 1},
        {"num_ranks": 1, "schedule": "zero_bubble"},
        {"num_ranks": 1, "schedule": "interleaved", "stages_per_rank": 3},
    ):
        ours = train_in_pipeline(make_model(9), batches, num_microbatches=3, **options)
        assert_same(ours, reference)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bfloat16(schedule: str) -> None:
    # Activations and gradients travel as bf16. Each micro-batch's part of a gradient is rounded to
    # 8 bits; the sum of 4 of them differs from one process's by a few of their last bits.
    batches = [make_batch(8, dtype=torch.bfloat16)]
    ours = train_in_pipeline(
        make_model(dtype=torch.bfloat16),
        batches,
        num_ranks=2,
        num_microbatches=4,
        schedule=schedule,
        stages_per_rank=stages_per_rank_of(schedule),
    )
    assert all(gradient.dtype == torch.bfloat16 for gradient in ours.gradients.values())
    assert_same(ours, train_alone(make_model(dtype=torch.bfloat16), batches), relative=0.03)


@pytest.mark.parametrize(
    "wrong_loss",
    [
        lambda output, target: nn.functional.mse_loss(output, target) * 4,  # a sum over 4
        lambda output, target: (
            nn.functional.mse_loss(output, target) * len(output) / 2
        ),  # unweighted
    ],
)
def test_a_sum_or_an_unweighted_mean_is_rejected(wrong_loss) -> None:
    batches = [make_batch(7)]
    ours = train_in_pipeline(
        make_model(), batches, num_ranks=2, num_microbatches=4, loss_fn=wrong_loss
    )
    with pytest.raises(AssertionError):
        assert_same(ours, train_alone(make_model(), batches))
