"""What parts count: by autograd and by the explicit interface, over micro-steps and ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import ConfigError, NotReady
from stagemesh.parallel.data.accumulation import GradientAccumulator
from stagemesh.parallel.data.config import DataParallelConfig
from stagemesh.parallel.data.data_parallel import DataParallel
from tests.support.ranks import run_ranks

Items = Sequence[float]
"""A part: the x of its items; its loss is the mean of w x, so its gradient the mean of x."""

ONE, THREE = (8.0,), (0.0, 0.0, 0.0)


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w * x

    @property
    def grad(self) -> float:
        assert self.w.grad is not None
        return float(self.w.grad)


def by_autograd(group: ProcessGroup, parts: Sequence[Items], *, is_weighted: bool) -> float:
    model = DataParallel(Scalar(), process_group=group)

    def backward(items: Items) -> None:
        loss = model(torch.tensor(items)).mean() if items else torch.zeros(())
        model.backward(loss, weight=len(items) if is_weighted else None)

    with model.no_sync():
        for items in parts[:-1]:
            backward(items)
    backward(parts[-1])
    return model.module.grad


def by_hand(group: ProcessGroup, parts: Sequence[Items], *, is_weighted: bool) -> float:
    model = DataParallel(Scalar(), process_group=group, accumulation_steps=len(parts))
    model.start_accumulation()
    for index, items in enumerate(parts):
        grads = [torch.tensor(items or (0.0,)).mean()]
        weight = len(items) if is_weighted else None
        is_reduced = model.accumulate_gradients(grads, weight=weight)
        assert is_reduced is (index == len(parts) - 1)
    return float(grads[0])


@pytest.mark.parametrize("interface", [by_autograd, by_hand])
@pytest.mark.parametrize(
    ("by_rank", "is_weighted", "expected"),
    [
        # Losses that nobody divides by the number of micro-steps add up; ranks are averaged.
        ([[(1.0,), (2.0,)], [(3.0,), (4.0,)]], False, 5.0),
        ([[(1.0,), (2.0,)], [(3.0,), (4.0,)]], True, 2.5),
        # One item of 8 and three of 0, on two ranks, as two micro-steps, and as both.
        ([[ONE], [THREE]], False, 4.0),
        ([[ONE], [THREE]], True, 2.0),
        ([[ONE, THREE]], True, 2.0),
        ([[THREE, ONE]], True, 2.0),
        ([[ONE, THREE], [THREE, ONE]], True, 2.0),
        ([[ONE, ()], [(), THREE]], True, 2.0),
        ([[ONE, THREE], [(), ()]], True, 2.0),
        ([[ONE], [THREE], [()]], True, 2.0),
    ],
)
def test_rule(
    interface: Callable[..., float],
    by_rank: list[list[Items]],
    is_weighted: bool,
    expected: float,
) -> None:
    def on_rank(group: ProcessGroup) -> float:
        return interface(group, by_rank[group.rank], is_weighted=is_weighted)

    results = run_ranks(len(by_rank), on_rank)
    assert results == pytest.approx([expected] * len(by_rank), rel=1e-6)


def test_one_reduction_for_all_micro_steps() -> None:
    def on_rank(group: ProcessGroup) -> tuple[list[float], int]:
        model = DataParallel(Scalar(), process_group=group)
        count = 0
        original = group.all_reduce

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            return original(*args, **kwargs)

        grads = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(group, "all_reduce", counted)
            first, second = (1.0, 2.0) if group.rank == 0 else (3.0, 4.0)
            with model.no_sync():
                model(torch.tensor(first)).backward()
            grads.append(model.module.grad)
            model(torch.tensor(second)).backward()
            grads.append(model.module.grad)
        return grads, count

    # Before the second backward each rank has its own; after it the same.
    assert run_ranks(2, on_rank) == [([1.0, 5.0], 1), ([3.0, 5.0], 1)]


def test_gradients_that_are_not_zeroed_go_on() -> None:
    """Averaged, added to, averaged: each rank has the same of the first, so it counts once."""

    def on_rank(group: ProcessGroup) -> float:
        model = DataParallel(Scalar(), process_group=group)
        values = [(1.0, 2.0, 4.0), (3.0, 6.0, 8.0)][group.rank]
        model(torch.tensor(values[0])).backward()
        with model.no_sync():
            model(torch.tensor(values[1])).backward()
        model(torch.tensor(values[2])).backward()
        return model.module.grad

    assert run_ranks(2, on_rank) == [12.0, 12.0]


@pytest.mark.parametrize("world_size", [1, 2])
def test_no_weight_anywhere_is_no_gradient(world_size: int) -> None:
    def on_rank(group: ProcessGroup) -> Any:
        model = DataParallel(Scalar(), process_group=group)
        model.backward(model(torch.tensor(float("nan"))), weight=0)
        return model.module.w.grad

    assert run_ranks(world_size, on_rank) == [None] * world_size


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_that_are_refused(world_size: int, weight: float) -> None:
    def on_rank(group: ProcessGroup) -> None:
        model = DataParallel(Scalar(), process_group=group)
        with pytest.raises(ConfigError, match="weight must be a finite number of at least 0"):
            model.backward(model(torch.tensor(1.0)), weight=weight)

    run_ranks(world_size, on_rank)


@pytest.mark.parametrize("is_weighted_first", [True, False])
def test_weights_for_some_micro_steps_only(is_weighted_first: bool) -> None:
    def on_rank(group: ProcessGroup) -> None:
        model = DataParallel(Scalar(), process_group=group)
        with model.no_sync():
            model.backward(model(torch.tensor(1.0)), weight=2 if is_weighted_first else None)
            with pytest.raises(ConfigError, match="some parts of a gradient have a weight"):
                model.backward(model(torch.tensor(1.0)), weight=None if is_weighted_first else 2)

    run_ranks(2, on_rank)


@pytest.mark.parametrize("world_size", [1, 2])
def test_abandoned_micro_steps_count_nothing(world_size: int) -> None:
    def on_rank(group: ProcessGroup) -> list[float]:
        model = DataParallel(Scalar(), process_group=group)
        with model.no_sync():
            model.backward(model(torch.tensor(1.0)), weight=100)
        model.zero_grad()
        model.backward(model(torch.tensor(3.0)), weight=1)
        grads = [model.module.grad]
        with model.no_sync():
            model.backward(model(torch.tensor(1.0)), weight=100)
        model.zero_grad()
        model(torch.tensor(5.0)).backward()
        return [*grads, model.module.grad]

    assert run_ranks(world_size, on_rank) == [[3.0, 5.0]] * world_size


@pytest.mark.parametrize("steps", [-1, 0, 1])
def test_fewer_than_one_step_is_one(steps: int) -> None:
    def on_rank(group: ProcessGroup) -> tuple[int, bool, list[float]]:
        model = DataParallel(Scalar(), process_group=group, accumulation_steps=steps)
        model.start_accumulation()
        grads = [torch.tensor([group.rank, 2.0])]
        return model.accumulation_steps, model.accumulate_gradients(grads), grads[0].tolist()

    assert run_ranks(2, on_rank) == [(1, True, [0.5, 2.0])] * 2


def test_the_explicit_interface_step_by_step() -> None:
    def on_rank(group: ProcessGroup) -> None:
        accumulator = GradientAccumulator(
            process_group=group,
            accumulation_steps=2,
            config=DataParallelConfig(bucket_bytes=8, first_bucket_bytes=8),
        )
        one = [torch.ones(3), torch.ones(2, 2).bfloat16(), torch.tensor(1.0)]
        with pytest.raises(NotReady, match="call start_accumulation"):
            accumulator.accumulate_gradients(one)
        for _ in range(2):
            accumulator.start_accumulation()
            first = [tensor * (group.rank + 1) for tensor in one]
            assert accumulator.accumulate_gradients(first) is False
            assert accumulator.num_accumulated == 1
            assert torch.equal(first[0], one[0] * (group.rank + 1))
            last = [tensor * 10 for tensor in one]
            assert accumulator.accumulate_gradients(last) is True
            assert accumulator.num_accumulated == 0
            for got, unit in zip(last, one, strict=True):
                assert torch.equal(got, unit * 11.5)
            with pytest.raises(NotReady):
                accumulator.accumulate_gradients(one)

    run_ranks(2, on_rank)


def test_a_new_start_drops_what_was_added_up() -> None:
    def on_rank(group: ProcessGroup) -> list[float]:
        accumulator = GradientAccumulator(process_group=group, accumulation_steps=2)
        accumulator.start_accumulation()
        accumulator.accumulate_gradients([torch.tensor([100.0])], weight=5)
        accumulator.start_accumulation()
        accumulator.accumulate_gradients([torch.tensor([1.0])])
        grads = [torch.tensor([2.0])]
        accumulator.accumulate_gradients(grads)
        return grads[0].tolist()

    assert run_ranks(1, on_rank) == [[3.0]]


def test_gradients_of_another_shape_are_refused() -> None:
    def on_rank(group: ProcessGroup) -> None:
        accumulator = GradientAccumulator(process_group=group, accumulation_steps=3)
        accumulator.start_accumulation()
        accumulator.accumulate_gradients([torch.ones(2)])
        with pytest.raises(ConfigError, match=r"micro-step 1 has .*float32\[3\].*float32\[2\]"):
            accumulator.accumulate_gradients([torch.ones(3)])

    run_ranks(1, on_rank)
