"""The bodies of `POST /v1/chat/completions` and `POST /v1/completions`.

Types are strict: `"5"` is no number and `1` no boolean. Null stands for "not given" wherever OpenAI
allows it. Fields that we know and do not support are refused by name unless their value changes
nothing; fields that we do not know are ignored (see `coordinator.api.body`).
"""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field, PlainValidator, field_validator
from pydantic_core.core_schema import ValidationInfo

from coordinator.api.values import (
    Prompt,
    check_response_format,
    parse_content,
    parse_prompts,
    parse_role,
    parse_stop,
    refuse_tool_choice,
    refuse_unless_empty,
    refuse_unless_zero,
)

Unused = Annotated[None, PlainValidator(refuse_unless_empty)]
UnusedPenalty = Annotated[None, PlainValidator(refuse_unless_zero)]

MAX_TOP_LOGPROBS = 20
MAX_TEMPERATURE = 2.0


class _Schema(BaseModel):
    # "allow" keeps unknown fields, so that they can be named in the debug log.
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class StreamOptions(_Schema):
    """How a stream is written."""

    include_usage: bool | None = None


class GenerationFields(_Schema):
    """What both endpoints share."""

    model: str = Field(min_length=1)
    temperature: float | None = Field(default=None, ge=0.0, le=MAX_TEMPERATURE)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    top_k: int | None = Field(default=None, ge=0, lt=2**31)
    min_p: float | None = Field(default=None, ge=0.0, le=1.0)
    n: int | None = Field(default=None, ge=1)
    # Both readings of 64 bits: OpenAI's field is signed, ours unsigned.
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stop: Annotated[tuple[str, ...], PlainValidator(parse_stop)] = ()
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=0)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    presence_penalty: UnusedPenalty = None
    frequency_penalty: UnusedPenalty = None
    logit_bias: Unused = None
    response_format: Annotated[None, PlainValidator(check_response_format)] = None

    @property
    def token_limit(self) -> int | None:
        """The asked limit of generated tokens; the newer field wins."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens

    @property
    def num_choices(self) -> int:
        """Choices for each prompt."""
        return 1 if self.n is None else self.n

    @property
    def wants_stream_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class ChatMessage(_Schema):
    """One turn. `name` is ignored: the templates that we run have no place for it."""

    role: Annotated[str, PlainValidator(parse_role)]
    content: str | None = Field(default=None, validate_default=True)
    tool_calls: Unused = None
    function_call: Unused = None

    @field_validator("content", mode="plain")
    @classmethod
    def _read_content(cls, value: Any, info: ValidationInfo) -> str:
        # A wrong role is reported by its own field; which one matters only for null.
        return parse_content(value, role=info.data.get("role", "assistant"))

    def for_template(self) -> dict[str, str]:
        """The turn as chat templates take it."""
        return {"role": self.role, "content": self.content or ""}


class ChatRequest(GenerationFields):
    """Body of `POST /v1/chat/completions`."""

    # A list of a million wrong messages is one error, not a million.
    messages: Annotated[list[ChatMessage], Field(min_length=1), FailFast()]
    max_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: Unused = None
    functions: Unused = None
    tool_choice: Annotated[None, PlainValidator(refuse_tool_choice)] = None
    function_call: Annotated[None, PlainValidator(refuse_tool_choice)] = None

    @field_validator("top_logprobs")
    @classmethod
    def _needs_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and not info.data.get("logprobs"):
            raise ValueError("needs logprobs set to true.")
        return value


class CompletionRequest(GenerationFields):
    """Body of `POST /v1/completions`."""

    prompt: Annotated[tuple[Prompt, ...], PlainValidator(parse_prompts)]
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    best_of: int | None = Field(default=None, ge=1)
    suffix: Unused = None

    @field_validator("best_of")
    @classmethod
    def _no_search(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value != (info.data.get("n") or 1):
            raise ValueError("unsupported unless it equals n: every choice is returned.")
        return value
