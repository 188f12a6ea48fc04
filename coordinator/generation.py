"""The seam between the HTTP API and the engine that runs requests on the mesh.

Above it everything is text; below it everything is token ids. The API turns a request into a
`GenerationRequest`, iterates over what `Engine.generate` yields, and closes the iterator when the
client goes away, which ends the request's work on every node.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from stagemesh.model_spec import ModelSpec
from stagemesh.steps import SamplingParams, TargetScore, TokenLogprob

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One sequence to generate; a request with n choices is n of these."""

    request_id: str
    """For logs and events; shared by the choices of one API request."""
    model: str
    """Name of a served model."""
    prompt_token_ids: tuple[int, ...]
    """At least one token."""
    max_tokens: int
    """Limit of generated tokens; the context limit may end it sooner (finish_reason "length")."""
    sampling: SamplingParams
    """How tokens are drawn. The seed is always set: the API draws one where a client gave none."""
    stop_token_ids: frozenset[int] = frozenset()
    """A drawn token of these ends the sequence (finish_reason "stop")."""
    score_prompt: bool = False
    """Also return the log-probabilities of the prompt's tokens (echo with logprobs)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedToken:
    """One event of a sequence."""

    token_id: int | None
    """The token; None only in the event that carries `prompt_scores` of a request for no token."""
    logprob: float = 0.0
    """Its log-probability when `sampling.logprobs`."""
    top: tuple[TokenLogprob, ...] = ()
    """`sampling.num_top_logprobs` most likely tokens."""
    finish_reason: FinishReason | None = None
    """Set in the last event, and only there."""
    prompt_scores: tuple[TargetScore | None, ...] = ()
    """In the first event of a request with `score_prompt`: one per prompt token, first None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model that the engine serves or is about to serve."""

    name: str
    spec: ModelSpec
    created: int
    """Unix time in seconds."""
    max_context_tokens: int
    """Prompt plus generated tokens of one sequence."""
    is_ready: bool
    detail: str
    """Why it is not ready, for a person."""


class Engine(Protocol):
    """Runs token sequences on the mesh."""

    def models(self) -> Sequence[ServedModel]:
        """All models of the deployments, ready or not."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GeneratedToken, None]:
        """Generate one sequence, token by token.

        Closing the generator ends the sequence and frees its KV cache on every stage.

        Raises:
            NotReady: the model is not loaded on enough nodes now; the text names what is missing.
            CapacityExceeded: the prompt fits neither context nor KV cache, or the queue is full.
            StageFailed, PeerLost: a stage failed while the sequence ran.
        """
        ...
