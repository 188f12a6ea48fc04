"""Gathers the text events of an answer that is not streamed."""

from collections.abc import AsyncIterable
from dataclasses import dataclass, field
from typing import Any

from coordinator.api.choice_text import ScoredToken, TextEvent
from coordinator.generation import FinishReason


@dataclass(slots=True, kw_only=True)
class FinishedChoice:
    """One choice as a whole."""

    index: int
    """Its index in the answer."""
    text: str = ""
    """All of its text."""
    scored: list[ScoredToken] = field(default_factory=list)
    """Scores of all of its tokens, where asked for."""
    num_tokens: int = 0
    """Generated tokens, the ending one included."""
    finish_reason: FinishReason | None = None
    """Why it ended."""


async def collect(events: AsyncIterable[TextEvent], *, num_choices: int) -> list[FinishedChoice]:
    """Read all events; the result is ordered by index."""
    choices = [FinishedChoice(index=index) for index in range(num_choices)]
    texts: list[list[str]] = [[] for _ in choices]
    async for event in events:
        choice = choices[event.index]
        texts[event.index].append(event.text)
        choice.scored.extend(event.scored)
        choice.num_tokens += event.num_tokens
        choice.finish_reason = event.finish_reason or choice.finish_reason
    for choice, pieces in zip(choices, texts, strict=True):
        choice.text = "".join(pieces)
    return choices


def usage_object(*, num_prompt_tokens: int, num_completion_tokens: int) -> dict[str, Any]:
    """OpenAI's `usage`, the same whether streamed or not."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
    }
