"""A step before, during and after its way through the pipeline, as the scheduler sees it."""

from dataclasses import dataclass

from coordinator.sequences import SequenceState
from stagemesh.errors import ProtocolError
from stagemesh.steps import Segment, Step, StepResult


class StepDraft:
    """A step while it is composed: `room` tokens may still go in."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.segments: list[Segment] = []
        self.token_ids: list[int] = []

    def take(self, sequence: SequenceState, max_tokens: int) -> int:
        """Add the sequence's next segment; returns its length."""
        segment, token_ids = sequence.take_segment(min(max_tokens, self.room))
        self.segments.append(segment)
        self.token_ids.extend(token_ids)
        self.room -= segment.num_tokens
        return segment.num_tokens


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step that was handed out and not completed."""

    step: Step
    num_prefill_tokens: int
    """Of its tokens, those of prefill chunks."""


def check_result(step: Step, result: StepResult) -> None:
    """Refuse a result whose tokens do not answer the step's segments one by one."""
    wanted = [segment.session_id for segment in step.segments]
    got = [sampled.session_id for sampled in result.tokens]
    if wanted != got:
        raise ProtocolError(f"step {step.step_id} has sessions {wanted}, its result {got}")
    for segment, sampled in zip(step.segments, result.tokens, strict=True):
        if (segment.sampling is not None) != (sampled.token_id is not None):
            raise ProtocolError(
                f"step {step.step_id}, session {segment.session_id}: a token was "
                f"{'not ' if segment.sampling is None else ''}asked for, but token_id is "
                f"{sampled.token_id}"
            )
        if len(sampled.target_scores) != len(segment.target_token_ids):
            raise ProtocolError(
                f"step {step.step_id}, session {segment.session_id}: "
                f"{len(segment.target_token_ids)} targets, {len(sampled.target_scores)} scores"
            )
