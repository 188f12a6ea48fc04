"""What the pipeline computes next: continuous batching as pure code. State in, next step out.

The engine calls `next_step` until it returns None, sends what it gets to the first stage, and hands
each result to `complete`. Nothing here waits, sends or reads a clock; equal calls give equal steps.

The rules, with p stages:

- Decodes first. Each running sequence has at most one decode in flight, since its next token is not
  known before. A step takes at most ceil(decoding sequences / p) of those that are ready, so the
  decodes spread over about p steps and every stage works; it never waits for others to be ready.
- Then prefill, first come first served, as chunks within the step's budget. Chunks of one prompt
  follow each other in flight. While sequences decode, the chunks in flight hold no more than one
  step's budget of tokens in total, spread over p steps: so a long prompt delays a decode by at most
  one chunk.
- Admission is first come, first served by KV room, and a sequence reserves its full length
  (`coordinator.kv_budget`): none overtakes, none is preempted, each one ends.
- A sequence that ended is released on the next step, which frees its cache on each stage before it
  computes; when nothing is in flight a step without segments carries the release at once.
"""

from collections import deque

from coordinator.generation import GenerationRequest
from coordinator.kv_budget import KVBudget
from coordinator.scheduler_config import SchedulerConfig
from coordinator.sequences import SequenceEvent, SequenceState
from coordinator.step_draft import StepDraft, StepInFlight, check_result
from stagemesh.errors import CapacityExceeded, ProtocolError
from stagemesh.steps import Step, StepResult


