"""An `Engine` that needs no mesh: a test double whose "model" is a function.

It keeps the whole contract of `coordinator.generation.Engine` (limits, seeds, stop tokens, scores,
errors, the end of work on close), so the API above it cannot tell. Draws depend on the seed and the
position only. What it counts (`num_active`, `num_drawn`) shows whether work ended.
"""

import asyncio
import math
import random
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.generation import (
    FinishReason,
    GeneratedToken,
    GenerationRequest,
    ServedModel,
)
from stagemesh.errors import NotReady, StagemeshError
from stagemesh.steps import SamplingParams, TargetScore, TokenLogprob

Script = Callable[[tuple[int, ...], int], Mapping[int, float]]
"""(all token ids so far, length of the prompt) -> log-probabilities; a missing id has none."""


def sure(token_id: int) -> dict[int, float]:
    """One possible token."""
    return {token_id: 0.0}


def alphabet() -> Script:
    """The next byte: "C" is followed by "D", and so on without end."""
    return lambda ids, _prompt_length: sure((ids[-1] + 1) % 256)


def fixed(token_ids: Sequence[int]) -> Script:
    """These tokens, whatever the prompt; the last one again and again."""
    return lambda ids, prompt_length: sure(
        token_ids[min(len(ids) - prompt_length, len(token_ids) - 1)]
    )


def flat(token_ids: Sequence[int]) -> Script:
    """All of these tokens are equally likely."""
    logprob = -math.log(len(token_ids))
    return lambda _ids, _prompt_length: dict.fromkeys(token_ids, logprob)


@dataclass(kw_only=True)
class ScriptedEngine:
    """Serves `served` by `script`."""

    served: list[ServedModel]
    script: Script
    vocab_size: int = 260
    delay_seconds: float = 0.0
    """Pause before each token."""
    fail_with: StagemeshError | None = None
    fail_at: int = 0
    """Number of the token before which `fail_with` is raised, once."""
    num_active: int = 0
    num_drawn: int = 0
    requests: list[GenerationRequest] = field(default_factory=list)

    def models(self) -> Sequence[ServedModel]:
        return self.served

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GeneratedToken, None]:
        served = next(model for model in self.served if model.name == request.model)
        if not served.is_ready:
            raise NotReady(f"{served.name} is not ready: {served.detail}")
        self.requests.append(request)
        self.num_active += 1
        try:
            async for token in self._tokens(request, served.max_context_tokens):
                yield token
        finally:
            self.num_active -= 1

    async def _tokens(
        self, request: GenerationRequest, context: int
    ) -> AsyncGenerator[GeneratedToken, None]:
        ids = request.prompt_token_ids
        scores = self._score(request) if request.score_prompt else ()
        if request.max_tokens == 0:
            yield GeneratedToken(token_id=None, finish_reason="length", prompt_scores=scores)
            return
        for count in range(1, request.max_tokens + 1):
            # Also with no delay others get their turn, as with a real mesh.
            await asyncio.sleep(self.delay_seconds)
            self._fail_if_due(count)
            logprobs = self.script(ids, len(request.prompt_token_ids))
            token_id = draw(logprobs, request.sampling, position=len(ids))
            self.num_drawn += 1
            ids = (*ids, token_id)
            finish: FinishReason | None = None
            if token_id in request.stop_token_ids:
                finish = "stop"
            elif count == request.max_tokens or len(ids) >= context:
                finish = "length"
            yield GeneratedToken(
                token_id=token_id,
                logprob=logprobs[token_id],
                top=self._top(logprobs, request.sampling),
                finish_reason=finish,
                prompt_scores=scores if count == 1 else (),
            )
            if finish is not None:
                return

    def _fail_if_due(self, count: int) -> None:
        if self.fail_with is not None and count == self.fail_at:
            error, self.fail_with = self.fail_with, None
            raise error

    def _top(
        self, logprobs: Mapping[int, float], sampling: SamplingParams
    ) -> tuple[TokenLogprob, ...]:
        ranked = sorted(range(self.vocab_size), key=lambda i: (-logprobs.get(i, -math.inf), i))
        return tuple(
            TokenLogprob(i, logprobs.get(i, -math.inf)) for i in ranked[: sampling.num_top_logprobs]
        )

    def _score(self, request: GenerationRequest) -> tuple[TargetScore | None, ...]:
        ids = request.prompt_token_ids
        scores: list[TargetScore | None] = [None]
        for position in range(1, len(ids)):
            logprobs = self.script(ids[:position], len(ids))
            # NaN for what cannot follow: the API must survive the worst that a model computes.
            score = logprobs.get(ids[position], math.nan)
            scores.append(TargetScore(score, self._top(logprobs, request.sampling)))
        return tuple(scores)


def draw(logprobs: Mapping[int, float], sampling: SamplingParams, *, position: int) -> int:
    """The most likely token, or one drawn by seed and position."""
    ids = sorted(logprobs, key=lambda i: (-logprobs[i], i))
    if sampling.temperature == 0.0:
        return ids[0]
    weights = [math.exp(logprobs[i] / sampling.temperature) for i in ids]
    source = random.Random(f"{sampling.seed}:{position}")
    return source.choices(ids, weights)[0]
