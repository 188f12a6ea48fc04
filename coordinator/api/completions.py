"""POST /v1/completions."""

from dataclasses import dataclass
from typing import Any

from starlette.concurrency import run_in_threadpool

from coordinator.api.choice_text import ScoredToken, TextEvent
from coordinator.api.collect import FinishedChoice
from coordinator.api.errors import bad_request
from coordinator.api.limits import ApiLimits
from coordinator.api.logprobs import completion_logprobs
from coordinator.api.schemas import CompletionRequest
from coordinator.api.sequences import (
    Answer,
    EncodedPrompt,
    ScoreOptions,
    build_answer,
    find_model,
)
from coordinator.api.streaming import JsonObject
from coordinator.api.text import TextProvider
from coordinator.api.values import Prompt
from coordinator.generation import Engine
from coordinator.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this endpoint."""


async def completion_answer(
    body: CompletionRequest, *, engine: Engine, texts: TextProvider, limits: ApiLimits
) -> Answer:
    """Tokenize the prompts and lay out their choices."""
    echo = bool(body.echo)
    if body.token_limit == 0 and not echo:
        # Only who wants the prompt back, with its log-probabilities, asks for no token.
        raise bad_request("max_tokens must be at least 1 unless echo is true.", param="max_tokens")
    served = find_model(engine, body.model)
    tokenizer = texts.tokenizer(served.name)
    vocab_size = served.spec.vocab_size
    if len(body.prompt) > limits.max_choices:
        message = f"at most {limits.max_choices} prompts, got {len(body.prompt)}."
        raise bad_request(message, param="prompt")
    # In a thread: tokenizing long texts must not hold up the loop that the heartbeats are on.
    prompts = await run_in_threadpool(
        lambda: [
            _encode(prompt, tokenizer=tokenizer, vocab_size=vocab_size, echo=echo)
            for prompt in body.prompt
        ]
    )
    has_logprobs = body.logprobs is not None
    return build_answer(
        body,
        id_prefix="cmpl",
        served=served,
        tokenizer=tokenizer,
        prompts=prompts,
        prompt_param="prompt",
        default_max_tokens=DEFAULT_MAX_TOKENS,
        echo=echo,
        is_continuation=True,
        scores=ScoreOptions(
            logprobs=has_logprobs, num_top=body.logprobs or 0, prompt=echo and has_logprobs
        ),
        limits=limits,
    )


def _encode(prompt: Prompt, *, tokenizer: Tokenizer, vocab_size: int, echo: bool) -> EncodedPrompt:
    if isinstance(prompt, str):
        token_ids = tuple(tokenizer.encode(prompt, add_special_tokens=True))
        return EncodedPrompt(token_ids=token_ids, text=prompt if echo else "")
    for token_id in prompt:
        if not 0 <= token_id < vocab_size:
            message = f"token ids must be in [0, {vocab_size}), got {str(token_id)[:40]}."
            raise bad_request(message, param="prompt")
    text = tokenizer.decode(prompt, skip_special_tokens=True) if echo else ""
    return EncodedPrompt(token_ids=prompt, text=text)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionFormat:
    """OpenAI's `text_completion`, whole and in chunks."""

    has_logprobs: bool
    """Whether choices carry log-probabilities."""

    def whole(self, answer: Answer, choices: list[FinishedChoice], usage: JsonObject) -> JsonObject:
        """The body of an answer that is not streamed."""
        return {
            **_head(answer),
            "choices": [
                {
                    "index": choice.index,
                    "text": choice.text,
                    "logprobs": self._logprobs(answer, choice.scored),
                    "finish_reason": choice.finish_reason,
                }
                for choice in choices
            ],
            "usage": usage,
        }

    def opening_chunks(self, answer: Answer) -> list[JsonObject]:
        """None: the first chunk of a completion is text."""
        return []

    def text_chunk(self, answer: Answer, event: TextEvent) -> JsonObject:
        """A chunk with the event's text and scores, and no finish reason."""
        logprobs = self._logprobs(answer, event.scored)
        return _chunk(answer, event.index, text=event.text, logprobs=logprobs, finish_reason=None)

    def finish_chunk(self, answer: Answer, event: TextEvent) -> JsonObject:
        """The chunk that ends the event's choice."""
        return _chunk(
            answer, event.index, text="", logprobs=None, finish_reason=event.finish_reason
        )

    def usage_chunk(self, answer: Answer, usage: JsonObject) -> JsonObject:
        """The chunk without choices."""
        return {**_head(answer), "choices": [], "usage": usage}

    def _logprobs(
        self, answer: Answer, scored: list[ScoredToken] | tuple[ScoredToken, ...]
    ) -> JsonObject | None:
        if not self.has_logprobs:
            return None
        return completion_logprobs(scored, tokenizer=answer.tokenizer)


def _chunk(
    answer: Answer,
    index: int,
    *,
    text: str,
    logprobs: JsonObject | None,
    finish_reason: str | None,
) -> JsonObject:
    choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
    return {**_head(answer), "choices": [choice]}


def _head(answer: Answer) -> dict[str, Any]:
    return {
        "id": answer.id,
        "object": "text_completion",
        "created": answer.created,
        "model": answer.model,
    }
