"""One norm for gradients that lie on many ranks."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.parallel.clipping import clip_grad_norm_, global_grad_norm
from stagemesh.parallel.fsdp.fsdp import Fsdp
from tests.parallel.fsdp.training import config
from tests.support.ranks import run_ranks


def parameter(gradient: list[float], **marks: Any) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(len(gradient)))
    made.grad = torch.tensor(gradient)
    for name, value in marks.items():
        setattr(made, name, value)
    return made


def tensor_sharded(gradient: list[float]) -> nn.Parameter:
    return parameter(gradient, tensor_shard=SimpleNamespace(dim=0))


def replicated(gradient: list[float]) -> nn.Parameter:
    return parameter(gradient)


@pytest.mark.parametrize(
    ("make", "as_tensor_group", "expected"),
    [
        # Spread over ranks: 1, 2 | 2, 4 -> 5.
        (lambda rank: [parameter([1.0, 2.0] if rank == 0 else [2.0, 4.0])], False, 5.0),
        # Shards of tensor-parallel layers: the same elements.
        (lambda rank: [tensor_sharded([1.0, 2.0] if rank == 0 else [2.0, 4.0])], True, 5.0),
        # Equal on the ranks of the axis: once.
        (lambda rank: [replicated([3.0, 4.0])], True, 5.0),
        (
            lambda rank: [tensor_sharded([2.0]), replicated([2.0, 1.0, 2.0 - rank * 0.0])],
            True,
            None,
        ),
        # None here, all there.
        (lambda rank: [parameter([3.0, 4.0])] if rank else [], False, 5.0),
    ],
)
def test_each_element_counts_once(
    make: Callable[[int], list[nn.Parameter]], as_tensor_group: bool, expected: float | None
) -> None:
    def on_rank(group: ProcessGroup) -> float:
        where = {"tensor_group": group} if as_tensor_group else {"groups": [group]}
        return global_grad_norm(make(group.rank), **where).item()

    assert run_ranks(2, on_rank) == pytest.approx([expected or 17**0.5] * 2)


def test_two_axes() -> None:
    """Rows of the ranks are groups of one axis, columns of the other: dp 2, tp 2."""

    def on_rank(group: ProcessGroup) -> float:
        pairs = [group.subgroup(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
        tensor_group, data_group = (found for found in pairs if found is not None)
        own = [tensor_sharded([1.0 + group.rank]), replicated([float(group.rank // 2)])]
        norm = global_grad_norm(own, groups=[data_group], tensor_group=tensor_group)
        return norm.item() ** 2

    # Shards 1, 2, 3, 4, all different; the other parameter is cut in 0 and 1.
    assert run_ranks(4, on_rank) == pytest.approx([31.0] * 4)


@pytest.mark.parametrize("max_norm", [1.0, 100.0])
def test_scaling_is_that_of_torch(max_norm: float) -> None:
    whole = parameter([3.0, 4.0, 12.0])
    expected_norm = nn.utils.clip_grad_norm_([whole], max_norm)

    def on_rank(group: ProcessGroup) -> tuple[float, torch.Tensor]:
        own = parameter([3.0, 4.0] if group.rank == 0 else [12.0])
        norm = clip_grad_norm_([own], max_norm=max_norm, groups=[group])
        assert own.grad is not None
        return norm.item(), own.grad

    results = run_ranks(2, on_rank)
    assert [norm for norm, _ in results] == pytest.approx([expected_norm.item()] * 2)
    torch.testing.assert_close(torch.cat([grad for _, grad in results]), whole.grad)


@pytest.mark.parametrize(
    ("gradient", "is_right"),
    [([float("nan")], torch.isnan), ([float("inf")], torch.isinf), ([3e30, 4e30], None)],
)
def test_norms_that_are_hard(gradient: list[float], is_right: Any) -> None:
    def on_rank(group: ProcessGroup) -> torch.Tensor:
        own = parameter(gradient if group.rank else [1.0])
        return clip_grad_norm_([own], max_norm=1.0, groups=[group])

    for norm in run_ranks(2, on_rank):
        if is_right is None:
            assert norm.item() == pytest.approx(5e30)
        else:
            assert is_right(norm)


def test_no_gradients_at_all() -> None:
    own = nn.Parameter(torch.ones(2))
    assert run_ranks(1, lambda group: clip_grad_norm_([own], max_norm=1.0, groups=[group]).item())
    assert own.grad is None


def test_shards_of_tensor_shards_are_told_apart() -> None:
    """A unit with both kinds: its flat parameters know which of them counts per rank of tp."""

    class Mixed(nn.Module):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.cut = tensor_sharded([0.0, 0.0])
            self.whole = nn.Parameter(torch.zeros(2))
            self.rank = rank

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.cut * x * (1 + self.rank)).sum() + (self.whole * x).sum()

    def on_rank(group: ProcessGroup) -> float:
        pairs = [group.subgroup(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
        tensor_group, data_group = (found for found in pairs if found is not None)
        model = Fsdp(
            Mixed(tensor_group.rank), process_group=data_group, config=config(min_param_size=0)
        )
        model(torch.ones(2)).backward()
        return model.clip_grad_norm_(max_norm=1.0, tensor_group=tensor_group).item() ** 2

    # cut: 1, 1 on one rank of the axis and 2, 2 on the other; whole: 1, 1 once.
    assert run_ranks(4, on_rank) == pytest.approx([12.0] * 4)


def test_counting_replicas_twice_would_be_noticed() -> None:
    """Negative control."""

    def on_rank(group: ProcessGroup) -> float:
        return global_grad_norm([replicated([3.0, 4.0])], groups=[group]).item()

    assert run_ranks(2, on_rank)[0] != pytest.approx(5.0, rel=0.1)
