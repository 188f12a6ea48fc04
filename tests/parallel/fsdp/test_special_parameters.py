"""Frozen, tied, unused, empty, 0-d, and fewer elements than ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.parallel.fsdp.config import ShardingStrategy
from stagemesh.parallel.fsdp.fsdp import Fsdp
from stagemesh.parallel.fsdp.full_state import (
    full_optimizer_state,
    full_state_dict,
    load_full_optimizer_state,
    load_full_state_dict,
)
from tests.parallel.fsdp.training import (
    STRATEGIES,
    WIDTH,
    Block,
    batches,
    config,
    distance,
    loss_of,
    make_model,
    train,
)
from tests.support.ranks import run_ranks


class Adapted(nn.Module):
    """A frozen layer in front of, and one behind, a trained one. Keeps its input's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.adapter = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(False)
        self.out.requires_grad_(False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        # The adapter's gradients are complete before the base's backward runs.
        return hidden + self.out(torch.tanh(self.adapter(torch.tanh(self.base(hidden)))))


def after_steps(model: nn.Module, *, rank: int = 0, size: int = 1) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    train(model, optimizer, data=batches(3), rank=rank, size=size)


@pytest.mark.parametrize("is_flattened", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_frozen_and_trained_in_one_unit(strategy: ShardingStrategy, is_flattened: bool) -> None:
    def on_rank(group: ProcessGroup) -> dict[str, torch.Tensor]:
        settings = config(sharding_strategy=strategy, flatten_parameters=is_flattened)
        model = Fsdp(make_model(block=Adapted), process_group=group, config=settings)
        loss_of(model, batches(1)[0]).backward()
        frozen = [p for p in model.parameters() if not p.requires_grad]
        assert frozen
        assert all(p.grad is None for p in frozen)
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
        model.zero_grad()
        after_steps(model, rank=group.rank, size=group.size)
        return full_state_dict(model)

    before = make_model(block=Adapted).state_dict()
    alone = make_model(block=Adapted)
    after_steps(alone)
    expected = alone.state_dict()
    for state in run_ranks(2, on_rank):
        assert distance(state, expected) < 1e-5
        for name in state:
            is_frozen = ".base." in name or ".out." in name or name == "temperature"
            assert torch.equal(state[name], before[name]) is is_frozen, name


def freeze_blocks(model: nn.Module, indexes: tuple[int, ...]) -> nn.Module:
    for index in indexes:
        model.layers[index].requires_grad_(False)
    return model


def test_frozen_units_are_freed_in_the_backward() -> None:
    """Where the whole block is frozen no gradient of a parameter tells when it is done."""

    def on_rank(group: ProcessGroup) -> tuple[dict[str, torch.Tensor], int]:
        module = freeze_blocks(make_model(), (1, 2, 3))
        model = Fsdp(module, process_group=group, config=config())
        after_steps(model, rank=group.rank, size=group.size)
        state = full_state_dict(model)
        model.reset_peak_memory()
        loss_of(model, batches(1)[0]).backward()
        return state, model.memory_stats().peak_gathered_bytes

    alone = freeze_blocks(make_model(), (1, 2, 3))
    after_steps(alone)
    block = 4 * sum(p.numel() for p in Block().parameters())
    root = 4 * make_model().embedding.weight.numel()
    for state, peak in run_ranks(2, on_rank):
        assert distance(state, alone.state_dict()) < 1e-5
        # The hooks of a unit's inputs come after those of the same tensors as outputs of the unit
        # in front of it; until then there are the two of them and the one that is prefetched.
        assert peak <= root + 3 * block + 64


class Odd(nn.Module):
    """Parameters of 1, 3 and 5 elements, a 0-d one, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.tensor([0.5]))
        self.three = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
        self.five = nn.Parameter(torch.linspace(-1, 1, 5))
        self.scalar = nn.Parameter(torch.tensor(0.25))
        self.none = nn.Parameter(torch.empty(0, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sums = (self.three.square().sum(), self.five.exp().sum(), self.none.sum())
        return (x * self.one * self.scalar + sum(sums)).square().mean()


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for step in range(num_steps):
        model(torch.tensor([float(step), 1.0])).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("is_flattened", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fewer_elements_than_ranks(strategy: ShardingStrategy, is_flattened: bool) -> None:
    """Four ranks, then two that go on from the whole state."""
    settings = config(sharding_strategy=strategy, flatten_parameters=is_flattened)

    def make(group: ProcessGroup) -> tuple[Fsdp, torch.optim.Optimizer]:
        model = Fsdp(Odd(), process_group=group, config=settings)
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    def first(group: ProcessGroup) -> tuple[Any, Any]:
        model, optimizer = make(group)
        steps(model, optimizer, 3)
        return full_state_dict(model), full_optimizer_state(model, optimizer)

    saved = run_ranks(4, first)[0]

    def second(group: ProcessGroup) -> tuple[Any, Any]:
        model, optimizer = make(group)
        load_full_state_dict(model, state=saved[0])
        load_full_optimizer_state(model, optimizer=optimizer, state=saved[1])
        steps(model, optimizer, 3)
        return full_state_dict(model), full_optimizer_state(model, optimizer)

    alone = Odd()
    optimizer = torch.optim.Adam(alone.parameters(), lr=0.1)
    for results in ([saved], run_ranks(2, second)):
        steps(alone, optimizer, 3)
        for state, optimizer_state in results:
            assert state.keys() == alone.state_dict().keys()
            for name, value in alone.named_parameters():
                assert state[name].shape == value.shape
                torch.testing.assert_close(state[name], value.detach(), rtol=1e-6, atol=1e-7)
                for key, expected in optimizer.state[value].items():
                    found = optimizer_state["state"][name][key]
                    assert found.shape == expected.shape
                    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_unused_parameters_do_not_move() -> None:
    class Spare(Block):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(WIDTH, WIDTH)

    def on_rank(group: ProcessGroup) -> dict[str, torch.Tensor]:
        model = Fsdp(make_model(block=Spare), process_group=group, config=config())
        after_steps(model, rank=group.rank, size=group.size)
        return full_state_dict(model)

    alone = make_model(block=Spare)
    after_steps(alone)
    for state in run_ranks(2, on_rank):
        assert distance(state, alone.state_dict()) < 1e-5


def test_parameters_that_only_one_rank_uses() -> None:
    class Pair(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.tensor(1.0))
            self.b = nn.Parameter(torch.tensor(1.0))
            self.used = name

        def forward(self, x: float) -> torch.Tensor:
            return getattr(self, self.used) * x

    def on_rank(group: ProcessGroup) -> dict[str, float]:
        settings = config(sharding_strategy=ShardingStrategy.NO_SHARD, flatten_parameters=False)
        model = Fsdp(Pair("ab"[group.rank]), process_group=group, config=settings)
        model(2.0).backward()
        return {name: p.grad.item() for name, p in model.module.named_parameters()}

    assert run_ranks(2, on_rank) == [{"a": 1.0, "b": 1.0}] * 2


class Checkpointed(Block):
    """Computes its forward again in the backward."""

    is_reentrant = False

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, hidden, use_reentrant=self.is_reentrant)


class Reentrant(Checkpointed):
    is_reentrant = True


class CheckpointedFrozen(Adapted):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, hidden, use_reentrant=False)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("block", [Checkpointed, Reentrant, CheckpointedFrozen])
def test_activation_checkpointing_within_units(
    strategy: ShardingStrategy, block: type[nn.Module]
) -> None:
    def on_rank(group: ProcessGroup) -> dict[str, torch.Tensor]:
        settings = config(sharding_strategy=strategy)
        model = Fsdp(make_model(block=block), process_group=group, config=settings)
        after_steps(model, rank=group.rank, size=group.size)
        assert model.memory_stats().gathered_bytes == 0
        return full_state_dict(model)

    alone = make_model(block=block)
    after_steps(alone)
    for state in run_ranks(2, on_rank):
        assert distance(state, alone.state_dict()) < 1e-5


class AroundUnits(nn.Module):
    """Each checkpoint holds `span` units, which gather again when they are computed again."""

    def __init__(self, inner: nn.Module, *, span: int, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.span = span
        self.use_reentrant = use_reentrant

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.inner.embedding(tokens)
        for start in range(0, len(self.inner.layers), self.span):
            run = nn.Sequential(*self.inner.layers[start : start + self.span])
            hidden = checkpoint(run, hidden, use_reentrant=self.use_reentrant)
        return self.inner.head(hidden) / self.inner.temperature


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("span", "use_reentrant"), [(1, False), (2, False), (4, True)])
@pytest.mark.parametrize("block", [Block, Adapted])
def test_activation_checkpointing_around_units(
    strategy: ShardingStrategy, span: int, use_reentrant: bool, block: type[nn.Module]
) -> None:
    def make() -> nn.Module:
        return AroundUnits(make_model(block=block), span=span, use_reentrant=use_reentrant)

    def on_rank(group: ProcessGroup) -> dict[str, torch.Tensor]:
        model = Fsdp(make(), process_group=group, config=config(sharding_strategy=strategy))
        after_steps(model, rank=group.rank, size=group.size)
        assert model.memory_stats().gathered_bytes == 0
        return full_state_dict(model)

    alone = make()
    after_steps(alone)
    for state in run_ranks(2, on_rank):
        assert distance(state, alone.state_dict()) < 1e-5


@pytest.mark.parametrize(
    "call",
    [
        lambda layer, x: layer(layer(x)),
        lambda layer, x: layer(x) * layer(x + 1),
    ],
    ids=["in a row", "side by side"],
)
@pytest.mark.parametrize("block", [Block, Adapted])
def test_a_unit_that_runs_twice(
    call: Callable[[nn.Module, torch.Tensor], torch.Tensor], block: type[nn.Module]
) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_model(block=block)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden = self.inner.embedding(tokens)
            for layer in self.inner.layers:
                hidden = torch.tanh(call(layer, hidden))
            return self.inner.head(hidden)

    def on_rank(group: ProcessGroup) -> dict[str, torch.Tensor]:
        model = Fsdp(Twice(), process_group=group, config=config())
        after_steps(model, rank=group.rank, size=group.size)
        return full_state_dict(model)

    alone = Twice()
    after_steps(alone)
    for state in run_ranks(2, on_rank):
        assert distance(state, alone.state_dict()) < 1e-5


def test_no_gradients_without_grad_mode() -> None:
    def on_rank(group: ProcessGroup) -> int:
        model = Fsdp(make_model(), process_group=group, config=config())
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                model(batches(1)[0])
            assert model.memory_stats().gathered_bytes == 0
        loss_of(model, batches(1)[0]).backward()
        return sum(p.grad is not None for p in model.parameters())

    assert run_ranks(2, on_rank) == [5, 5]


def test_gradients_of_inputs_alone_leave_parameters_without() -> None:
    """What torch.autograd.grad asks for, and no more; a reduction would wait for nobody."""

    def on_rank(group: ProcessGroup) -> torch.Tensor:
        model = Fsdp(Block(), process_group=group, config=config())
        x = torch.ones(2, WIDTH, requires_grad=True)
        torch.autograd.grad(model(x).sum(), x)
        assert all(p.grad is None for p in model.parameters())
        assert model.memory_stats().gathered_bytes == 0
        return x

    run_ranks(2, on_rank)
