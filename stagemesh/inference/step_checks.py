"""What a step must be before a stage computes it."""

from collections import Counter

import torch

from stagemesh.errors import ProtocolError
from stagemesh.steps import Step


def check_step(
    step: Step,
    activation: torch.Tensor | None,
    *,
    is_first: bool,
    hidden_size: int,
    vocab_size: int,
    dtype: torch.dtype,
) -> None:
    """Refuse what would only fail, or worse would not fail, deep inside the model.

    Shapes:
        activation: [T, D], None on the first stage.

    Args:
        step: with at least one segment.
        activation: that came with it.
        is_first: whether the stage embeds token ids.
        hidden_size: D.
        vocab_size: words of the whole model.
        dtype: in which the stage runs.

    Raises:
        ProtocolError: two segments are of one session, or the inputs are not those of the stage.
    """
    counts = Counter(segment.session_id for segment in step.segments)
    session_id, count = counts.most_common(1)[0]
    if count > 1:
        raise ProtocolError(
            f"step {step.step_id} has more than one segment of session {session_id}"
        )
    if is_first:
        _check_token_ids(step, vocab_size)
        return
    expected = (step.num_tokens, hidden_size)
    if activation is None or tuple(activation.shape) != expected:
        got = None if activation is None else list(activation.shape)
        raise ProtocolError(
            f"step {step.step_id} needs an activation of shape {list(expected)}, got {got}"
        )
    if activation.dtype != dtype:
        raise ProtocolError(
            f"step {step.step_id} has an activation of {activation.dtype}, this stage runs in "
            f"{dtype}"
        )


def _check_token_ids(step: Step, vocab_size: int) -> None:
    if len(step.token_ids) != step.num_tokens:
        raise ProtocolError(
            f"step {step.step_id} has {len(step.token_ids)} token ids for {step.num_tokens} tokens"
        )
    worst = max(step.token_ids)
    if worst >= vocab_size:
        raise ProtocolError(f"token id {worst} is outside the vocabulary of {vocab_size}")
