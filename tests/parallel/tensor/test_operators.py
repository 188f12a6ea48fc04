"""The four operators: their values, and that each backward is the transpose of its forward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import ConfigError
from stagemesh.parallel.tensor.operators import (
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    split_to_group,
)
from tests.parallel.tensor.support import CountedGroup, seeded
from tests.support.ranks import BACKENDS, run_ranks

SIZES = (1, 3, 2)
WHOLE = seeded(2, 6, 4)
PARTS = torch.split(WHOLE, SIZES, 1)


def gradient_of(
    apply: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.clone().requires_grad_()
    y = apply(x)
    y.backward(weight)
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_values_and_gradients(backend: str, dtype: torch.dtype) -> None:
    whole = WHOLE.to(dtype)
    parts = torch.split(whole, SIZES, 1)
    grads = [seeded(2, 6, 4, seed=9 + rank, dtype=dtype) for rank in range(3)]
    summed = sum(grad.float() for grad in grads).to(dtype)

    def run(group: ProcessGroup) -> None:
        rank, grad = group.rank, grads[group.rank]
        part_grad = torch.split(grads[0], SIZES, 1)[rank]
        y, dx = gradient_of(lambda x: copy_to_group(x, process_group=group), whole, grad)
        assert y.equal(whole)
        assert dx.equal(summed)
        for inplace in (False, True):
            y, dx = gradient_of(
                lambda x, inplace=inplace: reduce_from_group(
                    x * 1, process_group=group, inplace=inplace
                ),
                grad,
                whole,
            )
            assert y.equal(summed)
            assert dx.equal(whole)
        options: Any = {"process_group": group, "dim": 1, "sizes": SIZES}
        y, dx = gradient_of(lambda x: split_to_group(x, **options), whole, part_grad)
        assert y.equal(parts[rank])
        assert dx.equal(grads[0])
        y, dx = gradient_of(lambda x: gather_from_group(x, **options), parts[rank], grads[0])
        assert y.equal(whole)
        assert dx.equal(part_grad)

    run_ranks(3, run, backend=backend)


@pytest.mark.parametrize(
    ("apply", "conjugate"),
    [
        (copy_to_group, reduce_from_group),
        (reduce_from_group, copy_to_group),
        (split_to_group, gather_from_group),
        (gather_from_group, split_to_group),
    ],
)
def test_backward_is_the_conjugate_operator_also_of_gradients(apply: Any, conjugate: Any) -> None:
    x = seeded(3, 4)

    def run(group: ProcessGroup) -> None:
        start = x.clone().requires_grad_()
        y = apply(start * start, process_group=group)
        weight = seeded(*y.shape, seed=5)
        (first,) = torch.autograd.grad(y, start, weight, create_graph=True)
        expected = conjugate(weight, process_group=group) * 2
        torch.testing.assert_close(first.detach(), x * expected)
        (second,) = torch.autograd.grad(first.sum(), start)
        torch.testing.assert_close(second, expected)

    run_ranks(2, run)


def test_equal_parts_need_no_sizes_and_negative_dims_count_from_the_end() -> None:
    def run(group: ProcessGroup) -> None:
        part = split_to_group(WHOLE, process_group=group)
        assert part.equal(torch.split(WHOLE, 2, -1)[group.rank])
        assert gather_from_group(part, process_group=group).equal(WHOLE)
        part = split_to_group(WHOLE, process_group=group, dim=-3)
        assert gather_from_group(part, process_group=group, dim=-3).equal(WHOLE)

    run_ranks(2, run)


def test_what_was_split_may_be_changed_in_place() -> None:
    def run(group: ProcessGroup) -> None:
        whole = WHOLE.clone().requires_grad_()
        split_to_group(whole * 1, process_group=group, dim=0).relu_().sum().backward()
        assert whole.grad is not None
        assert whole.grad.equal((WHOLE > 0).float())

    run_ranks(2, run)


def test_autograd_knows_what_was_reduced_in_place() -> None:
    """The gradient of exp needs its result, which is gone."""

    def run(group: ProcessGroup) -> None:
        result = torch.ones(2, requires_grad=True).exp()
        total = reduce_from_group(result, process_group=group, inplace=True)
        assert total is result
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            total.sum().backward()

    run_ranks(2, run)


def test_a_gradient_that_is_expanded_can_be_reduced() -> None:
    def run(group: ProcessGroup) -> torch.Tensor | None:
        x = torch.ones(3, requires_grad=True)
        copy_to_group(x, process_group=group).sum().backward()
        return x.grad

    assert [grad.tolist() for grad in run_ranks(2, run)] == [[2.0] * 3] * 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_autograd_only_the_collective_runs(mode: Any) -> None:
    def run(group: ProcessGroup) -> None:
        counted: Any = CountedGroup(group)
        x = seeded(2, 4).requires_grad_()
        with mode():
            assert copy_to_group(x, process_group=counted) is x
            assert counted.calls == []
            part = split_to_group(x, process_group=counted)
            assert part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
            assert gather_from_group(part, process_group=counted).equal(x)
            assert reduce_from_group(x, process_group=counted).equal(x * 2)
        assert counted.calls == ["all_gather", "all_reduce"]

    run_ranks(2, run)


def test_a_group_of_one_passes_tensors_on() -> None:
    def run(group: ProcessGroup) -> None:
        counted: Any = CountedGroup(group)
        x = seeded(2, 4).requires_grad_()
        for apply in (copy_to_group, reduce_from_group, split_to_group, gather_from_group):
            assert apply(x, process_group=counted) is x
        assert counted.calls == []

    run_ranks(1, run)


def test_sizes_that_do_not_fit_are_named() -> None:
    def run(group: ProcessGroup) -> None:
        with pytest.raises(ConfigError, match=r"dim 1 of 6 .* 4 ranks"):
            split_to_group(WHOLE, process_group=group, dim=1)
        with pytest.raises(ConfigError, match=r"dim 1 .* sum 6.*\[1, 1, 1, 1\]"):
            split_to_group(WHOLE, process_group=group, dim=1, sizes=(1, 1, 1, 1))
        with pytest.raises(ConfigError, match=r"is 6.*\[1, 2, 3, 4\] of 4 ranks"):
            gather_from_group(WHOLE, process_group=group, dim=1, sizes=(1, 2, 3, 4))

    run_ranks(4, run)


def test_a_sum_without_its_conjugate_is_noticed() -> None:
    """Negative control: an all-reduce in both directions counts each gradient twice."""

    def run(group: ProcessGroup) -> torch.Tensor:
        def wrong(x: torch.Tensor) -> torch.Tensor:
            return reduce_from_group(copy_to_group(x, process_group=group), process_group=group)

        return gradient_of(wrong, torch.ones(2), torch.ones(2))[1]

    for grad in run_ranks(2, run):
        assert not grad.equal(torch.ones(2))
