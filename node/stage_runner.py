r"""A loaded stage at work: steps in, activations or tokens out, in order.

      RunSteps in --> queue --> compute thread --> outbox --> RunSteps of ranks of the next stage
                                       |                  \-> (last stage, rank 0) watchers
                                       \-> failure --> watchers

Two tasks per stage: one computes, one sends, so that a step travels while the next one computes.
"""

import asyncio
import logging
import time
import traceback
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace

import torch

from node.executor import ComputeThread
from node.free_memory import give_back_freed_memory
from node.next_stage import NextStage
from stagemesh.errors import CapacityExceeded, NotReady, StagemeshError
from stagemesh.inference.stage_engine import StageEngine, StageOutput
from stagemesh.steps import (
    GROUP_OPERATION,
    SEND_OPERATION,
    StageTiming,
    Step,
    StepFailure,
    StepResult,
)

logger = logging.getLogger(__name__)

_MAX_QUEUED_STEPS = 256
_MAX_QUEUED_RESULTS = 4096
_COMPILE_POLL_SECONDS = 0.5
_TRIM_BYTES = 32 * 2**20
"""When the caches have grown or shrunk by so much, freed memory is given back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedStep:
    """A step that has arrived."""

    step: Step
    activation: torch.Tensor | None
    timings: tuple[StageTiming, ...]
    arrived_nanos: int


@dataclass(slots=True, kw_only=True)
class StageCounters:
    """What a stage has done, for status and metrics."""

    num_steps: int = 0
    num_tokens: int = 0
    compute_nanos: int = 0


class Watcher:
    """One WatchResults stream: a bounded queue of results."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[StepResult | None] = asyncio.Queue(_MAX_QUEUED_RESULTS)

    def put(self, result: StepResult | None) -> None:
        """Queue a result, or None for the end; a watcher that does not read loses its stream."""
        try:
            self._queue.put_nowait(result)
        except asyncio.QueueFull as error:
            raise CapacityExceeded(
                f"a result watcher has not read {_MAX_QUEUED_RESULTS} results"
            ) from error

    async def results(self) -> AsyncGenerator[StepResult, None]:
        """Yield results until the stage ends."""
        # No deadline: a watcher waits as long as its stage lives, and `close` wakes it.
        while (result := await self._queue.get()) is not None:
            yield result


