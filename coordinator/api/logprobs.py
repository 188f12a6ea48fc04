"""OpenAI's two JSON forms of log-probabilities. Strict JSON: no NaN, no infinity."""

import math
from collections.abc import Iterable
from typing import Any

from coordinator.api.choice_text import ScoredToken
from coordinator.text.tokenizer import Tokenizer

IMPOSSIBLE_LOGPROB = -9999.0
"""Stands for the logarithm of 0, which JSON cannot write; OpenAI's value for it too."""


def finite_logprob(value: float) -> float:
    """`value`, or the floor where it is NaN or minus infinity."""
    # max() would let NaN through, depending on the order of its arguments.
    return value if math.isfinite(value) and value > IMPOSSIBLE_LOGPROB else IMPOSSIBLE_LOGPROB


def token_label(tokenizer: Tokenizer, token_id: int) -> str:
    """The token as a string of its own; part of a character is written as its bytes."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(tokens: Iterable[ScoredToken], *, tokenizer: Tokenizer) -> dict[str, Any]:
    """The form of chat choices and chunks."""
    content = [
        {
            **_chat_entry(tokenizer, token.token_id, token.logprob or 0.0),
            "top_logprobs": [_chat_entry(tokenizer, t.token_id, t.logprob) for t in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _chat_entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": token_label(tokenizer, token_id),
        "logprob": finite_logprob(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def completion_logprobs(tokens: Iterable[ScoredToken], *, tokenizer: Tokenizer) -> dict[str, Any]:
    """The form of completion choices and chunks: parallel lists."""
    labels: list[str] = []
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token in tokens:
        label = token_label(tokenizer, token.token_id)
        labels.append(label)
        logprobs.append(None if token.logprob is None else finite_logprob(token.logprob))
        tops.append(_top_of(token, label=label, tokenizer=tokenizer))
        offsets.append(token.text_offset)
    return {
        "tokens": labels,
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _top_of(token: ScoredToken, *, label: str, tokenizer: Tokenizer) -> dict[str, float] | None:
    """Most likely tokens by label; the token itself is always among them."""
    if token.logprob is None:
        return None
    if not token.top:
        return {}
    top: dict[str, float] = {}
    for entry in token.top:
        # Two tokens may share a label; the first is the more likely one.
        top.setdefault(token_label(tokenizer, entry.token_id), finite_logprob(entry.logprob))
    top.setdefault(label, finite_logprob(token.logprob))
    return top
