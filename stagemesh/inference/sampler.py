"""Drawing tokens from logits on the last stage.

A draw depends on the logits, the parameters, the seed and the position only: one number per (seed,
position) from a counter-based hash, then the inverse of the cumulative distribution in the order of
the vocabulary. So the same request gives the same text with any number of stages, in any batch, and
after a replay.

Probabilities are whole numbers, `MASS_ONE` for the most likely token. Their sums have no rounding
and no order, so ranks that each have a part of the vocabulary draw the same token as one that has
all of it (`stagemesh.inference.vocab_parallel`).
"""

import hashlib
import math
from collections.abc import Sequence

import torch

from stagemesh.steps import SamplingParams, TargetScore, TokenLogprob

LOGPROB_FLOOR = -9999.0
"""Stands for the logarithm of zero, which JSON cannot say."""

MASS_ONE = 2**40
"""Mass of the most likely token: a sum over 2^22 tokens stays below 2^63."""


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits that depends on (seed, position) only."""
    digest = hashlib.blake2b(
        seed.to_bytes(8, "little") + position.to_bytes(8, "little"), digest_size=8
    ).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def draws_greedily(params: SamplingParams) -> bool:
    """Whether the most likely token is taken, whatever the seed."""
    return params.temperature == 0.0 or params.top_k == 1


def sample_token(logits: torch.Tensor, params: SamplingParams, *, position: int) -> int:
    """Draw one token.

    Filters apply in the order temperature, top_k, top_p, min_p, as in transformers' generate. top_p
    keeps the smallest set of most likely tokens that reaches it, so at least one.

    Args:
        logits: [V], floating point, of any device.
        params: how to draw.
        position: position of the drawn token in its session; with the seed it fixes the draw.
    """
    maximum = float(logits.max())
    if draws_greedily(params) or not math.isfinite(maximum):
        return int(torch.argmax(logits))
    masses = token_masses(logits, maximum=maximum, temperature=params.temperature)
    if 0 < params.top_k < masses.numel() or params.top_p < 1.0:
        masses = _most_likely(logits, masses, params)
    drop_unlikely(masses, params.min_p)
    return token_at(masses, draw_threshold(params, position=position, total=int(masses.sum())))


def token_masses(logits: torch.Tensor, *, maximum: float, temperature: float) -> torch.Tensor:
    """What each token weighs in a draw: round(MASS_ONE * exp((logit - maximum) / temperature)).

    Shapes:
        logits: any; returns the same in int64.
    """
    # Shifted first: divided by a tiny temperature, scores would become infinite and their
    # differences NaN.
    scores = (logits.double() - maximum) / temperature
    return torch.round(torch.exp(scores) * MASS_ONE).nan_to_num(0.0).long()


def drop_unlikely(masses: torch.Tensor, min_p: float) -> None:
    """Set masses below `min_p` of the most likely token's to 0, in place."""
    if min_p > 0.0:
        masses[masses < share_of(min_p, MASS_ONE)] = 0


def share_of(fraction: float, total: int) -> int:
    """The smallest whole number that is at least `fraction` of `total`, and 1; exact."""
    numerator, denominator = fraction.as_integer_ratio()
    return max(1, -(-numerator * total // denominator))


def draw_threshold(params: SamplingParams, *, position: int, total: int) -> int:
    """The number in [0, total) that this draw looks for among the cumulative masses."""
    return int(uniform(params.seed, position) * 2.0**53) * total >> 53


def token_at(masses: torch.Tensor, threshold: int) -> int:
    """The first index at which the masses up to and with it exceed `threshold`."""
    cumulative = torch.cumsum(masses, dim=-1)
    return int(torch.searchsorted(cumulative, threshold, right=True))


def _most_likely(
    logits: torch.Tensor, masses: torch.Tensor, params: SamplingParams
) -> torch.Tensor:
    """The masses with those that top_k and top_p leave out set to 0."""
    # Stable, so that the lowest ids of equal logits are kept.
    order = torch.sort(logits, descending=True, stable=True).indices
    if 0 < params.top_k < order.numel():
        order = order[: params.top_k]
    if params.top_p < 1.0:
        cumulative = torch.cumsum(masses[order], dim=-1)
        needed = share_of(params.top_p, int(cumulative[-1]))
        order = order[: int(torch.searchsorted(cumulative, needed)) + 1]
    kept = torch.zeros_like(masses)
    kept[order] = masses[order]
    return kept


def top_logprobs(logprobs: torch.Tensor, count: int) -> tuple[TokenLogprob, ...]:
    """The `count` most likely tokens of [V] log-probabilities, impossible ones left out."""
    if count == 0:
        return ()
    values, tokens = torch.topk(logprobs, min(count, logprobs.numel()))
    return tuple(
        TokenLogprob(token, value)
        for value, token in zip(values.tolist(), tokens.tolist(), strict=True)
        if value > LOGPROB_FLOOR
    )


def score_targets(
    logits: torch.Tensor, targets: Sequence[int], *, num_top: int
) -> tuple[TargetScore, ...]:
    """Log-probability of each target after its position.

    Args:
        logits: [n, V].
        targets: n token ids.
        num_top: most likely tokens to return beside each.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    return tuple(
        TargetScore(floored(float(row[target])), top_logprobs(row, num_top))
        for row, target in zip(logprobs, targets, strict=True)
    )


def floored(logprob: float) -> float:
    """A finite log-probability; NaN and minus infinity become the floor."""
    return logprob if logprob > LOGPROB_FLOOR else LOGPROB_FLOOR
