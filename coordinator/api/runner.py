"""Runs the choices of one answer side by side and merges their text events.

    engine.generate(choice 0) -> ChoiceText --+
    engine.generate(choice 1) -> ChoiceText --+--> one bounded queue --> ChoiceEvents
    engine.generate(choice n) -> ChoiceText --+

The reader sets the pace: when it stalls, the queue fills and the generators wait. When it leaves,
however it leaves, every generator is closed, which frees its work on the nodes.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from coordinator.api.choice_text import ChoiceText, TextEvent
from coordinator.api.sequences import Answer, Choice
from coordinator.generation import Engine
from coordinator.text.tokenizer import Tokenizer

_MAX_QUEUED_EVENTS = 64


@dataclass(frozen=True, slots=True)
class _Failure:
    """An exception on its way to the reader, with its traceback."""

    error: Exception


_Queue = asyncio.Queue[TextEvent | _Failure]


class ChoiceEvents:
    """The events of all choices in the order in which they came; ends after the last finish."""

    def __init__(self, queue: _Queue, *, num_choices: int) -> None:
        self._queue = queue
        self._num_open = num_choices

    def __aiter__(self) -> "ChoiceEvents":
        return self

    async def __anext__(self) -> TextEvent:
        if self._num_open == 0:
            raise StopAsyncIteration
        event = await self._queue.get()
        if isinstance(event, _Failure):
            raise event.error
        if event.finish_reason is not None:
            self._num_open -= 1
        return event


@asynccontextmanager
async def running_choices(answer: Answer, *, engine: Engine) -> AsyncIterator[ChoiceEvents]:
    """Start all choices; on leaving, end those that still run and wait for their end."""
    queue: _Queue = asyncio.Queue(maxsize=_MAX_QUEUED_EVENTS)
    # A TaskGroup would wrap what the reader raises (a failed choice, a lost client) in an
    # ExceptionGroup; the tasks themselves raise nothing, so there is nothing for it to collect.
    tasks = [
        asyncio.create_task(
            _run_choice(choice, engine=engine, tokenizer=answer.tokenizer, queue=queue),
            name=f"{answer.id} choice {choice.index}",
        )
        for choice in answer.choices
    ]
    try:
        yield ChoiceEvents(queue, num_choices=len(tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run_choice(
    choice: Choice, *, engine: Engine, tokenizer: Tokenizer, queue: _Queue
) -> None:
    try:
        await _generate(choice, engine=engine, tokenizer=tokenizer, queue=queue)
    except Exception as error:
        # The root of a task: the reader raises it, with its traceback, after the text before it.
        await queue.put(_Failure(error))


async def _generate(choice: Choice, *, engine: Engine, tokenizer: Tokenizer, queue: _Queue) -> None:
    text = ChoiceText(choice, tokenizer=tokenizer)
    if choice.request.max_tokens == 0 and not choice.request.score_prompt:
        # Nothing is asked of the model: only the prompt goes back.
        await queue.put(text.opening(None))
        await queue.put(TextEvent(index=choice.index, finish_reason="length"))
        return
    is_opened = not choice.echo
    async with aclosing(engine.generate(choice.request)) as tokens:
        async for token in tokens:
            if not is_opened:
                await queue.put(text.opening(token))
                is_opened = True
            event = text.feed(token)
            await queue.put(event)
            if event.finish_reason is not None:
                return
    raise RuntimeError(f"the engine ended choice {choice.index} without a finish reason")
