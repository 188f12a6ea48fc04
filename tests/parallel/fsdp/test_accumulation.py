"""Several backwards per step: with and without reductions in between."""

from typing import Any

import pytest
import torch
from torch import nn

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.parallel.fsdp.config import ShardingStrategy
from stagemesh.parallel.fsdp.fsdp import Fsdp
from stagemesh.parallel.gradient_sync import GradientSync
from stagemesh.parallel.pipeline.backward import backward_inputs
from tests.parallel.fsdp.training import (
    STRATEGIES,
    batches,
    config,
    distance,
    loss_of,
    make_model,
    wrap,
)
from tests.support.ranks import run_ranks


class Weight(nn.Module):
    """Two weights; the gradient of each is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: float) -> torch.Tensor:
        return (self.weight * x).sum()


def gradient(model: Fsdp) -> list[float]:
    """Of all ranks' shards, in order; the same on all ranks."""
    own = [shard.grad.flatten() for shard in model.parameters() if shard.grad is not None]
    if model.config.sharding_strategy is ShardingStrategy.NO_SHARD:
        return own[0].tolist()
    return torch.cat(model.process_group.all_gather_variable(torch.cat(own))).tolist()


@pytest.mark.parametrize("is_flattened", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_reduced_and_unreduced_passes_mix(strategy: ShardingStrategy, is_flattened: bool) -> None:
    passes = {0: [1.0, 2.0, 4.0], 1: [3.0, 6.0, 8.0]}

    def on_rank(group: ProcessGroup) -> tuple[list[float], list[float]]:
        settings = config(sharding_strategy=strategy, flatten_parameters=is_flattened)
        model = Fsdp(Weight(), process_group=group, config=settings)
        first, second, third = passes[group.rank]
        model(first).backward()
        before = gradient(model)
        with model.no_sync():
            model(second).backward()
        assert gradient(model) == before
        model(third).backward()
        return before, gradient(model)

    for before, after in run_ranks(2, on_rank):
        assert before == [2.0, 2.0]
        assert after == [12.0, 12.0]


def gradients_alone(num_parts: int) -> dict[str, torch.Tensor]:
    model = make_model()
    for tokens in batches(1)[0].tensor_split(num_parts):
        loss_of(model, tokens).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def whole_gradients(model: Fsdp) -> dict[str, torch.Tensor]:
    """By name, out of the ranks' shards."""
    found = {}
    for name, shard in model.module.named_parameters():
        assert shard.grad is not None
        parts = [shard.grad]
        if model.config.sharding_strategy is not ShardingStrategy.NO_SHARD:
            parts = model.process_group.all_gather_variable(shard.grad)
        found[name] = torch.cat(parts)
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ending", ["last backward reduces", "sync_gradients"])
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_micro_steps(strategy: ShardingStrategy, ending: str, is_interleaved: bool) -> None:
    """Also with all forwards before all backwards, as pipelines have them."""

    def on_rank(group: ProcessGroup) -> dict[str, torch.Tensor]:
        model = wrap(group, sharding_strategy=strategy, flatten_parameters=False)
        own = batches(1)[0].tensor_split(4)[group.rank :: group.size]
        with model.no_sync():
            waiting = []
            for tokens in own if ending == "sync_gradients" else own[:-1]:
                waiting.append(loss_of(model, tokens))
                if not is_interleaved:
                    waiting.pop().backward()
            for loss in waiting:
                loss.backward()
        if ending == "sync_gradients":
            assert all(shard.grad is None for shard in model.parameters())
            model.sync_gradients()
        else:
            loss_of(model, own[-1]).backward()
        assert model.memory_stats().gathered_bytes == 0
        return whole_gradients(model)

    # Each rank adds two parts of four; the average over two ranks is half their sum.
    expected = {name: grad.flatten() / 2 for name, grad in gradients_alone(4).items()}
    for found in run_ranks(2, on_rank):
        assert distance(found, expected) < 1e-5


def test_a_lost_micro_step_would_be_noticed() -> None:
    """Negative control."""

    def on_rank(group: ProcessGroup) -> dict[str, torch.Tensor]:
        model = wrap(group, flatten_parameters=False)
        own = batches(1)[0].tensor_split(4)[group.rank :: group.size]
        with model.no_sync():
            loss_of(model, own[0])
        loss_of(model, own[1]).backward()
        return whole_gradients(model)

    expected = {name: grad.flatten() / 2 for name, grad in gradients_alone(4).items()}
    assert distance(run_ranks(2, on_rank)[0], expected) > 1e-2


def test_no_sync_reduces_nothing_and_keeps_parameters_with_zero_2() -> None:
    def on_rank(group: ProcessGroup) -> list[Any]:
        found = []
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
            model = wrap(group, sharding_strategy=strategy)
            with model.no_sync():
                loss_of(model, batches(1)[0]).backward()
            found.append(model.memory_stats().gathered_bytes)
            assert all(shard.grad is None for shard in model.parameters())
        return found

    for full_shard, shard_grad_op in run_ranks(2, on_rank):
        assert full_shard == 0
        assert shard_grad_op >= sum(p.numel() for p in make_model().parameters()) * 4


class Squares(nn.Module):
    """Its weight's gradient needs the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.0, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.square()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_backwards_in_two_halves(strategy: ShardingStrategy) -> None:
    """As pipelines split them: the first for inputs only, the second, after others, for weights."""
    inputs = [torch.randn(3, 12, generator=torch.Generator().manual_seed(i)) for i in range(3)]

    def on_rank(group: ProcessGroup) -> dict[str, torch.Tensor]:
        module = nn.Sequential(Squares(), Squares())
        settings = config(
            sharding_strategy=strategy,
            flatten_parameters=False,
            min_param_size=1,
            wrap_policy=(Squares,),
        )
        model = Fsdp(module, process_group=group, config=settings)
        with model.no_sync():
            halves = []
            for x in inputs:
                leaf = x.clone().requires_grad_()
                output = model(leaf)
                halves.append(
                    backward_inputs([output], gradients=[torch.ones_like(output)], inputs=[leaf])[1]
                )
            for half in halves:
                half.run()
        model.sync_gradients()
        assert model.memory_stats().gathered_bytes == 0
        return whole_gradients(model)

    alone = nn.Sequential(Squares(), Squares())
    for x in inputs:
        alone(x).sum().backward()
    expected = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    for found in run_ranks(2, on_rank):
        assert distance(found, expected) < 1e-6


def test_an_optimizer_step_between_forwards_is_seen() -> None:
    """A forward for a metric before the step leaves parameters whole; the next needs new ones."""

    def on_rank(group: ProcessGroup) -> tuple[float, float]:
        model = wrap(group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        tokens = batches(1)[0]
        before = loss_of(model, tokens)
        before.backward()
        loss_of(model, tokens)
        optimizer.step()
        return before.item(), loss_of(model, tokens).item()

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss_of(model, batches(1)[0]).backward()
    optimizer.step()
    expected = loss_of(model, batches(1)[0]).item()
    for before, after in run_ranks(2, on_rank):
        assert after == pytest.approx(expected, rel=1e-5)
        assert before != pytest.approx(after, rel=1e-3)


def test_it_is_a_gradient_sync() -> None:
    assert run_ranks(1, lambda group: isinstance(wrap(group), GradientSync)) == [True]
