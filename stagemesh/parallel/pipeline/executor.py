"""Executor: runs a rank's program, whatever the schedule.

    program    >F1.0  F1.0  F>1.0  >F1.1  F1.1 ...
                  |     |      |      |
                  |     |      |      +-- begun some actions before it is reached
                  |     |      +-- begun here; waited for at the end of the program
                  |     +-- waits for its receive, computes
                  +-- begun when the program starts

The program's order is kept; only messages are under way beside it.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import ConfigError
from stagemesh.parallel.gradient_sync import GradientSync
from stagemesh.parallel.pipeline.failure import AbortOnFailure
from stagemesh.parallel.pipeline.links import Links
from stagemesh.parallel.pipeline.payload import NO_SAMPLES, Payload, payload_of
from stagemesh.parallel.pipeline.results import RunRecord
from stagemesh.parallel.pipeline.stage import Compute, PipelineStage
from stagemesh.schedule.actions import Action, ActionKind, Product, moved_by, product_of
from stagemesh.schedule.grid import TimedAction
from stagemesh.schedule.schedule import Program, Schedule
from stagemesh.schedule.transfers import peer_of

_RECEIVES_AHEAD = 6
"""Actions before a receive's place at which it begins. Enough for its message to have come when it
is needed; few enough that its deadline is about the actions next to it, and not the whole step."""

Clock = Callable[[], float]
Gradients = Sequence[torch.Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """What a run needs at the ends of the pipeline."""

    inputs: Sequence[Payload] = ()
    """On the first stage, of each micro-batch."""
    finish: Sequence[Compute | None] = ()
    """On the last stage, what follows the module in each micro-batch; None where that has no
    samples. Or nothing, where nothing follows."""
    gradients: Sequence[Gradients] = ()
    """On the last stage, of each micro-batch's outputs."""


