"""How gradients get into buckets, and when buckets travel."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import ConfigError
from stagemesh.parallel.data.buckets import plan_buckets
from stagemesh.parallel.data.config import DataParallelConfig
from stagemesh.parallel.data.data_parallel import DataParallel
from stagemesh.parallel.gradient_sync import GradientSync
from tests.parallel.data.training import data, distance, loss_of, make_model, part
from tests.support.ranks import run_ranks

SMALL = DataParallelConfig(bucket_bytes=100, first_bucket_bytes=10)


def sized(*sizes: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.empty(size, dtype=dtype) for size in sizes]


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ([], []),
        (sized(1), [[0]]),
        (sized(0, 1, 1), [[0, 1, 2]]),
        (sized(3, 20, 10, 1), [[0], [1, 2], [3]]),
        (sized(100, 100, 1), [[0], [1], [2]]),
        (sized(1, 1, 1, 1, 1), [[0, 1, 2], [3, 4]]),
        # One dtype each; in the order in which they are complete.
        (
            [*sized(9), *sized(2, dtype=torch.float64), *sized(2), *sized(1, dtype=torch.float64)],
            [[0], [1], [2], [3]],
        ),
        ([*sized(1), *sized(2, dtype=torch.float64), *sized(1)], [[1], [0, 2]]),
    ],
)
def test_plan(tensors: list[torch.Tensor], expected: list[list[int]]) -> None:
    assert plan_buckets(tensors, bucket_bytes=100, first_bucket_bytes=10) == expected


def record_calls(group: ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes each collective of the group from here on."""
    calls: list[str] = []
    for operation in ("all_reduce", "broadcast", "all_gather_variable"):
        original = getattr(group, operation)

        def noted(*args: Any, _call: Any = original, _name: str = operation, **kw: Any) -> Any:
            calls.append(_name)
            return _call(*args, **kw)

        monkeypatch.setattr(group, operation, noted)
    return calls


def test_buckets_in_reverse_order() -> None:
    def on_rank(group: ProcessGroup) -> list[list[str]]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        return DataParallel(model, process_group=group, config=SMALL).bucket_names

    [names, _] = run_ranks(2, on_rank)
    assert names == [["1.bias"], ["1.weight", "0.bias", "0.weight"]]


def test_gradients_are_views_of_few_buckets() -> None:
    def on_rank(group: ProcessGroup) -> tuple[int, int]:
        model = DataParallel(make_model(), process_group=group)
        loss_of(model, data(0)).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        return len(grads), len({grad.untyped_storage().data_ptr() for grad in grads})

    assert run_ranks(2, on_rank) == [(7, 1)] * 2


def test_reductions_begin_during_backward() -> None:
    """The first layer's backward runs when the last layer's bucket is on its way already."""

    class Watched(nn.Module):
        def __init__(self, calls: list[str]) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.last = nn.Linear(4, 4)
            self.calls = calls
            self.seen: list[int] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x)
            hidden.register_hook(lambda _: self.seen.append(len(self.calls)))
            return self.last(hidden)

    def on_rank(group: ProcessGroup) -> tuple[list[int], list[str]]:
        with pytest.MonkeyPatch.context() as patch:
            calls = record_calls(group, patch)
            config = DataParallelConfig(bucket_bytes=1, first_bucket_bytes=1)
            module = Watched(calls)
            model = DataParallel(module, process_group=group, config=config)
            calls.clear()
            model(torch.ones(1, 4)).sum().backward()
            return module.seen, calls

    # Bias and weight of the last layer; then those of the first.
    assert run_ranks(2, on_rank) == [([2], ["all_reduce"] * 4)] * 2


@pytest.mark.parametrize("backend", ["local", "gloo"])
def test_ranks_that_use_other_parameters(backend: str) -> None:
    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in "abc":
                self.register_parameter(name, nn.Parameter(torch.tensor(3.0)))

        def forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
            return getattr(self, name) * x

    def on_rank(group: ProcessGroup) -> list[Any]:
        config = DataParallelConfig(bucket_bytes=1, first_bucket_bytes=1)
        model = DataParallel(Choice(), process_group=group, config=config)
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
        model(torch.tensor(2.0), "ab"[group.rank]).backward()
        optimizer.step()
        module = model.module
        return [module.a.grad.item(), module.b.grad.item(), module.c.grad, module.c.item()]

    assert run_ranks(2, on_rank, backend=backend) == [[1.0, 1.0, None, 3.0]] * 2