class StageRunner:
    """Runs one stage of one deployment.

    Args:
        engine: the loaded stage.
        stage: its index.
        tensor_rank: which of the stage's ranks this node is.
        node_id: for failures.
        compute: the thread that runs it.
        is_over: whether the stage's ranks can compute nothing more together.
    """

    def __init__(
        self,
        engine: StageEngine,
        *,
        stage: int,
        tensor_rank: int = 0,
        node_id: str,
        compute: ComputeThread,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self.engine = engine
        self.stage = stage
        self.tensor_rank = tensor_rank
        self.counters = StageCounters()
        self.next_ranks: dict[int, NextStage] = {}
        """Ranks of the next stage that this one feeds: each gets its activation from one rank."""
        self._is_over = is_over
        self._node_id = node_id
        self._compute = compute
        self._inbox: asyncio.Queue[QueuedStep] = asyncio.Queue(_MAX_QUEUED_STEPS)
        self._outbox: asyncio.Queue[tuple[QueuedStep, StageOutput]] = asyncio.Queue(
            _MAX_QUEUED_STEPS
        )
        self._watchers: set[Watcher] = set()
        self._trimmed_at_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Weights and caches in memory."""
        return self.engine.stage.weight_bytes + self.engine.cache.used_bytes

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._compute_loop(), name="stage-compute")
            tasks.create_task(self._send_loop(), name="stage-send")
            tasks.create_task(self._compile_loop(), name="stage-compile")

    async def submit(self, item: QueuedStep) -> None:
        """Queue an arrived step; waits (and so holds back the sender) while the queue is full."""
        await self._inbox.put(item)

    def watch(self) -> Watcher:
        """Register a watcher of this stage's results and failures."""
        watcher = Watcher()
        self._watchers.add(watcher)
        return watcher

    def unwatch(self, watcher: Watcher) -> None:
        """Remove a watcher."""
        self._watchers.discard(watcher)

    async def close(self) -> None:
        """End the watchers' streams, close the link and free the KV cache."""
        for watcher in self._watchers:
            watcher.put(None)
        self._watchers.clear()
        await asyncio.gather(*(link.close() for link in self.next_ranks.values()))
        self.engine.close()

    async def _compute_loop(self) -> None:
        while True:
            item = await self._inbox.get()
            try:
                output, timing = await self._compute.run(lambda item=item: self._timed(item))  # type: ignore[misc]
            except (
                Exception
            ) as error:  # whatever torch or a family's code raises ends the step, not the node
                logger.exception("step failed", extra={"step_id": item.step.step_id})
                operation = GROUP_OPERATION if self._is_over() else "compute"
                self._report(item.step.step_id, error, operation=operation)
                continue
            self.counters.num_steps += 1
            self.counters.num_tokens += item.step.num_tokens
            self.counters.compute_nanos += timing.compute_nanos
            await self._outbox.put((replace(item, timings=(*item.timings, timing)), output))

    async def _compile_loop(self) -> None:
        """Between steps, look whether compiled code is there, until that is settled."""
        compiler = self.engine.compiler
        while compiler is not None and not compiler.is_settled:
            await asyncio.sleep(_COMPILE_POLL_SECONDS)
            await self._compute.run(compiler.advance)

    def _timed(self, item: QueuedStep) -> tuple[StageOutput, StageTiming]:
        """On the compute thread."""
        begun = time.monotonic_ns()
        output = self.engine.run(item.step, item.activation)
        ended = time.monotonic_ns()
        timing = StageTiming(
            stage=self.stage,
            queue_nanos=begun - item.arrived_nanos,
            compute_nanos=ended - begun,
        )
        self._give_back_old_caches()
        return output, timing

    def _give_back_old_caches(self) -> None:
        """A cache that grows is copied, and the C library keeps the blocks that it grew out of."""
        used = self.engine.cache.used_bytes
        if abs(used - self._trimmed_at_bytes) >= _TRIM_BYTES:
            self._trimmed_at_bytes = used
            give_back_freed_memory()

    async def _send_loop(self) -> None:
        while True:
            item, output = await self._outbox.get()
            step = item.step
            if self.engine.stage.is_last:
                # All ranks draw the same tokens; one tells them.
                if self.tensor_rank == 0:
                    self._publish(
                        StepResult(step_id=step.step_id, tokens=output.tokens, timings=item.timings)
                    )
                continue
            try:
                await self._send(item, output.activation)
            except StagemeshError as error:
                self._report(step.step_id, error, operation=SEND_OPERATION)

    async def _send(self, item: QueuedStep, activation: torch.Tensor | None) -> None:
        """Send a step to the ranks that get it from this one; of more ranks some feed nobody."""
        links = list(self.next_ranks.values())
        if not links and self.tensor_rank == 0:
            raise NotReady(f"stage {self.stage} has no link to the next stage")
        step = replace(item.step, token_ids=())
        sends = [link.send(step, activation, timings=item.timings) for link in links]
        if len(sends) == 1:
            await sends[0]
            return
        # All are tried: a send that is cut off would leave that rank's stream in the middle.
        for outcome in await asyncio.gather(*sends, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    def _report(self, step_id: int, error: Exception, *, operation: str) -> None:
        failure = StepFailure(
            node_id=self._node_id,
            stage=self.stage,
            operation=operation,
            error_type=type(error).__name__,
            message=str(error),
            traceback="".join(traceback.format_exception(error)),
        )
        self._publish(StepResult(step_id=step_id, failure=failure))

    def _publish(self, result: StepResult) -> None:
        for watcher in list(self._watchers):
            try:
                watcher.put(result)
            except CapacityExceeded:
                logger.warning("result watcher dropped: it does not read")
                self._watchers.discard(watcher)
