"""From logits to what a step returns: which rows of logits a step needs, and the draws from them.

`vocab_parallel` does the same on ranks that each have a part of the vocabulary.
"""

from collections.abc import Sequence

import torch

from stagemesh.inference.sampler import floored, sample_token, score_targets, top_logprobs
from stagemesh.steps import SampledToken, Segment, TokenLogprob


def num_logit_rows(segment: Segment) -> int:
    """Rows of logits that a segment needs, all of them at its end."""
    if segment.target_token_ids:
        return segment.num_tokens
    return 1 if segment.sampling is not None else 0


def logit_rows(segments: Sequence[Segment]) -> list[int]:
    """Indices into the token axis at which logits are needed."""
    rows: list[int] = []
    offset = 0
    for segment in segments:
        offset += segment.num_tokens
        rows.extend(range(offset - num_logit_rows(segment), offset))
    return rows


def drawn_position(segment: Segment) -> int:
    """Position in its session of the token that follows a segment."""
    return segment.start_position + segment.num_tokens


def draw_tokens(segments: Sequence[Segment], logits: torch.Tensor) -> tuple[SampledToken, ...]:
    """Results of all segments.

    Shapes:
        logits: [n, V], the rows of all segments one after the other.
    """
    tokens = []
    row = 0
    for segment in segments:
        count = num_logit_rows(segment)
        tokens.append(_draw(segment, logits[row : row + count]))
        row += count
    return tuple(tokens)


def _draw(segment: Segment, logits: torch.Tensor) -> SampledToken:
    """Result of one segment from its logits [n, V]; n may be 0."""
    targets = segment.target_token_ids
    scores = (
        score_targets(logits[: len(targets)], targets, num_top=segment.num_target_top_logprobs)
        if targets
        else ()
    )
    params = segment.sampling
    if params is None:
        return SampledToken(session_id=segment.session_id, target_scores=scores)
    token = sample_token(logits[-1], params, position=drawn_position(segment))
    logprob = 0.0
    top: tuple[TokenLogprob, ...] = ()
    if params.logprobs or params.num_top_logprobs:
        logprobs = torch.log_softmax(logits[-1], dim=-1)
        logprob, top = (
            floored(float(logprobs[token])),
            top_logprobs(logprobs, params.num_top_logprobs),
        )
    return SampledToken(
        session_id=segment.session_id,
        token_id=token,
        logprob=logprob,
        top=top,
        target_scores=scores,
    )
