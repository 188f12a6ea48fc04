"""Draws on ranks that each have the logits of some words; whole logits never meet.

Each rank has [n, V_r] logits, and all get the same tokens as `draws.draw_tokens` would draw from
the [n, V] of one rank. What crosses, with R ranks:

    1. one all-gather of a few numbers per row: the rank's largest logit and its word, the sum of
       its exponentials, a wanted target's logit, its most likely words where they were asked for.
       Greedy steps, log-probabilities and scores need nothing more.
    2. rows that are drawn by chance and have top_k or top_p: the logit at which each filter cuts,
       found digit by digit with histograms (`radix_select`), four all-reduces of 4 KiB a row;
    3. an all-gather of each rank's remaining mass, one number per row: together they say in whose
       words the drawn number falls;
    4. an all-reduce of the token that this rank alone has found.

Masses are whole numbers (`sampler.token_masses`), so sums over ranks are those of one rank exactly.
All decisions follow from numbers that all ranks have, so the ranks never wait in different calls.
"""

import math
from collections.abc import Sequence

import torch

from stagemesh.comm.direct_group import RankGroup
from stagemesh.inference.draws import num_logit_rows
from stagemesh.inference.radix_select import cut_to_count, cut_to_mass
from stagemesh.inference.sampler import (
    draw_threshold,
    draws_greedily,
    drop_unlikely,
    floored,
    share_of,
    token_at,
    token_masses,
)
from stagemesh.inference.vocab_summary import (
    LogitRow,
    RowSummary,
    logit_of,
    rows_of,
    summarise,
)
from stagemesh.steps import SampledToken, SamplingParams, Segment, TargetScore


def draw_over_ranks(
    segments: Sequence[Segment],
    logits: torch.Tensor,
    *,
    process_group: RankGroup,
    first_word: int,
    vocab_size: int,
) -> tuple[SampledToken, ...]:
    """Results of all segments, the same on each rank.

    Args:
        segments: of the step, the same on each rank.
        logits: [n, V_r] float32 on the CPU, of this rank's words.
        process_group: the ranks, whose words follow each other.
        first_word: id of this rank's first word.
        vocab_size: words of all ranks.
    """
    rows = [row for segment in segments for row in rows_of(segment)]
    summaries = summarise(rows, logits, process_group, first_word, vocab_size)
    tokens = [summary.best_token for summary in summaries]
    chosen = [
        index
        for index, row in enumerate(rows)
        if row.sampling is not None
        and not draws_greedily(row.sampling)
        and math.isfinite(summaries[index].maximum)
    ]
    if chosen:
        drawn = _draw_by_chance(
            [rows[index] for index in chosen],
            logits[chosen],
            [summaries[index].maximum for index in chosen],
            process_group=process_group,
            first_word=first_word,
            vocab_size=vocab_size,
        )
        for index, token in zip(chosen, drawn, strict=True):
            tokens[index] = token
    logprobs = _logprobs_of_drawn(rows, tokens, logits, summaries, process_group, first_word)
    results, start = [], 0
    for segment in segments:
        end = start + num_logit_rows(segment)
        span = slice(start, end)
        results.append(_result(segment, summaries[span], tokens[span], logprobs[span]))
        start = end
    return tuple(results)


def _result(
    segment: Segment,
    summaries: Sequence[RowSummary],
    tokens: Sequence[int],
    logprobs: Sequence[float],
) -> SampledToken:
    scores = tuple(
        TargetScore(
            floored(summary.target_logit - summary.log_total),
            summary.top(segment.num_target_top_logprobs),
        )
        for summary in (summaries if segment.target_token_ids else ())
    )
    params = segment.sampling
    if params is None:
        return SampledToken(session_id=segment.session_id, target_scores=scores)
    return SampledToken(
        session_id=segment.session_id,
        token_id=tokens[-1],
        logprob=logprobs[-1],
        top=summaries[-1].top(params.num_top_logprobs),
        target_scores=scores,
    )


def _draw_by_chance(
    rows: Sequence[LogitRow],
    logits: torch.Tensor,
    maxima: Sequence[float],
    *,
    process_group: RankGroup,
    first_word: int,
    vocab_size: int,
) -> list[int]:
    """Steps 2 to 4 of the module's plan, for rows that need them."""
    params = [row.sampling for row in rows if row.sampling is not None]
    masses = torch.stack(
        [
            token_masses(row, maximum=maximum, temperature=p.temperature)
            for row, maximum, p in zip(logits, maxima, params, strict=True)
        ]
    )
    _filter(params, logits, masses, process_group, vocab_size)
    for row, p in zip(masses, params, strict=True):
        drop_unlikely(row, p.min_p)
    own = masses.sum(dim=-1)
    by_rank = own.new_empty((process_group.size, len(rows)))
    process_group.all_gather_tensor(by_rank, own)
    tokens = torch.zeros(len(rows), dtype=torch.int64)
    for index, (row, p) in enumerate(zip(rows, params, strict=True)):
        totals = by_rank[:, index].tolist()
        before = sum(totals[: process_group.rank])
        threshold = draw_threshold(p, position=row.position, total=sum(totals)) - before
        if 0 <= threshold < totals[process_group.rank]:
            tokens[index] = first_word + token_at(masses[index], threshold)
    process_group.all_reduce(tokens)
    return [int(token) for token in tokens]


def _filter(
    params: Sequence[SamplingParams],
    logits: torch.Tensor,
    masses: torch.Tensor,
    process_group: RankGroup,
    vocab_size: int,
) -> None:
    """Set masses that top_k and top_p leave out to 0, in place; top_p counts what top_k left."""
    by_count = [i for i, p in enumerate(params) if 0 < p.top_k < vocab_size]
    is_kept = torch.ones_like(masses, dtype=torch.bool)
    if by_count:
        is_kept[by_count] = cut_to_count(
            logits[by_count], [params[i].top_k for i in by_count], process_group=process_group
        )
    masses.masked_fill_(~is_kept, 0)
    by_mass = [i for i, p in enumerate(params) if p.top_p < 1.0]
    if by_mass:
        totals = masses[by_mass].sum(dim=-1)
        process_group.all_reduce(totals)
        needed = [
            share_of(params[i].top_p, total)
            for i, total in zip(by_mass, totals.tolist(), strict=True)
        ]
        kept = cut_to_mass(
            logits[by_mass],
            masses[by_mass],
            needed,
            is_candidate=is_kept[by_mass],
            process_group=process_group,
        )
        masses[by_mass] = masses[by_mass].masked_fill(~kept, 0)


def _logprobs_of_drawn(
    rows: Sequence[LogitRow],
    tokens: Sequence[int],
    logits: torch.Tensor,
    summaries: Sequence[RowSummary],
    process_group: RankGroup,
    first_word: int,
) -> list[float]:
    """Log-probability of each row's token, 0.0 where nobody asked for one."""
    logprobs = [0.0] * len(rows)
    asked = [
        index
        for index, row in enumerate(rows)
        if row.sampling is not None and (row.sampling.logprobs or row.sampling.num_top_logprobs)
    ]
    if asked:
        own = torch.tensor(
            [logit_of(tokens[i], i, logits, first_word) for i in asked], dtype=torch.float64
        )
        by_rank = own.new_empty((process_group.size, len(asked)))
        process_group.all_gather_tensor(by_rank, own)
        for index, logit in zip(asked, by_rank.max(dim=0).values.tolist(), strict=True):
            logprobs[index] = floored(logit - summaries[index].log_total)
    return logprobs
