"""Writes an answer as server-sent events, in exactly OpenAI's chunk forms.

Order of the chunks: one opening per choice where the endpoint has one; text as it comes; for each
choice one chunk, without text, that has its finish reason; the usage chunk where asked for; then
`[DONE]`. A failure on the way is one `{"error": ...}` event, and then nothing: neither a finish
reason nor `[DONE]`, so no client can take a broken answer for a whole one.
"""

import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Protocol

from coordinator.api.choice_text import TextEvent
from coordinator.api.collect import usage_object
from coordinator.api.errors import http_error_of
from coordinator.api.runner import ChoiceEvents
from coordinator.api.sequences import Answer

logger = logging.getLogger(__name__)

JsonObject = dict[str, Any]

DONE_EVENT = b"data: [DONE]\n\n"


class ChunkFormat(Protocol):
    """How one endpoint spells its chunks."""

    def opening_chunks(self, answer: Answer) -> list[JsonObject]:
        """Chunks before any text."""
        ...

    def text_chunk(self, answer: Answer, event: TextEvent) -> JsonObject:
        """A chunk with the event's text and scores, and no finish reason."""
        ...

    def finish_chunk(self, answer: Answer, event: TextEvent) -> JsonObject:
        """The chunk that ends the event's choice."""
        ...

    def usage_chunk(self, answer: Answer, usage: JsonObject) -> JsonObject:
        """The chunk without choices."""
        ...


def server_sent_event(data: JsonObject) -> bytes:
    """One event on one line."""
    # ASCII only: some clients also split lines at U+0085, U+2028 and U+2029.
    text = json.dumps(data, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return f"data: {text}\n\n".encode("ascii")


async def stream_events(
    answer: Answer, *, first: TextEvent, events: ChoiceEvents, form: ChunkFormat
) -> AsyncGenerator[bytes, None]:
    """The body of the response: `first` and then `events`, as server-sent events."""
    try:
        async for chunk in _chunks(answer, first=first, events=events, form=form):
            if answer.has_stream_usage:
                chunk.setdefault("usage", None)
            yield server_sent_event(chunk)
    except Exception as error:
        # The root of a response that has begun: its status is sent, so this is the only place
        # left to tell the client. Nothing is swallowed: the log has the traceback.
        logger.warning("stream failed", exc_info=error, extra={"answer_id": answer.id})
        yield server_sent_event(http_error_of(error).body())
    else:
        yield DONE_EVENT


async def _chunks(
    answer: Answer, *, first: TextEvent, events: ChoiceEvents, form: ChunkFormat
) -> AsyncIterator[JsonObject]:
    for chunk in form.opening_chunks(answer):
        yield chunk
    num_tokens = 0
    event: TextEvent | None = first
    while event is not None:
        num_tokens += event.num_tokens
        if event.text or event.scored:
            yield form.text_chunk(answer, event)
        if event.finish_reason is not None:
            yield form.finish_chunk(answer, event)
        event = await anext(events, None)
    if answer.has_stream_usage:
        usage = usage_object(
            num_prompt_tokens=answer.num_prompt_tokens, num_completion_tokens=num_tokens
        )
        yield form.usage_chunk(answer, usage)
