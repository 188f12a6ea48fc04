"""Draws over ranks against the draws of one, for the same logits: equal, not just alike."""

import itertools

import pytest
import torch

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.inference.draws import draw_tokens
from stagemesh.inference.vocab_parallel import draw_over_ranks
from stagemesh.steps import SampledToken, SamplingParams, Segment
from tests.support.ranks import run_ranks

VOCAB = 1000
CUTS = {1: (0, 1000), 2: (0, 333, 1000), 3: (0, 1, 700, 1000), 4: (0, 250, 500, 750, 1000)}


def over_ranks(
    segments: list[Segment], logits: torch.Tensor, cuts: tuple[int, ...]
) -> list[SampledToken]:
    """The results, which all ranks must have alike."""

    def run(group: ProcessGroup) -> tuple[SampledToken, ...]:
        start, end = cuts[group.rank], cuts[group.rank + 1]
        return draw_over_ranks(
            segments,
            logits[:, start:end].clone(),
            process_group=group,
            first_word=start,
            vocab_size=logits.shape[-1],
        )

    first, *others = run_ranks(len(cuts) - 1, run)
    assert all(other == first for other in others)
    return list(first)


def rows_of_all_kinds(num: int) -> torch.Tensor:
    """Peaked, flat, quantised to many ties, and with impossible words."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(num, VOCAB, generator=generator)
    for row in range(num):
        kind = row % 5
        if kind == 0:
            logits[row] *= 6
        elif kind == 1:
            logits[row] = torch.where(torch.rand(VOCAB, generator=generator) < 0.5, 0.0, -0.0)
        elif kind == 2:
            logits[row] = torch.round(logits[row] * 2) / 2
        elif kind == 3:
            logits[row, torch.rand(VOCAB, generator=generator) < 0.9] = float("-inf")
    return logits


PARAMS = [
    dict(zip(("temperature", "top_k", "top_p", "min_p"), values, strict=True))
    for values in itertools.product(
        (0.0, 0.7, 1.0, 100.0, 1e-320), (0, 1, 7, 400, 5000), (1.0, 0.9, 0.35, 1e-9), (0.0, 0.1, 1)
    )
]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_every_combination_of_filters(num_ranks: int) -> None:
    logits = rows_of_all_kinds(len(PARAMS))
    segments = [
        Segment(
            session_id=index,
            start_position=index,
            num_tokens=1,
            sampling=SamplingParams(seed=index * 7919, **params),  # type: ignore[arg-type]
        )
        for index, params in enumerate(PARAMS)
    ]
    expected = draw_tokens(segments, logits)
    got = over_ranks(segments, logits, CUTS[num_ranks])
    assert [token.token_id for token in got] == [token.token_id for token in expected]
    assert len({token.token_id for token in got}) > 50


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_many_seeds_of_a_flat_row(num_ranks: int) -> None:
    """With everything equal a rank's border, and the order of equals, would show at once."""
    count = 150
    logits = torch.zeros(count, VOCAB)
    for params in ({}, {"top_k": 700}, {"top_p": 0.5}, {"top_k": 700, "top_p": 0.5}):
        segments = [
            Segment(
                session_id=1,
                start_position=seed,
                num_tokens=1,
                sampling=SamplingParams(temperature=1.0, seed=seed, **params),  # type: ignore[arg-type]
            )
            for seed in range(count)
        ]
        got = [token.token_id for token in over_ranks(segments, logits, CUTS[num_ranks])]
        assert got == [token.token_id for token in draw_tokens(segments, logits)]
        limit = {(): 1000, ("top_k",): 700, ("top_p",): 500}.get(tuple(params), 350)
        assert max(got) < limit  # type: ignore[type-var]
        assert max(got) > 0.95 * limit  # type: ignore[operator]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_log_probabilities_scores_and_likely_words(num_ranks: int) -> None:
    logits = rows_of_all_kinds(9)
    sampling = SamplingParams(temperature=1.0, seed=5, logprobs=True, num_top_logprobs=4)
    segments = [
        Segment(session_id=1, start_position=0, num_tokens=3, sampling=None),
        Segment(
            session_id=2,
            start_position=4,
            num_tokens=8,
            sampling=sampling,
            target_token_ids=(0, 332, 333, 999, 250, 700, 1, 17),
            num_target_top_logprobs=2,
        ),
        Segment(session_id=3, start_position=9, num_tokens=2, sampling=sampling),
    ]
    expected = draw_tokens(segments, logits)
    for got, one in zip(over_ranks(segments, logits, CUTS[num_ranks]), expected, strict=True):
        assert got.token_id == one.token_id
        assert got.logprob == pytest.approx(one.logprob, abs=1e-5)
        assert_same_entries(got.top, one.top)
        for a, b in zip(got.target_scores, one.target_scores, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-5)
            assert_same_entries(a.top, b.top)


def assert_same_entries(got: tuple, one: tuple) -> None:
    """Equal values; of words that are equally likely either may be named."""
    assert [e.logprob for e in got] == pytest.approx([e.logprob for e in one], abs=1e-5)
    distinct = {round(e.logprob, 4) for e in one}
    if len(distinct) == len(one):
        assert [e.token_id for e in got] == [e.token_id for e in one]


def test_rows_that_have_no_likely_word() -> None:
    logits = torch.full((2, VOCAB), float("-inf"))
    logits[1, 17] = float("nan")
    segments = [
        Segment(
            session_id=i, start_position=0, num_tokens=1, sampling=SamplingParams(temperature=1.0)
        )
        for i in range(2)
    ]
    expected = draw_tokens(segments, logits)
    got = over_ranks(segments, logits, CUTS[2])
    assert [token.token_id for token in got] == [token.token_id for token in expected] == [0, 17]


def test_ranks_that_have_words_in_another_order_draw_others() -> None:
    """The negative control: the borders matter."""
    logits = rows_of_all_kinds(40)
    segments = [
        Segment(
            session_id=i,
            start_position=0,
            num_tokens=1,
            sampling=SamplingParams(temperature=1.0, seed=i),
        )
        for i in range(40)
    ]
    expected = [token.token_id for token in draw_tokens(segments, logits)]
    turned = torch.cat([logits[:, 500:], logits[:, :500]], dim=-1)
    got = [token.token_id for token in over_ranks(segments, turned, (0, 500, 1000))]
    assert got != expected
