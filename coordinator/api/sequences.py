"""From a validated request to the sequences that answer it.

Shared by both endpoints: they differ in how a prompt becomes token ids and in how text becomes
JSON, not in what happens between.
"""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.api.errors import bad_request, model_not_found
from coordinator.api.limits import ApiLimits
from coordinator.api.schemas import GenerationFields
from coordinator.generation import Engine, GenerationRequest, ServedModel
from coordinator.text.tokenizer import Tokenizer
from stagemesh.checkpoint.generation_settings import SamplingDefaults, sampling_defaults
from stagemesh.steps import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """One prompt as token ids."""

    token_ids: tuple[int, ...]
    """At least one."""
    text: str
    """What `echo` gives back; empty without echo."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One sequence of the answer."""

    index: int
    """The choice's index in the answer: prompt number times n plus the number within the prompt."""
    request: GenerationRequest
    """What the engine is asked for."""
    echo: bool
    """Whether the text begins with the prompt's."""
    prompt_text: str
    """The prompt's text, where it is echoed."""
    is_continuation: bool
    """Whether the text goes on where the prompt ends, rather than being a turn of its own."""
    stop_strings: tuple[str, ...]
    """Text that ends the sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Everything about an answer that is known before it is generated."""

    id: str
    """OpenAI's id of the answer; also the engine's request id."""
    model: str
    """Name of the served model."""
    created: int
    """Unix time in seconds."""
    tokenizer: Tokenizer
    """Of the model."""
    choices: tuple[Choice, ...]
    """All of them, by index."""
    num_prompt_tokens: int
    """Sum over the prompts; a prompt with n choices counts once."""
    is_stream: bool
    """Server-sent events or one object."""
    has_stream_usage: bool
    """Whether the stream ends with a usage chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOptions:
    """Which log-probabilities a request wants."""

    logprobs: bool = False
    """Those of the generated tokens."""
    num_top: int = 0
    """That many alternatives at each position."""
    prompt: bool = False
    """Those of the prompt's tokens too."""


def find_model(engine: Engine, name: str) -> ServedModel:
    """The served model of that name.

    Raises:
        RequestError: there is none (404).
    """
    models = engine.models()
    for model in models:
        if model.name == name:
            return model
    raise model_not_found(name, served=[model.name for model in models])


def build_answer(
    fields: GenerationFields,
    *,
    id_prefix: str,
    served: ServedModel,
    tokenizer: Tokenizer,
    prompts: Sequence[EncodedPrompt],
    prompt_param: str,
    default_max_tokens: int | None,
    echo: bool,
    is_continuation: bool,
    scores: ScoreOptions,
    limits: ApiLimits,
) -> Answer:
    """Check the prompts against the model and lay out the choices.

    Raises:
        RequestError: a prompt does not fit, or there are too many choices.
    """
    num_choices = len(prompts) * fields.num_choices
    if num_choices > limits.max_choices:
        message = f"prompts times n may be at most {limits.max_choices}, got {num_choices}."
        raise bad_request(message, param="n" if fields.num_choices > 1 else prompt_param)
    answer_id = f"{id_prefix}-{secrets.token_hex(12)}"
    defaults = sampling_defaults(served.spec.generation_defaults)
    choices: list[Choice] = []
    for prompt in prompts:
        max_tokens = _token_budget(
            fields, prompt, served=served, default=default_max_tokens, param=prompt_param
        )
        for number in range(fields.num_choices):
            request = GenerationRequest(
                request_id=answer_id,
                model=served.name,
                prompt_token_ids=prompt.token_ids,
                max_tokens=max_tokens,
                sampling=_sampling(fields, defaults, number=number, scores=scores),
                stop_token_ids=frozenset(served.spec.eos_token_ids) | tokenizer.eos_token_ids,
                score_prompt=scores.prompt,
            )
            choices.append(
                Choice(
                    index=len(choices),
                    request=request,
                    echo=echo,
                    prompt_text=prompt.text,
                    is_continuation=is_continuation,
                    stop_strings=fields.stop,
                )
            )
    return Answer(
        id=answer_id,
        model=served.name,
        created=int(time.time()),
        tokenizer=tokenizer,
        choices=tuple(choices),
        num_prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts),
        is_stream=bool(fields.stream),
        has_stream_usage=fields.wants_stream_usage,
    )


def _token_budget(
    fields: GenerationFields,
    prompt: EncodedPrompt,
    *,
    served: ServedModel,
    default: int | None,
    param: str,
) -> int:
    """How many tokens to generate: what was asked, at most what the context has room for."""
    length, context = len(prompt.token_ids), served.max_context_tokens
    if length == 0:
        raise bad_request("the prompt has no token.", param=param)
    asked = default if fields.token_limit is None else fields.token_limit
    room = context - length
    # A request for no token only scores its prompt, which may fill the context.
    if room < (0 if asked == 0 else 1):
        message = (
            f"This model's maximum context length is {context} tokens, and your prompt has "
            f"{length} tokens, which leaves no room to generate. Shorten the prompt."
        )
        raise bad_request(message, param=param, code="context_length_exceeded")
    return room if asked is None else min(asked, room)


def _sampling(
    fields: GenerationFields, defaults: SamplingDefaults, *, number: int, scores: ScoreOptions
) -> SamplingParams:
    # Choice i of a prompt draws with seed + i, so n choices differ and each can be had again
    # alone. The prompts of one request share seeds: a row of a batch equals its own request.
    seed = secrets.randbits(64) if fields.seed is None else (fields.seed + number) % 2**64
    return SamplingParams(
        temperature=defaults.temperature if fields.temperature is None else fields.temperature,
        top_p=defaults.top_p if fields.top_p is None else fields.top_p,
        top_k=defaults.top_k if fields.top_k is None else fields.top_k,
        min_p=defaults.min_p if fields.min_p is None else fields.min_p,
        seed=seed,
        logprobs=scores.logprobs,
        num_top_logprobs=scores.num_top,
    )
