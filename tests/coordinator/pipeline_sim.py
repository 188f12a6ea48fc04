"""A pipeline without a network: stages with queues and caches, in simulated time.

A stage takes `seconds(step)` for a step, one step at a time, in the order of arrival. Each stage
keeps what a real one would: the tokens of each session. The last one "samples" a hash of the whole
session, so a token that came twice, came late or went to another session changes every token after
it.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator.scheduler import Scheduler
from coordinator.sequences import SequenceEvent
from stagemesh.steps import SampledToken, Step, StepResult, TargetScore

VOCABULARY = 50


def next_token(token_ids: list[int]) -> int:
    """What the simulated model says after these tokens."""
    value = 7
    for token_id in token_ids:
        value = (value * 31 + token_id + 1) % 1_000_003
    return value % VOCABULARY


def target_score(token_ids: list[int], target: int) -> TargetScore:
    """What the simulated model thinks of a successor of these tokens."""
    return TargetScore(-float((next_token(token_ids) - target) % VOCABULARY))


def expected_tokens(prompt: tuple[int, ...], *, limit: int, stop: frozenset[int]) -> list[int]:
    """What a sequence yields when it runs alone."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + limit:
        tokens.append(next_token(tokens))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


def seconds_by_tokens(step: Step) -> float:
    """A stage's time: a little for the step, the rest for its tokens."""
    return 0.0 if not step.segments else 1.0 + 0.05 * step.num_tokens


@dataclass
class Stage:
    """One stage: its queue, its cache, its work."""

    capacity_tokens: int
    queue: deque[Step] = field(default_factory=deque)
    sessions: dict[int, list[int]] = field(default_factory=dict)
    busy_until: float | None = None
    busy_seconds: float = 0.0
    peak_tokens: int = 0

    def compute(self, step: Step) -> StepResult:
        """Free, then take in every segment; the checks are those of a careful stage."""
        for session_id in step.release_session_ids:
            self.sessions.pop(session_id, None)
        taken, sampled = 0, []
        for segment in step.segments:
            held = self.sessions.setdefault(segment.session_id, [])
            assert segment.start_position == len(held), (
                f"step {step.step_id}: session {segment.session_id} holds {len(held)} tokens, "
                f"the segment starts at {segment.start_position}"
            )
            scores = []
            for offset in range(segment.num_tokens):
                held.append(step.token_ids[taken + offset])
                if segment.target_token_ids:
                    scores.append(target_score(held, segment.target_token_ids[offset]))
            taken += segment.num_tokens
            sampled.append(
                SampledToken(
                    session_id=segment.session_id,
                    token_id=next_token(held) if segment.sampling else None,
                    target_scores=tuple(scores),
                )
            )
        assert taken == len(step.token_ids)
        num_tokens = sum(len(tokens) for tokens in self.sessions.values())
        self.peak_tokens = max(self.peak_tokens, num_tokens)
        assert num_tokens <= self.capacity_tokens, (
            f"step {step.step_id}: {num_tokens} tokens in a cache of {self.capacity_tokens}"
        )
        return StepResult(step_id=step.step_id, tokens=tuple(sampled))


class Pipeline:
    """Runs a scheduler's steps; `at` times actions of a test into the run."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        num_stages: int,
        seconds: Callable[[Step], float] = seconds_by_tokens,
        kv_capacity_tokens: int | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.now = 0.0
        self.events: list[tuple[float, SequenceEvent]] = []
        self.sent: list[tuple[float, Step]] = []
        self.stages = [
            Stage(kv_capacity_tokens or scheduler.config.kv_capacity_tokens)
            for _ in range(num_stages)
        ]
        self._seconds = seconds
        self._actions: list[tuple[float, int, Callable[[], object]]] = []
        self.on_result: Callable[[StepResult], StepResult] = lambda result: result

    def at(self, seconds: float, action: Callable[[], object]) -> None:
        """Call an action at a moment."""
        self._actions.append((seconds, len(self._actions), action))
        self._actions.sort(key=lambda entry: entry[:2])

    def run(self, *, until: float = 1e6) -> None:
        """Go on until nothing is left to do, or a moment."""
        self._send()
        while (moment := self._next_moment()) is not None and moment <= until:
            self.now = moment
            while self._actions and self._actions[0][0] <= moment:
                self._actions.pop(0)[2]()
            # Last stage first: what leaves a stage at a moment enters the next at that moment.
            for index in reversed(range(len(self.stages))):
                self._finish(index)
            self._send()

    def drop_steps(self) -> None:
        """All stages lose their caches and steps: a node died and the pipeline was built again."""
        for stage in self.stages:
            stage.queue.clear()
            stage.sessions.clear()
            stage.busy_until = None

    def tokens_of(self, session_id: int) -> list[int]:
        """The tokens that the caller of a session heard."""
        return [
            event.token.token_id
            for _, event in self.events
            if event.session_id == session_id
            and event.token is not None
            and event.token.token_id is not None
        ]

    def _next_moment(self) -> float | None:
        moments = [stage.busy_until for stage in self.stages if stage.busy_until is not None]
        moments += [entry[0] for entry in self._actions[:1]]
        return min(moments, default=None)

    def _finish(self, index: int) -> None:
        stage = self.stages[index]
        if stage.busy_until is None or stage.busy_until > self.now:
            return
        step = stage.queue.popleft()
        stage.busy_until = None
        result = stage.compute(step)
        if index + 1 < len(self.stages):
            self._enqueue(index + 1, step)
        else:
            for event in self.scheduler.complete(self.on_result(result)):
                self.events.append((self.now, event))
        self._start(stage)

    def _enqueue(self, index: int, step: Step) -> None:
        self.stages[index].queue.append(step)
        self._start(self.stages[index])

    def _start(self, stage: Stage) -> None:
        if stage.busy_until is None and stage.queue:
            seconds = self._seconds(stage.queue[0])
            stage.busy_until = self.now + seconds
            stage.busy_seconds += seconds

    def _send(self) -> None:
        while (step := self.scheduler.next_step()) is not None:
            self.sent.append((self.now, step))
            self._enqueue(0, step)
