"""POST /v1/chat/completions."""

from dataclasses import dataclass
from typing import Any

from starlette.concurrency import run_in_threadpool

from coordinator.api.choice_text import ScoredToken, TextEvent
from coordinator.api.collect import FinishedChoice
from coordinator.api.limits import ApiLimits
from coordinator.api.logprobs import chat_logprobs
from coordinator.api.schemas import ChatMessage, ChatRequest
from coordinator.api.sequences import (
    Answer,
    EncodedPrompt,
    ScoreOptions,
    build_answer,
    find_model,
)
from coordinator.api.streaming import JsonObject
from coordinator.api.text import TextProvider
from coordinator.generation import Engine


async def chat_answer(
    body: ChatRequest, *, engine: Engine, texts: TextProvider, limits: ApiLimits
) -> Answer:
    """Render and tokenize the conversation, and lay out its choices."""
    served = find_model(engine, body.model)
    # In a thread: a template runs in another process and may take long, and so may the
    # tokenizer with a long text; neither may hold up the loop that the nodes' heartbeats are on.
    prompt = await run_in_threadpool(_encode, body.messages, model_name=served.name, texts=texts)
    return build_answer(
        body,
        id_prefix="chatcmpl",
        served=served,
        tokenizer=texts.tokenizer(served.name),
        prompts=[prompt],
        prompt_param="messages",
        default_max_tokens=None,
        echo=False,
        is_continuation=False,
        scores=ScoreOptions(logprobs=bool(body.logprobs), num_top=body.top_logprobs or 0),
        limits=limits,
    )


def _encode(messages: list[ChatMessage], *, model_name: str, texts: TextProvider) -> EncodedPrompt:
    template = texts.chat_template(model_name)
    rendered = template.render([message.for_template() for message in messages])
    # The template writes BOS where the model wants one.
    token_ids = texts.tokenizer(model_name).encode(rendered, add_special_tokens=False)
    return EncodedPrompt(token_ids=tuple(token_ids), text="")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """OpenAI's `chat.completion` and `chat.completion.chunk`."""

    has_logprobs: bool
    """Whether choices carry log-probabilities."""

    def whole(self, answer: Answer, choices: list[FinishedChoice], usage: JsonObject) -> JsonObject:
        """The body of an answer that is not streamed."""
        return {
            **_head(answer, kind="chat.completion"),
            "choices": [
                {
                    "index": choice.index,
                    "message": {"role": "assistant", "content": choice.text, "refusal": None},
                    "logprobs": self._logprobs(answer, choice.scored),
                    "finish_reason": choice.finish_reason,
                }
                for choice in choices
            ],
            "usage": usage,
        }

    def opening_chunks(self, answer: Answer) -> list[JsonObject]:
        """The chunk with the role, for each choice."""
        return [
            self._chunk(answer, choice.index, {"role": "assistant", "content": ""})
            for choice in answer.choices
        ]

    def text_chunk(self, answer: Answer, event: TextEvent) -> JsonObject:
        """A chunk with the event's text and scores, and no finish reason."""
        logprobs = self._logprobs(answer, event.scored)
        return self._chunk(answer, event.index, {"content": event.text}, logprobs=logprobs)

    def finish_chunk(self, answer: Answer, event: TextEvent) -> JsonObject:
        """The chunk that ends the event's choice."""
        return self._chunk(answer, event.index, {}, finish_reason=event.finish_reason)

    def usage_chunk(self, answer: Answer, usage: JsonObject) -> JsonObject:
        """The chunk without choices."""
        return {**_head(answer, kind="chat.completion.chunk"), "choices": [], "usage": usage}

    def _chunk(
        self,
        answer: Answer,
        index: int,
        delta: JsonObject,
        *,
        logprobs: JsonObject | None = None,
        finish_reason: str | None = None,
    ) -> JsonObject:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return {**_head(answer, kind="chat.completion.chunk"), "choices": [choice]}

    def _logprobs(
        self, answer: Answer, scored: list[ScoredToken] | tuple[ScoredToken, ...]
    ) -> JsonObject | None:
        if not self.has_logprobs:
            return None
        return chat_logprobs(scored, tokenizer=answer.tokenizer)


def _head(answer: Answer, *, kind: str) -> dict[str, Any]:
    return {"id": answer.id, "object": kind, "created": answer.created, "model": answer.model}
