"""One sequence on its way through the pipeline, and the events it yields. Plain state, no policy.

    waiting --admitted--> prefilling --last chunk's token--> decoding --stop, length--> ended
                              ^                                  |
                              `---- restart (a node died) -------'

Tokens are known (prompt, then accepted ones) or not; `num_sent` of the known ones are in steps
already. A segment that ends the known tokens asks for the next one. All accepted tokens stay here,
so after a restart the same prefill rebuilds the cache of prompt and answer, and the answer goes on.
"""

from dataclasses import dataclass, field

from coordinator.generation import FinishReason, GeneratedToken, GenerationRequest
from stagemesh.steps import SampledToken, Segment, StepFailure, TargetScore


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceEvent:
    """Something that the caller of a sequence must hear: a token or the failure that ended it."""

    session_id: int
    """The sequence."""
    token: GeneratedToken | None = None
    """The next token; `token.finish_reason` is set in the last one."""
    failure: StepFailure | None = None
    """Why the sequence is lost; then there is no token and nothing follows."""


@dataclass(slots=True, kw_only=True, eq=False)
class SequenceState:
    """A sequence that waits or runs; equal only to itself."""

    session_id: int
    request: GenerationRequest
    limit_tokens: int
    """Prompt plus generated tokens, never passed; also what is reserved in the KV cache."""
    token_ids: list[int] = field(default_factory=list)
    """Known tokens: the prompt, then the accepted ones."""
    num_sent: int = 0
    """Known tokens that are in steps: the position of the next segment."""
    num_steps_in_flight: int = 0
    """Steps that carry a segment of this sequence now."""
    is_decoding: bool = False
    """All known tokens but the newest are in steps, one token follows another."""
    is_ended: bool = False
    """Cancelled or failed: its results are ignored, its cache is freed after its last step."""
    prompt_scores: list[TargetScore | None] = field(default_factory=list)
    """Scores of the prompt's tokens by position, until they are handed out."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_token_ids)
        if self.request.score_prompt:
            self.prompt_scores = [None] * self.num_prompt_tokens

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_unsent(self) -> int:
        """Known tokens that no step has carried."""
        return len(self.token_ids) - self.num_sent

    @property
    def accepted_token_ids(self) -> tuple[int, ...]:
        """The generated tokens so far."""
        return tuple(self.token_ids[self.num_prompt_tokens :])

    def take_segment(self, max_tokens: int) -> tuple[Segment, list[int]]:
        """The next segment of at most so many tokens, which counts as sent, and its tokens."""
        start = self.num_sent
        end = min(len(self.token_ids), start + max_tokens)
        ends_known = end == len(self.token_ids)
        segment = Segment(
            session_id=self.session_id,
            start_position=start,
            num_tokens=end - start,
            sampling=self.request.sampling if ends_known and self.request.max_tokens > 0 else None,
            target_token_ids=self._targets(start, end),
            num_target_top_logprobs=(
                self.request.sampling.num_top_logprobs if self.prompt_scores else 0
            ),
        )
        self.num_sent = end
        self.num_steps_in_flight += 1
        return segment, self.token_ids[start:end]

    def accept(self, segment: Segment, result: SampledToken) -> GeneratedToken | None:
        """Take in what a segment yielded; returns what the caller must hear, if anything."""
        if segment.target_token_ids:
            self._store_scores(segment.start_position, result.target_scores)
        if segment.sampling is None:
            is_last = segment.start_position + segment.num_tokens == self.num_prompt_tokens
            if self.request.max_tokens > 0 or not is_last:
                return None
            return GeneratedToken(
                token_id=None, finish_reason="length", prompt_scores=self._hand_out_scores()
            )
        assert result.token_id is not None, "checked by the scheduler"
        self.token_ids.append(result.token_id)
        self.is_decoding = True
        return GeneratedToken(
            token_id=result.token_id,
            logprob=result.logprob,
            top=result.top,
            finish_reason=self._finish_reason(result.token_id),
            prompt_scores=self._hand_out_scores(),
        )

    def restart(self) -> None:
        """Nothing is in any cache any more: prefill all known tokens again."""
        self.num_sent = 0
        self.num_steps_in_flight = 0
        self.is_decoding = False

    def _targets(self, start: int, end: int) -> tuple[int, ...]:
        """The successor of each token; the last prompt token's is not known: it stands for itself
        and its score is dropped, since a segment has a target for each token or for none."""
        if not self.prompt_scores:
            return ()
        successors = self.token_ids[start + 1 : end + 1]
        return tuple(successors) + (self.token_ids[-1],) * (end - start - len(successors))

    def _store_scores(self, start: int, scores: tuple[TargetScore, ...]) -> None:
        for position, score in enumerate(scores, start=start + 1):
            if position < len(self.prompt_scores):
                self.prompt_scores[position] = score

    def _hand_out_scores(self) -> tuple[TargetScore | None, ...]:
        scores, self.prompt_scores = tuple(self.prompt_scores), []
        return scores

    def _finish_reason(self, token_id: int) -> FinishReason | None:
        if token_id in self.request.stop_token_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self.limit_tokens else None
