"""PipelineParallel: a model in stages on several ranks, micro-batches streaming through them.

    pipeline = PipelineParallel(
        stage, process_group=group, num_microbatches=8, loss_fn=loss_fn, schedule="one_f_one_b"
    )
    for inputs, targets in batches:
        optimizer.zero_grad()
        result = pipeline.step(inputs, targets)     # inputs count on the first stage's rank,
        optimizer.step()                            # targets on the last stage's

After a step the gradients are those of the batch's mean loss, as one process would have them. Like
a backward it adds to gradients that are there.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import ConfigError, NotReady
from stagemesh.parallel.pipeline.executor import Executor, Feed
from stagemesh.parallel.pipeline.failure import AbortOnFailure
from stagemesh.parallel.pipeline.microbatches import (
    BatchLike,
    Tensors,
    WeightFn,
    join_batch,
    num_samples,
    split_batch,
    weights_of,
)
from stagemesh.parallel.pipeline.payload import NO_SAMPLES, Payload, payload_of
from stagemesh.parallel.pipeline.plan import check_agreement, make_plan
from stagemesh.parallel.pipeline.results import RunRecord, StepResult
from stagemesh.parallel.pipeline.stage import Compute, PipelineStage
from stagemesh.parallel.pipeline.tied import TiedParameters
from stagemesh.schedule.schedule import Schedule

LossFn = Callable[..., torch.Tensor]


class PipelineParallel(nn.Module):
    """This rank's stages, and the way from and to the others'.

    `parameters()` and `state_dict()` are those of this rank's stages. Errors in a stage abort the
    group: every rank raises, with the stage's name; the ranks must then join a new group.
    """

    def __init__(
        self,
        stages: nn.Module | Sequence[nn.Module],
        *,
        process_group: ProcessGroup,
        num_microbatches: int,
        schedule: str | Schedule = "one_f_one_b",
        loss_fn: LossFn | None = None,
        weight_fn: WeightFn | None = None,
        num_stages: int | None = None,
        tied_parameters: Sequence[nn.Parameter] = (),
        checkpoint_activations: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Compare the ranks' schedules. All ranks call it.

        Args:
            stages: this rank's modules in the order of stages; several with "interleaved" (or
                "gpipe"), where rank r of R has the stages r, r + R, r + 2 R, ... Each takes what
                the stage before gives, a tensor or a tuple of tensors as arguments. One that is a
                GradientSync, such as a DataParallel, reduces its gradients once per step.
            process_group: one rank per program; it carries no other messages.
            num_microbatches: of each batch.
            schedule: "gpipe", "one_f_one_b", "interleaved", "zero_bubble", or one of your own.
            loss_fn: called with the last stage's outputs and the targets; gives a mean, 0-d.
            weight_fn: of a micro-batch's targets: what its mean counts; default its samples.
            num_stages: of the whole pipeline, to be checked.
            tied_parameters: those that the first and the last rank share, in the same order on
                both: their gradients are summed in each step. In a group of one, tie them yourself.
            checkpoint_activations: hold only the inputs of this rank's stages, and compute their
                forwards twice.
            clock: of the timings.

        Raises:
            ConfigError: the schedule does not fit, or is another one on another rank.
        """
        super().__init__()
        modules = [stages] if isinstance(stages, nn.Module) else list(stages)
        self.stages = nn.ModuleList(modules)
        self._group = process_group
        self._loss_fn = loss_fn
        self._weight_fn = weight_fn
        self._num_microbatches = num_microbatches
        self._plan = make_plan(
            schedule,
            num_ranks=process_group.size,
            rank=process_group.rank,
            num_stages_here=len(modules),
            num_microbatches=num_microbatches,
        )
        if num_stages not in (None, self.num_stages):
            raise ConfigError(f"num_stages is {num_stages}, the modules make {self.num_stages}")
        indices = self.schedule.stages_of(process_group.rank)
        self._executor = Executor(
            {
                index: PipelineStage(
                    module, index=index, checkpoint_activations=checkpoint_activations
                )
                for index, module in zip(indices, modules, strict=True)
            },
            process_group=process_group,
            schedule=self.schedule,
            clock=clock,
        )
        is_tied = check_agreement(
            self.schedule, num_tied=len(tied_parameters), process_group=process_group
        )
        self._tied = (
            TiedParameters(tied_parameters, process_group=process_group) if is_tied else None
        )
        self._has_forward = False

    @property
    def schedule(self) -> Schedule:
        """What is run, with sends and receives; `print` it."""
        return self._plan.schedule

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.schedule.num_stages

    @property
    def is_first(self) -> bool:
        """Whether the first stage is here."""
        return self.schedule.stage_ranks[0] == self._group.rank

    @property
    def is_last(self) -> bool:
        """Whether the last stage is here."""
        return self.schedule.stage_ranks[-1] == self._group.rank

    def step(
        self,
        inputs: BatchLike | None = None,
        targets: BatchLike | None = None,
        *,
        share_loss: bool = False,
    ) -> StepResult:
        """Forward, loss and backward of a batch. All ranks call it.

        Args:
            inputs: a tensor or a tuple of tensors, cut along dim 0 into micro-batches (the first
                ones are larger, the last ones may have no samples), or a list of micro-batches,
                whose shapes may differ. Read where the first stage is.
            targets: likewise; cut in the same way. Read where the last stage is.
            share_loss: give the loss on all ranks; costs a broadcast.

        Raises:
            ConfigError: something is missing or cannot be cut.
            StageFailed: a stage of this rank raised; the others raise GroupAborted, naming it.
            CommError: another rank failed, is gone, or did not answer in time.
        """
        with self._guard() as guard:
            self._start_over()
            if self._tied is not None:
                self._tied.begin_step()
            weights, finish = self._losses(targets)
            feed = Feed(
                inputs=self._payloads(inputs, wants_grad=False),
                finish=finish,
                gradients=[(torch.tensor(weight, dtype=torch.float64),) for weight in weights],
            )
            record = self._executor.run(self._plan.step, feed, guard=guard)
            if self._tied is not None:
                self._tied.sum_gradients()
            return self._result(weights, record, share_loss=share_loss)

    def forward(self, inputs: BatchLike | None = None) -> torch.Tensor | Tensors | None:
        """The outputs of the last stage for a batch, where that is; None on other ranks.

        All ranks call it. They have no graph: `backward` takes their gradients back. In no_grad
        mode nothing is held for it.

        Args:
            inputs: as in `step`; those that require a gradient get one in `backward`.
        """
        with self._guard() as guard:
            self._start_over()
            feed = Feed(inputs=self._payloads(inputs, wants_grad=True))
            self._executor.run(self._plan.forward, feed, guard=guard)
            self._has_forward = torch.is_grad_enabled()
            return join_batch(list(self._executor.outputs.values())) if self.is_last else None

    def backward(
        self, grad_outputs: torch.Tensor | Tensors | None = None
    ) -> torch.Tensor | Tensors | None:
        """The backward of the last `forward`. All ranks call it.

        Args:
            grad_outputs: gradients of its outputs; read where the last stage is.

        Returns:
            The gradients of its inputs where the first stage is, if they required any. Else None.

        Raises:
            NotReady: there was no forward in grad mode, or its backward was done.
        """
        if not self._has_forward:
            raise NotReady("backward() needs a forward() in grad mode before it")
        self._has_forward = False
        with self._guard() as guard:
            if self._tied is not None:
                self._tied.begin_step()
            feed = Feed(gradients=self._cut_gradients(grad_outputs))
            self._executor.run(self._plan.backward, feed, guard=guard)
            if self._tied is not None:
                self._tied.sum_gradients()
            gradients = list(self._executor.input_gradients.values())
            there = [tuple(g for g in grads if g is not None) for grads in gradients]
            return join_batch(there) if there and there[0] else None

    def close(self) -> None:
        """Leave the group of the tied parameters, if there is one."""
        if self._tied is not None:
            self._tied.close()

    def _guard(self) -> AbortOnFailure:
        tied = None if self._tied is None else self._tied.process_group
        return AbortOnFailure([self._group] if tied is None else [self._group, tied])

    def _start_over(self) -> None:
        self._has_forward = False
        self._executor.reset()

    def _payloads(self, inputs: BatchLike | None, *, wants_grad: bool) -> list[Payload]:
        if not self.is_first:
            return []
        if inputs is None:
            raise ConfigError("inputs are needed where the first stage is")
        parts = split_batch(inputs, num_microbatches=self._num_microbatches, name="inputs")
        if not any(map(num_samples, parts)):
            raise ConfigError("inputs: the batch has no samples")
        return [
            NO_SAMPLES
            if not num_samples(part)
            else payload_of(part if wants_grad else [tensor.detach() for tensor in part])
            for part in parts
        ]

    def _losses(self, targets: BatchLike | None) -> tuple[list[float], list[Compute | None]]:
        """What each micro-batch counts, and the loss that follows its outputs."""
        if not self.is_last:
            return [], []
        if targets is None or self._loss_fn is None:
            raise ConfigError("targets and loss_fn are needed where the last stage is")
        parts = split_batch(targets, num_microbatches=self._num_microbatches, name="targets")
        weights = weights_of(parts, weight_fn=self._weight_fn)
        finish: list[Compute | None] = [
            partial(_loss_of, loss_fn=self._loss_fn, targets=part) if num_samples(part) else None
            for part in parts
        ]
        return weights, finish

    def _result(
        self, weights: Sequence[float], record: RunRecord, *, share_loss: bool
    ) -> StepResult:
        outputs = self._executor.outputs
        losses = [outputs[i][0] if i in outputs else None for i in range(len(weights))]
        mean = torch.zeros((), dtype=torch.float64)
        for weight, loss in zip(weights, losses, strict=True):
            if loss is not None:
                mean += weight * loss.double().cpu()
        if share_loss and self._group.size > 1:
            self._group.broadcast(mean, src=self.schedule.stage_ranks[-1])
        has_loss = share_loss or self.is_last
        return StepResult(
            loss=mean.float() if has_loss else None,
            microbatch_losses=tuple(losses),
            record=record,
        )

    def _cut_gradients(
        self, grad_outputs: torch.Tensor | Tensors | None
    ) -> list[Sequence[torch.Tensor | None]]:
        if not self.is_last:
            return []
        if grad_outputs is None:
            raise ConfigError("grad_outputs are needed where the last stage is")
        gradients = grad_outputs if isinstance(grad_outputs, tuple) else (grad_outputs,)
        outputs = self._executor.outputs
        rows = [
            num_samples(outputs[i]) if i in outputs else 0 for i in range(self._num_microbatches)
        ]
        for gradient in gradients:
            if gradient.shape[0] != sum(rows):
                raise ConfigError(
                    f"grad_outputs have {gradient.shape[0]} rows, the outputs had {sum(rows)}"
                )
        return list(zip(*(torch.split(gradient, rows) for gradient in gradients), strict=True))


def _loss_of(outputs: Tensors, *, loss_fn: LossFn, targets: Tensors) -> Tensors:
    loss = loss_fn(*outputs, *targets)
    if loss.dim():
        raise ConfigError(f"loss_fn must give a mean, 0-d, got the shape {list(loss.shape)}")
    return (loss,)
