"""bfloat16 computation over float32 shards."""

from typing import Any

import pytest
import torch
from torch import nn

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.parallel.fsdp.config import MixedPrecision, ShardingStrategy
from stagemesh.parallel.fsdp.fsdp import Fsdp
from stagemesh.parallel.fsdp.full_state import full_state_dict
from tests.parallel.fsdp.training import (
    OPTIMIZERS,
    STRATEGIES,
    WIDTH,
    batches,
    config,
    loss_of,
    make_model,
    train,
    trained_alone,
    wrap,
)
from tests.support.ranks import run_ranks

# Of the way that training has gone in 20 steps: bfloat16 keeps 8 bits of what is multiplied.
TOLERANCE = 0.03


def way_off(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Distance from what was expected, as a part of the distance from where training began."""

    def between(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
        squares = [(one[name].double() - other[name].double()).square().sum() for name in other]
        return float(torch.stack(squares).sum().sqrt())

    return between(state, expected) / between(make_model().state_dict(), expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_mixed_precision_stays_near_float32(world_size: int, strategy: ShardingStrategy) -> None:
    def on_rank(group: ProcessGroup) -> dict[str, torch.Tensor]:
        model = wrap(group, mixed_precision=True, sharding_strategy=strategy)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        train(model, optimizer, data=batches(), rank=group.rank, size=group.size)
        assert all(p.dtype == torch.float32 for p in model.parameters())
        assert all(s["momentum_buffer"].dtype == torch.float32 for s in optimizer.state.values())
        assert model.memory_stats().gathered_bytes == 0
        return full_state_dict(model)

    expected = trained_alone("sgd")
    for state in run_ranks(world_size, on_rank):
        assert 1e-5 < way_off(state, expected) < TOLERANCE


def test_small_updates_would_be_lost_in_bfloat16() -> None:
    """Negative control for the master weights: shards in bfloat16 do not keep up."""

    def on_rank(group: ProcessGroup) -> dict[str, torch.Tensor]:
        module = make_model(seed=group.rank).to(torch.bfloat16)
        model = Fsdp(module, process_group=group, config=config())
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        train(model, optimizer, data=batches(), rank=group.rank, size=group.size)
        return full_state_dict(model)

    state = run_ranks(2, on_rank)[0]
    assert state["layers.0.up.weight"].dtype == torch.bfloat16
    assert way_off(state, trained_alone("sgd")) > TOLERANCE


class Recorder(nn.Module):
    """Remembers what its forward saw."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("floats", torch.ones(3))
        self.register_buffer("counts", torch.ones(3, dtype=torch.int64))
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, *, options: dict[str, Any]) -> torch.Tensor:
        self.seen = [
            x.dtype,
            options["mask"][0].dtype,
            options["ids"].dtype,
            self.linear.weight.dtype,
            self.floats.dtype,
            self.counts.dtype,
        ]
        return self.linear(x)


@pytest.mark.parametrize(
    ("policy", "compute", "buffer"),
    [
        (False, torch.float32, torch.float32),
        (True, torch.bfloat16, torch.float32),
        (MixedPrecision(buffer_dtype=torch.float16), torch.bfloat16, torch.float16),
        (MixedPrecision(param_dtype=torch.float64), torch.float64, torch.float32),
        (MixedPrecision(param_dtype=None), torch.float32, torch.float32),
    ],
)
def test_the_policy_is_followed(policy: Any, compute: torch.dtype, buffer: torch.dtype) -> None:
    def on_rank(group: ProcessGroup) -> list[torch.dtype]:
        settings = config(mixed_precision=policy)
        model = Fsdp(Recorder(), process_group=group, config=settings)
        options = {"mask": (torch.ones(2),), "ids": torch.zeros(2, dtype=torch.int64)}
        model(torch.ones(2, WIDTH), options=options).sum().backward()
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
        return model.module.seen

    expected = [compute, compute, torch.int64, compute, buffer, torch.int64]
    assert run_ranks(2, on_rank) == [expected, expected]


@pytest.mark.parametrize(
    ("reduce_dtype", "expected"),
    # 256 + 1 needs nine bits: bfloat16 has eight, so micro-steps are lost there.
    [(torch.float32, 257.0), (torch.bfloat16, 256.0), (None, 256.0)],
)
def test_gradients_are_added_up_in_the_reduce_dtype(
    reduce_dtype: torch.dtype | None, expected: float
) -> None:
    class Weight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: float) -> torch.Tensor:
            return (self.weight * x).sum()

    def on_rank(group: ProcessGroup) -> list[float]:
        policy = MixedPrecision(reduce_dtype=reduce_dtype)
        settings = config(mixed_precision=policy)
        model = Fsdp(Weight(), process_group=group, config=settings)
        with model.no_sync():
            model(256.0).backward()
        model(1.0).backward()
        return [p.grad.item() for p in model.parameters() if p.numel()]

    assert run_ranks(2, on_rank) == [[expected]] * 2


def test_the_loss_is_near_that_of_one_process() -> None:
    tokens = batches(1)[0]
    expected = loss_of(make_model(), tokens).item()
    losses = run_ranks(2, lambda group: loss_of(wrap(group, mixed_precision=True), tokens).item())
    assert losses == pytest.approx([expected] * 2, rel=TOLERANCE)
