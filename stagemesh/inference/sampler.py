"""Drawing tokens from logits on the last stage.

A draw depends on the logits, the parameters, the seed and the position only: one uniform number per
(seed, position) from a counter-based hash, then the inverse of the cumulative distribution. So the
same request gives the same text with any number of stages, in any batch, and after a replay.
"""

import hashlib
from collections.abc import Sequence

import torch

from stagemesh.steps import SamplingParams, TargetScore, TokenLogprob

LOGPROB_FLOOR = -9999.0
"""Stands for the logarithm of zero, which JSON cannot say."""


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits that depends on (seed, position) only."""
    digest = hashlib.blake2b(
        seed.to_bytes(8, "little") + position.to_bytes(8, "little"), digest_size=8
    ).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample_token(logits: torch.Tensor, params: SamplingParams, *, position: int) -> int:
    """Draw one token.

    Filters apply in the order temperature, top_k, top_p, min_p, as in transformers' generate. top_p
    keeps the smallest set of most likely tokens that reaches it, so at least one.

    Args:
        logits: [V], floating point, of any device.
        params: how to draw.
        position: position of the drawn token in its session; with the seed it fixes the draw.
    """
    if params.temperature == 0.0 or params.top_k == 1:
        return int(torch.argmax(logits))
    scores = logits.double()
    # Shifted first: divided by a tiny temperature, scores would become infinite and their
    # differences NaN.
    scores = (scores - scores.max()) / params.temperature
    # Stable, so that equal logits keep the order of their ids and the draw is the same everywhere.
    ordered, tokens = torch.sort(scores, descending=True, stable=True)
    if 0 < params.top_k < ordered.numel():
        ordered, tokens = ordered[: params.top_k], tokens[: params.top_k]
    probabilities = torch.softmax(ordered, dim=-1)
    cumulative = torch.cumsum(probabilities, dim=-1)
    if params.top_p < 1.0:
        kept = int(torch.searchsorted(cumulative, params.top_p)) + 1
        probabilities = probabilities[:kept]
    if params.min_p > 0.0:
        probabilities = probabilities[probabilities >= params.min_p * probabilities[0]]
    cumulative = torch.cumsum(probabilities, dim=-1)
    threshold = uniform(params.seed, position) * float(cumulative[-1])
    index = int(torch.searchsorted(cumulative, threshold, right=True))
    return int(tokens[min(index, probabilities.numel() - 1)])


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
