"""The response that generates: streamed or whole, and ended when its client goes away.

Both kinds wait for the first event before the status is sent, so a request that fails before its
first token (no node, full queue, failed stage) has the status and body of any other refused one.
"""

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, Protocol

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from coordinator.api.collect import FinishedChoice, collect, usage_object
from coordinator.api.limits import ApiLimits
from coordinator.api.runner import ChoiceEvents, running_choices
from coordinator.api.sequences import Answer
from coordinator.api.streaming import ChunkFormat, JsonObject, stream_events
from coordinator.generation import Engine

logger = logging.getLogger(__name__)


class AnswerFormat(ChunkFormat, Protocol):
    """How one endpoint spells its answers."""

    def whole(self, answer: Answer, choices: list[FinishedChoice], usage: JsonObject) -> JsonObject:
        """The body of an answer that is not streamed."""
        ...


class GenerationResponse(Response):
    """Generates while it is sent."""

    def __init__(
        self, answer: Answer, *, engine: Engine, form: AnswerFormat, limits: ApiLimits
    ) -> None:
        super().__init__()
        self._answer = answer
        self._engine = engine
        self._form = form
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or stop within a moment after the client left."""
        is_answered = await _unless_gone(self._generate(scope, receive, send), receive=receive)
        if not is_answered:
            logger.info("client left", extra={"answer_id": self._answer.id})

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with running_choices(self._answer, engine=self._engine) as events:
            if self._answer.is_stream:
                await self._stream(events, send=send)
                return
            choices = await collect(events, num_choices=len(self._answer.choices))
        usage = usage_object(
            num_prompt_tokens=self._answer.num_prompt_tokens,
            num_completion_tokens=sum(choice.num_tokens for choice in choices),
        )
        body = self._form.whole(self._answer, choices, usage)
        response = JSONResponse(body, headers={"x-request-id": self._answer.id})
        await response(scope, receive, send)

    async def _stream(self, events: ChoiceEvents, *, send: Send) -> None:
        first = await anext(events)
        await send(
            {
                "type": "http.response.start",
                "status": HTTPStatus.OK,
                "headers": [
                    (b"content-type", b"text/event-stream; charset=utf-8"),
                    (b"cache-control", b"no-cache"),
                    # Asks nginx not to gather events.
                    (b"x-accel-buffering", b"no"),
                    (b"x-request-id", self._answer.id.encode("ascii")),
                ],
            }
        )
        body = stream_events(self._answer, first=first, events=events, form=self._form)
        async with aclosing(body) as parts:
            async for part in parts:
                await self._send_part(part, send=send, more_body=True)
        await self._send_part(b"", send=send, more_body=False)

    async def _send_part(self, part: bytes, *, send: Send, more_body: bool) -> None:
        try:
            async with asyncio.timeout(self._limits.send_timeout_seconds):
                await send({"type": "http.response.body", "body": part, "more_body": more_body})
        except TimeoutError as error:
            raise StalledClientError(
                f"the client of {self._answer.id} took nothing for "
                f"{self._limits.send_timeout_seconds} s"
            ) from error


class StalledClientError(ConnectionError):
    """The client holds its connection open and reads nothing; its request is given up."""


async def _unless_gone(work: Coroutine[Any, Any, None], *, receive: Receive) -> bool:
    """Run `work`; end it when the client disconnects.

    Returns:
        Whether the work came to its end, rather than the connection.
    """
    running = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({running, gone}, return_when=asyncio.FIRST_COMPLETED)
        is_done = running.done()
    finally:
        running.cancel()
        gone.cancel()
        await asyncio.gather(running, gone, return_exceptions=True)
    if is_done:
        running.result()
    return is_done


async def _disconnected(receive: Receive) -> None:
    # The body has been read whole, so the next messages can only say that the client left.
    while (await receive())["type"] != "http.disconnect":
        pass