class Executor:
    """One rank's stages and messages."""

    def __init__(
        self,
        stages: Mapping[int, PipelineStage],
        *,
        process_group: ProcessGroup,
        schedule: Schedule,
        clock: Clock = time.perf_counter,
    ) -> None:
        """Nothing runs yet.

        Args:
            stages: of this rank, by index.
            process_group: of the pipeline; rank r runs program r.
            schedule: says where the stages are.
            clock: of the timings.
        """
        self._stages = stages
        self._group = process_group
        self._schedule = schedule
        self._clock = clock
        self._local: dict[Product, Payload] = {}
        self._outputs: dict[int, tuple[torch.Tensor, ...]] = {}
        self._input_gradients: dict[int, Gradients] = {}
        self._without_samples: set[tuple[int, int]] = set()

    @property
    def outputs(self) -> Mapping[int, tuple[torch.Tensor, ...]]:
        """What the last stage gave for each micro-batch that has samples."""
        return self._outputs

    @property
    def input_gradients(self) -> Mapping[int, Gradients]:
        """Gradients of the first stage's inputs, of each micro-batch that has samples."""
        return self._input_gradients

    def reset(self) -> None:
        """Forget what earlier runs have left, in flight or as results."""
        for stage in self._stages.values():
            stage.reset()
        for store in (self._local, self._outputs, self._input_gradients, self._without_samples):
            store.clear()

    def run(self, program: Program, feed: Feed, *, guard: AbortOnFailure) -> RunRecord:
        """Run a program to its end.

        Raises:
            CommError: a message did not come, or another rank has failed.
            StagemeshError: what a stage raised.
        """
        # A send may have to wait for its receive, which may come at the end of the peer's program.
        seconds = self._group.timeout_seconds * (1 + len(program))
        run = _Run(program)
        with Links(self._group, schedule=self._schedule, send_seconds=seconds) as links:
            num_begun = 0
            for position, action in enumerate(program):
                guard.at(action)
                ahead = min(position + _RECEIVES_AHEAD, len(program))
                for later in program[num_begun:ahead]:
                    if later.kind.is_receive:
                        links.begin_receive(later)
                num_begun = max(num_begun, ahead)
                if action.kind.is_send:
                    product = moved_by(action)
                    links.begin_send(product, self._local.pop(product))
                elif action.kind.is_compute:
                    self._compute(action, feed, links, run)
            links.finish()
        return RunRecord(timings=tuple(run.timings), max_in_flight=run.max_in_flight)

    def _compute(self, action: Action, feed: Feed, links: Links, run: "_Run") -> None:
        arrived = self._needed(action, feed, links)
        start = self._clock()
        match action.kind:
            case ActionKind.FORWARD:
                made = self._forward(action, arrived, feed)
            case ActionKind.BACKWARD_WEIGHT:
                self._weight_half(action, run)
                made = NO_SAMPLES
            case _:
                made = self._backward(action, arrived.tensors, run)
        run.note(action, start=start, end=self._clock(), stage=self._stages[action.stage])
        if (product := product_of(action)) is not None:
            self._keep(product, made)

    def _needed(self, action: Action, feed: Feed, links: Links) -> Payload:
        """What an action works on; waits for what comes from another rank."""
        stage, microbatch = action.stage, action.microbatch
        match action.kind:
            case ActionKind.FORWARD if stage == 0:
                return feed.inputs[microbatch]
            case ActionKind.FORWARD:
                product = Product("activation", stage - 1, microbatch)
            case ActionKind.BACKWARD_WEIGHT:
                return NO_SAMPLES
            case _ if stage == self._schedule.num_stages - 1:
                return payload_of(feed.gradients[microbatch])
            case _:
                product = Product("gradient", stage + 1, microbatch)
        if peer_of(product, self._schedule) is None:
            return self._local.pop(product)
        return links.take(product)

    def _forward(self, action: Action, arrived: Payload, feed: Feed) -> Payload:
        is_last = action.stage == self._schedule.num_stages - 1
        finish = feed.finish[action.microbatch] if is_last and feed.finish else None
        if is_last and feed.finish and arrived.is_empty != (finish is None):
            raise ConfigError(
                f"micro-batch {action.microbatch} has samples in only one of the first stage's "
                "inputs and the last stage's targets: cut both the same way"
            )
        if arrived.is_empty:
            self._without_samples.add((action.stage, action.microbatch))
            return NO_SAMPLES
        outputs = self._stages[action.stage].forward(action.microbatch, arrived, finish=finish)
        if is_last:
            # Without their graph, which would hold all that it has saved until the step's end.
            self._outputs[action.microbatch] = tuple(output.detach() for output in outputs)
        return payload_of(outputs)

    def _backward(self, action: Action, gradients: Gradients, run: "_Run") -> Payload:
        stage = self._stages[action.stage]
        is_half = action.kind is ActionKind.BACKWARD_INPUT
        is_last = not is_half and run.end_backward(action.stage)
        if (action.stage, action.microbatch) in self._without_samples:
            if is_last:
                _sync(stage)
            return NO_SAMPLES
        with _without_sync(stage) if not is_last or run.is_split(action.stage) else _as_it_is():
            backward = stage.backward_input if is_half else stage.backward
            made = backward(action.microbatch, gradients)
        if is_last and run.is_split(action.stage):
            _sync(stage)
        return made

    def _weight_half(self, action: Action, run: "_Run") -> None:
        stage = self._stages[action.stage]
        if (action.stage, action.microbatch) not in self._without_samples:
            with _without_sync(stage):
                stage.backward_weight(action.microbatch)
        if run.end_backward(action.stage):
            _sync(stage)

    def _keep(self, product: Product, made: Payload) -> None:
        is_activation = product.kind == "activation"
        if not is_activation and product.stage == 0:
            if not made.is_empty:
                self._input_gradients[product.microbatch] = made.tensors
        elif not is_activation or product.stage < self._schedule.num_stages - 1:
            self._local[product] = made


class _Run:
    """What is counted while a program runs."""

    def __init__(self, program: Program) -> None:
        ends = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
        self._backwards_left = Counter(a.stage for a in program if a.kind in ends)
        self._split = {a.stage for a in program if a.kind is ActionKind.BACKWARD_WEIGHT}
        self.timings: list[TimedAction] = []
        self.max_in_flight: dict[int, int] = {}

    def is_split(self, stage: int) -> bool:
        """Whether some backward of a stage is in halves."""
        return stage in self._split

    def end_backward(self, stage: int) -> bool:
        """Count a backward that ends; whether it is the stage's last."""
        self._backwards_left[stage] -= 1
        return self._backwards_left[stage] == 0

    def note(self, action: Action, *, start: float, end: float, stage: PipelineStage) -> None:
        """Count an action that was done."""
        self.timings.append(TimedAction(action=action, start=start, end=end))
        most = self.max_in_flight.get(stage.index, 0)
        self.max_in_flight[stage.index] = max(most, stage.num_in_flight)


def _without_sync(stage: PipelineStage) -> contextlib.AbstractContextManager[None]:
    return stage.module.no_sync() if isinstance(stage.module, GradientSync) else _as_it_is()


def _as_it_is() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _sync(stage: PipelineStage) -> None:
    if isinstance(stage.module, GradientSync):
        stage.module.sync_gradients()
