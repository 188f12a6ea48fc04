"""Embedding, head and loss, cut by vocabulary."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import ConfigError, UnsupportedModel
from stagemesh.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy
from stagemesh.parallel.tensor.embedding import VocabParallelEmbedding
from stagemesh.parallel.tensor.linear import ColumnParallelLinear
from tests.parallel.tensor.support import (
    FP32_TOLERANCE,
    CountedGroup,
    built,
    relative_error,
    seeded,
)
from tests.support.ranks import BACKENDS, run_ranks

IDS = torch.tensor([[0, 3, 9, 3], [4, 5, 6, 0]])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", [(5, 5), (7, 3), (2, 1, 7)])
@pytest.mark.parametrize("padding_idx", [None, 0, 3])
def test_embedding(padding_idx: int | None, sizes: tuple[int, ...], backend: str) -> None:
    whole = built(lambda: nn.Embedding(10, 4, padding_idx=padding_idx))
    weight = seeded(2, 4, 4)
    expected = whole(IDS)
    expected.backward(weight)

    def run(group: ProcessGroup) -> None:
        own = VocabParallelEmbedding.from_embedding(whole, process_group=group, sizes=sizes)
        rows = own(IDS)
        rows.backward(weight)
        assert rows.equal(expected)
        assert own.weight.grad.equal(whole.weight.grad.split(sizes)[group.rank])

    run_ranks(len(sizes), run, backend=backend)


@pytest.mark.parametrize("bad", [-1, 10])
@pytest.mark.parametrize("world_size", [1, 2])
def test_ids_that_no_rank_has_are_refused(bad: int, world_size: int) -> None:
    def run(group: ProcessGroup) -> None:
        own = VocabParallelEmbedding(10, 4, process_group=group)
        assert own(torch.zeros(0, dtype=torch.int64)).shape == (0, 4)
        with pytest.raises(IndexError, match=rf"\[0, 10\).*{bad}"):
            own(torch.tensor([0, bad]))

    run_ranks(world_size, run)


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"sparse": True}])
def test_embeddings_that_cannot_be_cut_are_refused(option: Any) -> None:
    def run(group: ProcessGroup) -> None:
        with pytest.raises(UnsupportedModel, match="max_norm"):
            VocabParallelEmbedding.from_embedding(nn.Embedding(4, 2, **option), process_group=group)

    run_ranks(1, run)


def losses_of(
    group: ProcessGroup, logits: torch.Tensor, targets: torch.Tensor, sizes: Any, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    part = torch.split(logits, sizes, -1)[group.rank].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(part, targets, process_group=group, sizes=sizes, **options)
    loss.sum().backward()
    return loss.detach(), part.grad


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("sizes", [(10,), (5, 5), (2, 8), (3, 1, 6)])
def test_loss_and_gradient(sizes: tuple[int, ...], reduction: str, backend: str) -> None:
    logits = seeded(2, 4, 10) * 5
    targets = IDS.clone()
    targets[1, 2] = -100
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole.view(8, 10), targets.view(8), reduction=reduction)
    expected.sum().backward()

    def run(group: ProcessGroup) -> None:
        loss, grad = losses_of(group, logits, targets, sizes, reduction=reduction)
        assert loss.shape == (targets.shape if reduction == "none" else ())
        assert relative_error(loss.flatten(), expected.detach().flatten()) < FP32_TOLERANCE
        assert relative_error(grad, whole.grad.split(sizes, -1)[group.rank]) < FP32_TOLERANCE

    run_ranks(len(sizes), run, backend=backend)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.integers(1, 5),
    st.sampled_from([1e-3, 1.0, 1e4]),
    st.integers(0, 99),
)
def test_any_cut_of_any_logits(sizes: list[int], num_rows: int, scale: float, seed: int) -> None:
    vocab_size = sum(sizes)
    logits = seeded(num_rows, vocab_size, seed=seed).double() * scale
    targets = torch.randint(
        0, vocab_size, (num_rows,), generator=torch.Generator().manual_seed(seed)
    )
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole, targets)
    expected.backward()

    def run(group: ProcessGroup) -> Any:
        return losses_of(group, logits, targets, sizes)

    results = run_ranks(len(sizes), run)
    for loss, _ in results:
        assert loss.item() == pytest.approx(expected.item(), rel=1e-10, abs=1e-10)
    torch.testing.assert_close(torch.cat([grad for _, grad in results], -1), whole.grad)


def test_logits_without_end_and_a_rank_without_any_word() -> None:
    logits = torch.tensor([[-torch.inf, -torch.inf, 1.0, 2.0], [3e38, 0.0, -3e38, -torch.inf]])
    targets = torch.tensor([3, 1])
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole, targets, reduction="none")
    expected[0].backward()

    def run(group: ProcessGroup) -> None:
        loss, grad = losses_of(group, logits, targets, (2, 2), reduction="none")
        torch.testing.assert_close(loss, expected.detach())
        torch.testing.assert_close(grad[0], whole.grad.split(2, -1)[group.rank][0])

    run_ranks(2, run)


def test_without_any_target_mean_is_nan_and_sum_zero_as_in_one_piece() -> None:
    def run(group: ProcessGroup) -> None:
        targets = torch.full((3,), -100)
        loss, grad = losses_of(group, seeded(3, 4), targets, (2, 2), reduction="sum")
        assert (loss.item(), grad.abs().sum().item()) == (0.0, 0.0)
        loss, _ = losses_of(group, seeded(3, 4), targets, (2, 2))
        assert loss.isnan()

    run_ranks(2, run)


def test_bf16_logits_are_computed_with_in_fp32() -> None:
    logits = (seeded(6, 64) * 3).to(torch.bfloat16)
    targets = torch.arange(6)
    whole = logits.float().requires_grad_()
    expected = F.cross_entropy(whole, targets)
    expected.backward()

    def run(group: ProcessGroup) -> None:
        loss, grad = losses_of(group, logits, targets, (32, 32))
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(expected.item(), rel=FP32_TOLERANCE)
        assert grad.dtype == torch.bfloat16
        # One rounding to 8 bits, at the end.
        part = whole.grad.split(32, -1)[group.rank]
        assert grad.equal(part.to(torch.bfloat16)) or relative_error(grad, part) < 3e-3

    run_ranks(2, run)


def test_head_and_loss_never_move_logits() -> None:
    head = built(lambda: nn.Linear(8, 1000, bias=False))
    x, targets = seeded(4, 8), torch.tensor([0, 1, 998, 999])
    inner = x.clone().requires_grad_()
    F.cross_entropy(head(inner), targets).backward()

    def run(group: ProcessGroup) -> Any:
        counted: Any = CountedGroup(group)
        own = ColumnParallelLinear.from_linear(copy.deepcopy(head), process_group=counted)
        mine = x.clone().requires_grad_()
        logits = own(mine)
        assert logits.shape == (4, 500)
        vocab_parallel_cross_entropy(logits, targets, process_group=counted).backward()
        assert relative_error(mine.grad, inner.grad) < FP32_TOLERANCE
        part = head.weight.grad.split(500)[group.rank]
        assert relative_error(own.weight.grad, part) < FP32_TOLERANCE
        return counted.calls

    # Three numbers per row in forward, an input's gradient in backward.
    assert run_ranks(2, run) == [["all_gather_tensor", "all_reduce"]] * 2


def test_a_loss_over_the_ranks_own_words_only_is_noticed() -> None:
    """Negative control."""
    logits, targets = seeded(4, 10), torch.tensor([0, 1, 2, 3])
    expected = F.cross_entropy(logits, targets).item()

    def run(group: ProcessGroup) -> float:
        return F.cross_entropy(logits[:, :5], targets).item()

    for loss in run_ranks(2, run):
        assert loss != pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"sizes": (4, 6)}, ConfigError, r"5 words.*\[4, 6\]"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, ConfigError, r"\[2\], got \[3\]"),
        ({"targets": torch.tensor([0, 10])}, IndexError, r"\[0, 10\).*10"),
        ({"targets": torch.tensor([-1, 0])}, IndexError, r"\[0, 10\).*-1"),
        ({"reduction": "max"}, ConfigError, "'max'"),
    ],
)
def test_what_does_not_fit_is_named(change: Any, error: Any, words: str) -> None:
    def run(group: ProcessGroup) -> None:
        options: Any = {"targets": torch.zeros(2, dtype=torch.int64)} | change
        targets = options.pop("targets")
        with pytest.raises(error, match=words):
            vocab_parallel_cross_entropy(seeded(2, 5), targets, process_group=group, **options)

    run_ranks(2, run)
