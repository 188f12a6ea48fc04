"""What the training benchmark compares: how stagemesh does each strategy, and how torch does.

To add one: two classes with a `step`, and an entry in STRATEGIES.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

from benchmarks.training_model import Block, batch, loss_of, make_model, make_optimizer
from stagemesh.comm.process_group import ProcessGroup
from stagemesh.parallel.data.data_parallel import DataParallel
from stagemesh.parallel.fsdp.config import FsdpConfig, ShardingStrategy
from stagemesh.parallel.fsdp.fsdp import Fsdp
from stagemesh.parallel.pipeline import PipelineParallel, even_counts, split_sequential

FLOOR = 1.15
"""Our step time over backend gloo by the peer's, at most."""


class Trainer(Protocol):
    """One rank of a training run."""

    def step(self, index: int) -> float | None:
        """Make a whole optimizer step on `batch(index)`; the loss, where this rank knows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """Two ways of doing the same training."""

    title: str
    """For a person."""
    peer_title: str
    """The same."""
    make: Callable[[ProcessGroup], Trainer]
    """Over a group of stagemesh."""
    make_peer: Callable[[], Trainer]
    """Over torch's default group, which is Gloo."""
    floor: float = FLOOR
    """Most that our step time over gloo may be of the peer's."""


class ReplicaTrainer:
    """A whole model on each rank, which wrapped itself averages gradients."""

    def __init__(self, model: nn.Module, *, rank: int, size: int) -> None:
        self._model = model
        self._rank = rank
        self._size = size
        self._optimizer = make_optimizer(list(model.parameters()))

    def step(self, index: int) -> float | None:
        """As Trainer."""
        tokens, targets = batch(index, part=self._rank, parts=self._size)
        self._optimizer.zero_grad()
        loss = loss_of(self._model(tokens), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return float(loss.detach())


def _data_parallel(group: ProcessGroup) -> Trainer:
    model = DataParallel(make_model(), process_group=group)
    return ReplicaTrainer(model, rank=group.rank, size=group.size)


def _torch_data_parallel() -> Trainer:
    # As ours: gradients lie in the buckets.
    model = DistributedDataParallel(make_model(), gradient_as_bucket_view=True)
    return ReplicaTrainer(model, rank=dist.get_rank(), size=dist.get_world_size())


def _fsdp(group: ProcessGroup, *, strategy: ShardingStrategy) -> Trainer:
    config = FsdpConfig(sharding_strategy=strategy, mixed_precision=False, wrap_policy=(Block,))
    model = Fsdp(make_model(), process_group=group, config=config)
    return ReplicaTrainer(model, rank=group.rank, size=group.size)


def _torch_fsdp(*, frees_after_forward: bool) -> Trainer:
    model = make_model()
    for block in model:
        if isinstance(block, Block):
            fully_shard(block, reshard_after_forward=frees_after_forward)
    fully_shard(model, reshard_after_forward=False)
    return ReplicaTrainer(model, rank=dist.get_rank(), size=dist.get_world_size())


MICROBATCHES = 4
"""Of a pipeline's batch."""


class StageTrainer:
    """A stage of the model on each rank."""

    def __init__(
        self,
        stage: nn.Module,
        *,
        run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None],
    ) -> None:
        self._run = run
        self._optimizer = make_optimizer(list(stage.parameters()))

    def step(self, index: int) -> float | None:
        """As Trainer."""
        self._optimizer.zero_grad()
        loss = self._run(*batch(index))
        self._optimizer.step()
        return None if loss is None else float(loss)


def _stage(rank: int, size: int) -> nn.Module:
    model = make_model()
    return split_sequential(model, counts=even_counts(len(model), num_stages=size))[rank]


def _pipeline(group: ProcessGroup, *, schedule: str) -> Trainer:
    stage = _stage(group.rank, group.size)
    pipeline = PipelineParallel(
        stage,
        process_group=group,
        num_microbatches=MICROBATCHES,
        schedule=schedule,
        loss_fn=loss_of,
    )
    return StageTrainer(stage, run=lambda tokens, targets: pipeline.step(tokens, targets).loss)


def _torch_pipeline(schedule: Callable[..., Any]) -> Trainer:
    rank, size = dist.get_rank(), dist.get_world_size()
    module = _stage(rank, size)
    stage = PipelineStage(module, rank, size, torch.device("cpu"))
    pipeline = schedule(stage, MICROBATCHES, loss_fn=loss_of)

    def run(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor | None:
        if rank == 0:
            pipeline.step(tokens)
            return None
        losses: list[torch.Tensor] = []
        pipeline.step(target=targets, losses=losses)
        return torch.stack(losses).detach().mean()

    return StageTrainer(module, run=run)


STRATEGIES: Mapping[str, Strategy] = MappingProxyType(
    {
        "dp": Strategy(
            title="DataParallel",
            peer_title="DistributedDataParallel",
            make=_data_parallel,
            make_peer=_torch_data_parallel,
        ),
        "pp_gpipe": Strategy(
            title="PipelineParallel, gpipe",
            peer_title="ScheduleGPipe",
            make=partial(_pipeline, schedule="gpipe"),
            make_peer=partial(_torch_pipeline, schedule=ScheduleGPipe),
        ),
        "pp_1f1b": Strategy(
            title="PipelineParallel, 1F1B",
            peer_title="Schedule1F1B",
            make=partial(_pipeline, schedule="one_f_one_b"),
            make_peer=partial(_torch_pipeline, schedule=Schedule1F1B),
        ),
        "fsdp": Strategy(
            title="Fsdp FULL_SHARD",
            peer_title="fully_shard",
            make=partial(_fsdp, strategy=ShardingStrategy.FULL_SHARD),
            make_peer=partial(_torch_fsdp, frees_after_forward=True),
        ),
        "fsdp_grad_op": Strategy(
            title="Fsdp SHARD_GRAD_OP",
            peer_title="fully_shard, whole after forward",
            make=partial(_fsdp, strategy=ShardingStrategy.SHARD_GRAD_OP),
            make_peer=partial(_torch_fsdp, frees_after_forward=False),
        ),
    }
)
"""By the name on the command line."""
