"""The thin interpreter of the scheduler: moves steps and results of one running deployment.

generate --add--> scheduler --next_step--> pipeline ... --result--> scheduler --events--> generate
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from coordinator.generation import GeneratedToken, GenerationRequest
from coordinator.pipeline import Pipeline
from coordinator.scheduler import Scheduler
from stagemesh.errors import PeerLost, ProtocolError, StageFailed, StagemeshError
from stagemesh.steps import GROUP_OPERATION, SEND_OPERATION, StepFailure, StepResult

logger = logging.getLogger(__name__)

_WATCH_SECONDS = 0.5
_BREAKING = (SEND_OPERATION, GROUP_OPERATION)

Event = GeneratedToken | StagemeshError


@dataclass(slots=True)
class StepStats:
    """Where the time of steps went, summed; the difference is the wire and the wake-ups."""

    num_steps: int = 0
    num_tokens: int = 0
    """Tokens generated."""
    latency_nanos: int = 0
    """From before a step is sent to after its result is read."""
    turnaround_nanos: int = 0
    """From a result to the step that it makes possible: scheduling and delivery."""
    queue_nanos: dict[int, int] = field(default_factory=dict)
    """By stage: waiting for the compute thread."""
    compute_nanos: dict[int, int] = field(default_factory=dict)
    """By stage: computing."""

    def add(self, result: StepResult, latency_nanos: int) -> None:
        """Count a step's result."""
        self.num_steps += 1
        self.num_tokens += sum(token.token_id is not None for token in result.tokens)
        self.latency_nanos += latency_nanos
        for timing in result.timings:
            stage = timing.stage
            self.queue_nanos[stage] = self.queue_nanos.get(stage, 0) + timing.queue_nanos
            self.compute_nanos[stage] = self.compute_nanos.get(stage, 0) + timing.compute_nanos


class Runtime:
    """Runs requests on an open pipeline until it breaks.

    Args:
        scheduler: decides.
        step_seconds: a step that is away for longer breaks the pipeline.
    """

    def __init__(self, scheduler: Scheduler, *, step_seconds: float) -> None:
        self.scheduler = scheduler
        self.stats = StepStats()
        self.pipeline: Pipeline | None = None
        self._step_seconds = step_seconds
        self._queues: dict[int, asyncio.Queue[Event]] = {}
        self._sent_at: dict[int, int] = {}
        self._broken: StagemeshError | None = None
        self._is_pumping = False
        # Callers only set it: a caller that is cancelled in the middle of a write would end the
        # stream of steps for everybody.
        self._wake = asyncio.Event()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GeneratedToken, None]:
        """Run one sequence; see `coordinator.generation.Engine.generate`."""
        if self._broken is not None:
            raise self._broken
        session_id = self.scheduler.add(request)
        queue: asyncio.Queue[Event] = asyncio.Queue()
        self._queues[session_id] = queue
        try:
            self._wake.set()
            while True:
                # No deadline of its own: each step has one, and a broken pipeline wakes everybody.
                event = await queue.get()
                if isinstance(event, StagemeshError):
                    raise event
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            del self._queues[session_id]
            self.scheduler.cancel(session_id)
            self._wake.set()

    async def on_result(self, result: StepResult) -> None:
        """Take a result in and send what it makes possible."""
        now = time.monotonic_ns()
        sent_at = self._sent_at.pop(result.step_id, None)
        if sent_at is not None and result.failure is None:
            self.stats.add(result, now - sent_at)
        if result.failure is not None and result.failure.operation in _BREAKING:
            # The link between two stages or ranks broke while both may be well: only linking anew
            # helps.
            self.fail(PeerLost(_failure_text(result.failure), node_id=result.failure.node_id))
            return
        try:
            events = self.scheduler.complete(result)
        except ProtocolError as error:
            logger.error("result refused: %s", error)
            self.fail(error)
            return
        for event in events:
            queue = self._queues.get(event.session_id)
            if queue is not None:
                queue.put_nowait(
                    event.token if event.token is not None else _stage_failed(event.failure)
                )
        await self._pump(since_nanos=now)

    def fail(self, error: StagemeshError) -> None:
        """End every sequence with `error`; later ones are refused with it."""
        self._broken = error
        self.scheduler.fail_all()
        self._sent_at.clear()
        for queue in self._queues.values():
            queue.put_nowait(error)
        self._wake.set()

    async def run(self) -> None:
        """Send what callers add, and watch over the steps' deadline, until the pipeline breaks.

        Raises:
            StagemeshError: what broke it; PeerLost when a step did not come back in time.
        """
        while self._broken is None:
            try:
                async with asyncio.timeout(_WATCH_SECONDS):
                    await self._wake.wait()
            except TimeoutError:
                self._check_deadline()
                continue
            self._wake.clear()
            await self._pump()
        raise self._broken

    def _check_deadline(self) -> None:
        if not self._sent_at:
            return
        step_id, sent_at = next(iter(self._sent_at.items()))
        elapsed = (time.monotonic_ns() - sent_at) / 1e9
        if elapsed > self._step_seconds:
            raise PeerLost(
                f"step {step_id} has been on its way through the pipeline for {elapsed:.0f} s "
                f"(limit {self._step_seconds:.0f} s); {self.stats.num_steps} steps came back before"
            )

    @property
    def num_active(self) -> int:
        """Sequences that callers wait for."""
        return len(self._queues)

    async def _pump(self, *, since_nanos: int | None = None) -> None:
        """Send steps while the scheduler has some; whoever comes while it sends is served by it.

        Args:
            since_nanos: when the result came that made the first of them possible.
        """
        if self._is_pumping or self.pipeline is None or self._broken is not None:
            return
        self._is_pumping = True
        try:
            while (step := self.scheduler.next_step()) is not None:
                now = time.monotonic_ns()
                if since_nanos is not None:
                    self.stats.turnaround_nanos += now - since_nanos
                    since_nanos = None
                self._sent_at[step.step_id] = now
                await self.pipeline.send(step)
        finally:
            self._is_pumping = False


def _stage_failed(failure: StepFailure | None) -> StageFailed:
    assert failure is not None
    return StageFailed(
        _failure_text(failure),
        node_id=failure.node_id,
        stage=failure.stage,
        operation=failure.operation,
        error_type=failure.error_type,
        remote_traceback=failure.traceback,
    )


def _failure_text(failure: StepFailure) -> str:
    return (
        f"stage {failure.stage} on node {failure.node_id} failed to {failure.operation}: "
        f"{failure.error_type}: {failure.message}"
    )