class Scheduler:
    """The sequences of one deployment and the steps they travel in."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._budget = KVBudget(capacity_tokens=config.kv_capacity_tokens)
        self._waiting: deque[SequenceState] = deque()
        # Admitted and not released, in the order of admission.
        self._running: dict[int, SequenceState] = {}
        self._prefilling: deque[SequenceState] = deque()
        # Decodes whose token is known and not sent, the one that waits longest first.
        self._ready: deque[SequenceState] = deque()
        self._releases: deque[int] = deque()
        self._in_flight: dict[int, StepInFlight] = {}
        self._next_session_id = 1
        self._next_step_id = 1
        # Results of steps before this one belong to a pipeline that is gone.
        self._oldest_step_id = 1

    @property
    def num_running(self) -> int:
        """Admitted sequences, including ended ones whose last step is still in flight."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for KV room."""
        return len(self._waiting)

    @property
    def kv_reserved_tokens(self) -> int:
        """KV room that running sequences hold, in tokens."""
        return self._budget.reserved_tokens

    @property
    def kv_used_tokens(self) -> int:
        """Tokens of running sequences that steps have put in the caches."""
        return sum(sequence.num_sent for sequence in self._running.values())

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do: no sequence, no step, no cache to free."""
        return not (self._waiting or self._running or self._in_flight or self._releases)

    def in_flight_steps(self) -> tuple[Step, ...]:
        """The steps that were handed out and not completed, oldest first."""
        return tuple(entry.step for entry in self._in_flight.values())

    def accepted_token_ids(self, session_id: int) -> tuple[int, ...]:
        """Generated tokens so far of a running sequence; empty for any other."""
        sequence = self._running.get(session_id)
        return () if sequence is None else sequence.accepted_token_ids

    def add(self, request: GenerationRequest) -> int:
        """Queue a sequence and return its session id.

        Raises:
            ConfigError: the request is malformed.
            CapacityExceeded: it can never fit the context or the KV cache, or the queue is full.
        """
        limit_tokens = self.config.limit_tokens(request)
        self._admit()
        if len(self._waiting) >= self.config.max_waiting:
            raise CapacityExceeded(
                f"{len(self._waiting)} sequences wait already (max_waiting "
                f"{self.config.max_waiting}); try again later"
            )
        sequence = SequenceState(
            session_id=self._next_session_id, request=request, limit_tokens=limit_tokens
        )
        self._next_session_id += 1
        self._waiting.append(sequence)
        self._admit()
        return sequence.session_id

    def cancel(self, session_id: int) -> bool:
        """End a sequence: no event of it follows. False when it is not here (any more)."""
        for sequence in self._waiting:
            if sequence.session_id == session_id:
                self._waiting.remove(sequence)
                return True
        running = self._running.get(session_id)
        if running is None or running.is_ended:
            return False
        self._end(running)
        return True

    def next_step(self) -> Step | None:
        """The next step to send, or None when nothing can be sent now."""
        if len(self._in_flight) >= self.config.steps_in_flight_limit:
            return None
        self._admit()
        draft = StepDraft(self.config.max_step_tokens)
        num_decoding = self._num_decoding()
        self._take_decodes(draft, num_decoding)
        num_prefill_tokens = self._take_prefills(draft, has_decodes=num_decoding > 0)
        if not draft.segments and (self._in_flight or not self._releases):
            # With steps in flight the release rides on the one after their results.
            return None
        step = Step(
            step_id=self._next_step_id,
            segments=tuple(draft.segments),
            token_ids=tuple(draft.token_ids),
            release_session_ids=tuple(self._releases),
        )
        self._next_step_id += 1
        self._releases.clear()
        self._in_flight[step.step_id] = StepInFlight(step, num_prefill_tokens)
        return step

    def complete(self, result: StepResult) -> list[SequenceEvent]:
        """Take in the result of a step and return what callers must hear, in the step's order.

        A result with a failure ends the sequences of the step. Results of steps from before a
        restart are ignored.

        Raises:
            ProtocolError: the result does not belong to a step in flight or does not match it; the
                state is unchanged, and the step can still be failed.
        """
        if result.failure is not None:
            return [
                SequenceEvent(session_id=session_id, failure=result.failure)
                for session_id in self.fail_step(result.step_id)
            ]
        entry = self._find(result.step_id)
        if entry is None:
            return []
        check_result(entry.step, result)
        del self._in_flight[result.step_id]
        events: list[SequenceEvent] = []
        for segment, sampled in zip(entry.step.segments, result.tokens, strict=True):
            sequence = self._running[segment.session_id]
            sequence.num_steps_in_flight -= 1
            if sequence.is_ended:
                self._retire_if_done(sequence)
                continue
            token = sequence.accept(segment, sampled)
            if token is None:
                continue
            events.append(SequenceEvent(session_id=sequence.session_id, token=token))
            if token.finish_reason is not None:
                self._end(sequence)
            else:
                self._ready.append(sequence)
        return events

    def fail_step(self, step_id: int) -> list[int]:
        """A step was lost: its sequences are too. Returns those whose callers must hear of it."""
        entry = self._find(step_id)
        if entry is None:
            return []
        del self._in_flight[step_id]
        self._requeue_releases(entry.step)
        failed: list[int] = []
        for segment in entry.step.segments:
            sequence = self._running[segment.session_id]
            sequence.num_steps_in_flight -= 1
            if sequence.is_ended:
                self._retire_if_done(sequence)
            else:
                failed.append(sequence.session_id)
                self._end(sequence)
        return failed

    def fail_all(self) -> list[int]:
        """The pipeline is lost for good: end all sequences. Returns those that were alive."""
        failed = [s.session_id for s in self._running.values() if not s.is_ended]
        failed += [s.session_id for s in self._waiting]
        self._waiting.clear()
        self._forget_steps()
        for sequence in list(self._running.values()):
            sequence.num_steps_in_flight = 0
            self._end(sequence)
        return failed

    def restart_all(self) -> list[int]:
        """The caches are lost, but the pipeline is there again: rebuild all from the known tokens.

        Every live sequence prefills its prompt and accepted tokens again and goes on; what was in
        flight is forgotten. The first step releases what stages may still hold.

        Returns:
            The session ids that go on, in the order in which they prefill.
        """
        self._forget_steps()
        for sequence in list(self._running.values()):
            if sequence.is_ended:
                sequence.num_steps_in_flight = 0
                self._retire_if_done(sequence)
            elif sequence.num_sent:
                self._releases.append(sequence.session_id)
                sequence.restart()
        self._ready.clear()
        self._prefilling = deque(self._running.values())
        return list(self._running)

    def _admit(self) -> None:
        """Move waiting sequences to running while the first of them fits."""
        while self._waiting and self._budget.fits(self._waiting[0].limit_tokens):
            sequence = self._waiting.popleft()
            self._budget.reserve(sequence.session_id, num_tokens=sequence.limit_tokens)
            self._running[sequence.session_id] = sequence
            self._prefilling.append(sequence)

    def _num_decoding(self) -> int:
        return sum(s.is_decoding and not s.is_ended for s in self._running.values())

    def _take_decodes(self, draft: StepDraft, num_decoding: int) -> None:
        target = -(-num_decoding // self.config.num_stages)
        for _ in range(min(target, draft.room, len(self._ready))):
            draft.take(self._ready.popleft(), 1)

    def _take_prefills(self, draft: StepDraft, *, has_decodes: bool) -> int:
        """Fill the step's room with chunks; returns how many tokens that were."""
        room = draft.room
        if has_decodes:
            in_flight = sum(entry.num_prefill_tokens for entry in self._in_flight.values())
            share = -(-self.config.max_step_tokens // self.config.num_stages)
            room = max(0, min(room, share, self.config.max_step_tokens - in_flight))
        taken = 0
        while self._prefilling and taken < room:
            sequence = self._prefilling[0]
            taken += draft.take(sequence, room - taken)
            if sequence.num_unsent == 0:
                self._prefilling.popleft()
        return taken

    def _find(self, step_id: int) -> StepInFlight | None:
        entry = self._in_flight.get(step_id)
        if entry is None and step_id >= self._oldest_step_id:
            raise ProtocolError(f"a result came for step {step_id}, which is not in flight")
        return entry

    def _requeue_releases(self, step: Step) -> None:
        """Say again what a lost step may not have told each stage; to release twice is no harm."""
        self._releases.extend(i for i in step.release_session_ids if i not in self._running)

    def _forget_steps(self) -> None:
        for entry in self._in_flight.values():
            self._requeue_releases(entry.step)
        self._in_flight.clear()
        self._oldest_step_id = self._next_step_id

    def _end(self, sequence: SequenceState) -> None:
        sequence.is_ended = True
        for queue in (self._ready, self._prefilling):
            if sequence in queue:
                queue.remove(sequence)
        self._retire_if_done(sequence)

    def _retire_if_done(self, sequence: SequenceState) -> None:
        """Give the reservation back and queue the release, once no step carries the sequence.

        The room is free at once: whoever takes it travels in the step that releases it, or later.
        """
        if sequence.num_steps_in_flight:
            return
        del self._running[sequence.session_id]
        self._budget.release(sequence.session_id)
        if sequence.num_sent:
            self._releases.append(sequence.session_id)
