"""Training over shards gives what one process gives with the whole batches."""

import functools
from typing import Any

import pytest
import torch

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.parallel.fsdp.config import ShardingStrategy
from stagemesh.parallel.fsdp.full_state import full_state_dict
from tests.parallel.fsdp.training import (
    OPTIMIZERS,
    STRATEGIES,
    batches,
    distance,
    train,
    trained_alone,
    wrap,
)
from tests.support.ranks import run_ranks

TOLERANCE = 1e-5

alone = functools.cache(trained_alone)


def trained_together(
    world_size: int,
    name: str,
    *,
    backend: str = "local",
    max_norm: float | None = None,
    **changes: Any,
) -> list[dict[str, torch.Tensor]]:
    def on_rank(group: ProcessGroup) -> dict[str, torch.Tensor]:
        model = wrap(group, **changes)
        train(
            model,
            OPTIMIZERS[name](model.parameters()),
            data=batches(),
            rank=group.rank,
            size=group.size,
            max_norm=max_norm,
        )
        return full_state_dict(model)

    return run_ranks(world_size, on_rank, backend=backend)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_parameters_after_20_steps(world_size: int, name: str, strategy: ShardingStrategy) -> None:
    for state in trained_together(world_size, name, sharding_strategy=strategy):
        assert distance(state, alone(name)) < TOLERANCE


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_flattening(world_size: int, name: str) -> None:
    for state in trained_together(world_size, name, flatten_parameters=False):
        assert distance(state, alone(name)) < TOLERANCE


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("backend", ["grpc", "gloo"])
def test_over_the_wire(backend: str, strategy: ShardingStrategy) -> None:
    for state in trained_together(2, "adamw", backend=backend, sharding_strategy=strategy):
        assert distance(state, alone("adamw")) < TOLERANCE


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_with_clipping(strategy: ShardingStrategy, max_norm: float) -> None:
    expected = alone("sgd", max_norm=max_norm)
    for state in trained_together(2, "sgd", max_norm=max_norm, sharding_strategy=strategy):
        assert distance(state, expected) < TOLERANCE


def test_all_ranks_have_the_same_bits() -> None:
    first, *others = trained_together(3, "adamw")
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


def test_gradients_that_are_not_averaged_would_be_noticed() -> None:
    """Negative control: ranks that keep their own gradients, and ranks that add them up."""

    def on_rank(group: ProcessGroup) -> list[dict[str, torch.Tensor]]:
        states = []
        for factor in (0.0, group.size):
            model = wrap(group)
            optimizer = OPTIMIZERS["sgd"](model.parameters())
            if factor:
                hook = functools.partial(scale_gradients, factor)
                optimizer.register_step_pre_hook(hook)
                train(model, optimizer, data=batches(), rank=group.rank, size=group.size)
            else:
                train(model, optimizer, data=batches(), rank=0, size=group.size)
            states.append(full_state_dict(model))
        return states

    for state in run_ranks(2, on_rank)[0]:
        assert distance(state, alone("sgd")) > 100 * TOLERANCE


def scale_gradients(factor: float, optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.mul_(factor)
