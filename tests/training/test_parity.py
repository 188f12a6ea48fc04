"""All axes together train as one process does: loss, gradient norm and weights, for 20 steps."""

import functools
from typing import Any

import pytest
import torch

from stagemesh.training.train_step import TrainStep
from tests.support.ranks import run_ranks
from tests.training.support import (
    MODEL,
    TIED,
    assert_same,
    make_config,
    train_alone,
    train_on,
)


@functools.cache
def alone(is_tied: bool) -> Any:
    found = train_alone(TIED if is_tied else MODEL)
    assert found.losses[-1] < found.losses[0] - 0.2
    # Clipped in most steps, so that the norm counts.
    assert sum(norm > 0.5 for norm in found.norms) > 10
    return found


CASES = [
    # dp, pp, tp, fsdp, tied, other settings
    (1, 1, 1, False, True, {}),
    (1, 1, 1, True, False, {}),
    (2, 1, 1, False, True, {}),
    (2, 1, 1, True, True, {}),
    (1, 2, 1, False, True, {"num_microbatches": 4}),
    (1, 1, 2, False, True, {}),
    (2, 2, 1, True, True, {"num_microbatches": 3}),
    (2, 1, 2, True, True, {}),
    (1, 2, 2, False, True, {"num_microbatches": 4}),
]
MORE_CASES = [
    (4, 1, 1, True, False, {}),
    (2, 2, 1, False, False, {"num_microbatches": 3}),
    (2, 1, 2, False, False, {}),
    (1, 4, 1, False, True, {"schedule": "gpipe", "num_microbatches": 8}),
    (2, 2, 1, False, True, {"schedule": "interleaved"}),
    (2, 2, 1, True, False, {"schedule": "interleaved", "num_microbatches": 4}),
    (2, 2, 1, False, False, {"schedule": "zero_bubble", "num_microbatches": 4}),
    (2, 2, 1, True, True, {"schedule": "zero_bubble", "num_microbatches": 4}),
    (1, 2, 2, False, False, {"schedule": "zero_bubble", "num_microbatches": 4}),
    (2, 2, 1, True, False, {"checkpoint_activations": True}),
    (1, 2, 2, False, True, {"checkpoint_activations": True}),
]


@pytest.mark.parametrize(
    ("dp", "pp", "tp", "fsdp", "is_tied", "changes"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_CASES)],
)
def test_a_topology_trains_as_one_process(
    dp: int, pp: int, tp: int, fsdp: bool, is_tied: bool, changes: dict[str, Any]
) -> None:
    config = make_config(dp, pp, tp, fsdp=fsdp, **changes)
    model = TIED if is_tied else MODEL
    ranks = run_ranks(dp * pp * tp, lambda world: train_on(world, model, config))
    assert_same(ranks, alone(is_tied))


@pytest.mark.parametrize("backend", ["grpc", "gloo"])
def test_over_real_connections(backend: str) -> None:
    config = make_config(2, 2, 1, fsdp=True)
    ranks = run_ranks(4, lambda world: train_on(world, MODEL, config, num_steps=5), backend=backend)
    assert_same(ranks, train_alone(MODEL, num_steps=5))


def test_a_vocabulary_that_tp_does_not_divide_stays_whole() -> None:
    model = {**TIED, "vocab_size": 65}
    config = make_config(1, 1, 2)
    ranks = run_ranks(2, lambda world: train_on(world, model, config, num_steps=5))
    assert_same(ranks, train_alone(model, num_steps=5))


@pytest.mark.parametrize(("dp", "pp", "tp", "fsdp"), [(2, 2, 1, True), (1, 2, 2, False)])
def test_adamw_stays_close(dp: int, pp: int, tp: int, fsdp: bool) -> None:
    # Adam divides by the gradient's size, so that rounding of a gradient near 0 becomes a step of
    # full length: weights agree to 1e-3, losses still to 1e-5.
    settings = {"learning_rate": 3e-3, "max_grad_norm": 1.0}
    config = make_config(dp, pp, tp, fsdp=fsdp, **settings)
    expected = train_alone(
        TIED,
        config=make_config(**settings),
        make_optimizer=lambda p: torch.optim.AdamW(p, weight_decay=0.01),
    )
    ranks = run_ranks(4, lambda world: train_on(world, TIED, config, make_optimizer=None))
    assert_same(ranks, expected, relative=1e-3)
    losses = torch.tensor(ranks[0].losses), torch.tensor(expected.losses)
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("dp", "pp", "tp", "fsdp"), [(1, 1, 1, False), (2, 1, 2, True), (1, 2, 2, False)]
)
def test_mixed_precision_follows_float32(dp: int, pp: int, tp: int, fsdp: bool) -> None:
    # bfloat16 has 8 bits: a forward's loss agrees to 1 %; after 20 steps all agrees to 3 %.
    config = make_config(dp, pp, tp, fsdp=fsdp, precision="mixed")
    ranks = run_ranks(dp * pp * tp, lambda world: train_on(world, TIED, config))
    assert_same(ranks, alone(True), relative=0.03)
    with pytest.raises(AssertionError):
        assert_same(ranks, alone(True))


@pytest.mark.parametrize(
    ("dp", "pp", "tp", "fsdp", "backend"),
    [(2, 1, 1, True, "grpc"), (1, 1, 2, False, "local"), (1, 2, 1, False, "gloo")],
)
def test_bfloat16_follows_one_process_in_bfloat16(
    dp: int, pp: int, tp: int, fsdp: bool, backend: str
) -> None:
    # Parameters are rounded to 8 bits in each step, so ways part further than in mixed precision.
    config = make_config(dp, pp, tp, fsdp=fsdp, precision="bfloat16")
    ranks = run_ranks(
        dp * pp * tp,
        lambda world: train_on(world, TIED, config, num_steps=8),
        backend=backend,
    )
    assert all(value.dtype == torch.bfloat16 for rank in ranks for value in rank.weights.values())
    assert_same(ranks, train_alone(TIED, num_steps=8, dtype=torch.bfloat16), relative=0.05)
    with pytest.raises(AssertionError):
        assert_same(ranks, train_alone(TIED, num_steps=8))


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": 4},  # half of the data
        {"max_grad_norm": None},
        {"warmup_steps": 0},
    ],
)
def test_another_step_is_rejected(wrong: dict[str, Any]) -> None:
    """Negative controls: what differs a little from the reference is seen."""
    config = make_config(2, 1, 1, **wrong)
    ranks = run_ranks(2, lambda world: train_on(world, TIED, config))
    with pytest.raises(AssertionError):
        assert_same(ranks, alone(True))


def test_a_norm_that_counts_the_tied_table_twice_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clip = TrainStep._clip

    def wrong(step: TrainStep) -> torch.Tensor:
        step._uncounted = set()
        return clip(step)

    monkeypatch.setattr(TrainStep, "_clip", wrong)
    config = make_config(1, 2, 1)
    ranks = run_ranks(2, lambda world: train_on(world, TIED, config, num_steps=3))
    with pytest.raises(AssertionError):
        assert_same(ranks, train_alone(TIED, num_steps=3))