def test_a_rank_that_uses_no_parameter() -> None:
    def on_rank(group: ProcessGroup) -> float:
        class Sometimes(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.w = nn.Parameter(torch.tensor(1.0))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.w * x if group.rank == 0 else 1 * x

        model = DataParallel(Sometimes(), process_group=group)
        model(torch.tensor(6.0, requires_grad=True)).backward()
        return float(model.module.w.grad)

    assert run_ranks(2, on_rank) == [3.0, 3.0]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(use_reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=use_reentrant)
            return x

    rows = torch.randn(4, 4)
    initial = Checkpointed()
    alone = copy.deepcopy(initial)
    alone(rows.clone().requires_grad_()).square().mean().backward()
    expected = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}

    def on_rank(group: ProcessGroup) -> dict[str, Any]:
        module = copy.deepcopy(initial)
        model = DataParallel(module, process_group=group, config=SMALL)
        own = part(rows, group.rank, group.size).clone().requires_grad_()
        model(own).square().mean().backward()
        return {name: p.grad for name, p in model.module.named_parameters()}

    for ours in run_ranks(2, on_rank):
        assert distance(ours, expected) < 1e-6


def test_a_shared_layer_in_reentrant_checkpoints_is_refused_when_too_late() -> None:
    def on_rank(group: ProcessGroup) -> None:
        layer = nn.Linear(4, 4)
        config = DataParallelConfig(bucket_bytes=1, first_bucket_bytes=1)
        model = DataParallel(_Twice(layer), process_group=group, config=config)
        model(torch.ones(1, 4, requires_grad=True)).sum().backward()

    with pytest.raises(ConfigError, match=r"parameter layer\.bias got a second gradient"):
        run_ranks(2, on_rank)


class _Twice(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def test_sparse_gradients_are_refused() -> None:
    def on_rank(group: ProcessGroup) -> None:
        model = DataParallel(nn.Embedding(4, 2, sparse=True), process_group=group)
        model(torch.tensor([1])).sum().backward()

    with pytest.raises(ConfigError, match="parameter weight has a gradient of layout"):
        run_ranks(2, on_rank)


def test_a_group_of_one_is_free() -> None:
    def on_rank(group: ProcessGroup) -> None:
        with pytest.MonkeyPatch.context() as patch:
            calls = record_calls(group, patch)
            module = make_model()
            model = DataParallel(module, process_group=group)
            loss = loss_of(model, data(0))
            before = [p.grad for p in module.parameters()]
            loss.backward()
            assert before == [None] * len(before)
            assert calls == []
            assert model.bucket_names == []
            assert not any(p._post_accumulate_grad_hooks for p in module.parameters())

    run_ranks(1, on_rank)


def test_hooks_end_with_the_wrapper() -> None:
    def on_rank(group: ProcessGroup) -> list[float]:
        module = nn.Linear(1, 1, bias=False)
        kept = DataParallel(module, process_group=group)
        assert kept.unwrap() is module
        DataParallel(module, process_group=group)  # dropped at once
        results = []
        for _ in range(2):
            module.weight.grad = None
            module(torch.full((1, 1), float(group.rank))).sum().backward()
            assert module.weight.grad is not None
            results.append(module.weight.grad.item())
            kept = DataParallel(module, process_group=group)
        return results

    # Each rank's own gradient, then the average.
    assert run_ranks(2, on_rank) == [[0.0, 0.5], [1.0, 0.5]]


def test_it_is_a_gradient_sync() -> None:
    def on_rank(group: ProcessGroup) -> bool:
        return isinstance(DataParallel(nn.Linear(1, 1), process_group=group), GradientSync)

    assert run_ranks(1, on_rank) == [True]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"bucket_bytes": 0}, "bucket_bytes must be at least 1, got 0"),
        ({"first_bucket_bytes": -1}, "first_bucket_bytes must be at least 1, got -1"),
        ({"reduce_dtype": torch.int8}, "reduce_dtype must be None or one of .* got torch.int8"),
    ],
)
def test_settings(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DataParallelConfig(**settings)
