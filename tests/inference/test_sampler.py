"""Draws: edges of the parameters, filters, distributions, seeds."""

import math
from collections import Counter

import pytest
import torch

from stagemesh.inference.sampler import (
    LOGPROB_FLOOR,
    floored,
    sample_token,
    score_targets,
    top_logprobs,
    uniform,
)
from stagemesh.steps import SamplingParams

LOGITS = torch.tensor([1.0, 3.0, 2.5, -1.0, 3.0, 0.0, 2.0, float("-inf")])
ARGMAX = 1  # the lowest id of the two that are equal


def draws(
    count: int, *, logits: torch.Tensor = LOGITS, position: int = 5, **params: float
) -> Counter[int]:
    return Counter(
        sample_token(logits, SamplingParams(seed=seed, **params), position=position)
        for seed in range(count)
    )


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 1e-9},
        {"temperature": 1e-320},
        {"temperature": 5e-324, "top_p": 0.5},
        {"temperature": 0.0, "top_p": 0.1, "min_p": 1.0, "top_k": 3},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_leaves_one_token_is_the_argmax(params: dict[str, float], dtype: torch.dtype) -> None:
    logits = LOGITS.clone()
    logits[4] = 2.9  # no tie
    assert draws(50, logits=logits.to(dtype), **params) == {ARGMAX: 50}


@pytest.mark.parametrize("params", [{}, {"top_k": 1, "temperature": 1.0}])
def test_the_lowest_id_of_equals_wins(params: dict[str, float]) -> None:
    assert sample_token(LOGITS, SamplingParams(**params), position=0) == ARGMAX


@pytest.mark.parametrize("params", [{"top_k": 0}, {"top_k": 1000}, {"top_p": 1.0}, {"min_p": 0.0}])
def test_what_filters_nothing(params: dict[str, float]) -> None:
    assert draws(300, temperature=1.5, **params) == draws(300, temperature=1.5)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 3}, {1, 4, 2}),
        ({"top_k": 2}, {1, 4}),
        ({"min_p": 0.5}, {1, 4, 2}),  # exp(-0.5) = 0.61 of the largest, exp(-1) = 0.37
        ({"min_p": 0.62}, {1, 4}),
        ({"min_p": 1.0}, {1, 4}),
        ({"top_k": 4, "min_p": 0.3}, {1, 4, 2, 6}),
        ({"top_p": 0.6}, {1, 4}),
        ({}, {0, 1, 2, 3, 4, 5, 6}),
    ],
)
def test_filters_keep_the_most_likely(params: dict[str, float], kept: set[int]) -> None:
    assert set(draws(1500, temperature=1.0, **params)) == kept


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.log(torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64))
    for top_p, kept in ((0.5, {0}), (0.51, {0, 1}), (0.75, {0, 1}), (0.76, {0, 1, 2})):
        assert set(draws(300, logits=logits, temperature=1.0, top_p=top_p)) == kept


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_many_seeds_follow_the_softmax(temperature: float) -> None:
    count = 6000
    got = draws(count, temperature=temperature)
    expected = torch.softmax(LOGITS.double() / temperature, dim=-1) * count
    # Rows that are never or hardly ever drawn do not belong in the statistic.
    rows = [i for i in range(len(LOGITS)) if expected[i] > 5]
    chi_square = sum((got[i] - float(expected[i])) ** 2 / float(expected[i]) for i in rows)
    # The 99.99 % point of chi-square with 6 degrees of freedom is 27.9.
    assert len(rows) - 1 <= 6
    assert chi_square < 27.9
    assert got[7] == 0


def test_the_statistic_sees_a_wrong_distribution() -> None:
    count = 6000
    got = draws(count, temperature=1.0)
    wrong = torch.softmax(LOGITS.double() / 1.2, dim=-1) * count
    assert sum((got[i] - float(wrong[i])) ** 2 / float(wrong[i]) for i in range(7)) > 27.9


def test_positions_of_one_seed_follow_the_softmax() -> None:
    count = 6000
    params = SamplingParams(temperature=1.0, seed=11)
    got = Counter(sample_token(LOGITS, params, position=position) for position in range(count))
    expected = torch.softmax(LOGITS.double(), dim=-1) * count
    chi_square = sum((got[i] - float(expected[i])) ** 2 / float(expected[i]) for i in range(7))
    assert chi_square < 27.9


def test_a_draw_depends_on_seed_and_position_only() -> None:
    flat = torch.zeros(100)

    def text(seed: int) -> list[int]:
        params = SamplingParams(temperature=1.0, seed=seed)
        return [sample_token(flat, params, position=position) for position in range(20)]

    assert text(42) == text(42)
    assert text(42) != text(7)
    assert len(set(text(42))) > 5
    assert text(2**64 - 1) != text(0)


def test_an_impossible_token_is_never_drawn_however_the_number_falls() -> None:
    logits = torch.full((50,), float("-inf"))
    logits[[10, 20]] = 0.0
    assert set(draws(500, logits=logits, temperature=1.0)) == {10, 20}
    assert set(draws(500, logits=logits, temperature=100.0, top_p=0.999999)) == {10, 20}


def test_uniform_numbers_fill_the_unit_interval() -> None:
    values = [uniform(seed, 0) for seed in range(2000)]
    assert 0 <= min(values) < 0.01
    assert 0.99 < max(values) < 1
    assert sum(values) / 2000 == pytest.approx(0.5, abs=0.03)


def test_top_logprobs_leave_impossible_tokens_out() -> None:
    logits = torch.full((20,), float("-inf"))
    logits[3], logits[7] = 1.0, 2.0
    top = top_logprobs(torch.log_softmax(logits, dim=-1), 5)
    assert [entry.token_id for entry in top] == [7, 3]
    assert sum(math.exp(entry.logprob) for entry in top) == pytest.approx(1.0)
    assert top_logprobs(torch.log_softmax(logits, dim=-1), 0) == ()
    assert len(top_logprobs(torch.log_softmax(torch.zeros(4), dim=-1), 50)) == 4


def test_scores_of_targets_are_their_log_probabilities() -> None:
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
    logits[1, 4] = float("-inf")
    scores = score_targets(logits, [1, 4, 9], num_top=2)
    expected = torch.log_softmax(logits, dim=-1)
    assert scores[0].logprob == pytest.approx(float(expected[0, 1]))
    assert scores[1].logprob == LOGPROB_FLOOR
    assert scores[2].logprob == pytest.approx(float(expected[2, 9]))
    assert [entry.token_id for entry in scores[2].top] == expected[2].topk(2).indices.tolist()


@pytest.mark.parametrize(
    ("value", "result"),
    [
        (-1.5, -1.5),
        (float("-inf"), LOGPROB_FLOOR),
        (float("nan"), LOGPROB_FLOOR),
        (-1e30, LOGPROB_FLOOR),
    ],
)
def test_log_probabilities_are_finite(value: float, result: float) -> None:
    assert floored(value) == result
