"""What the training benchmark compares: how stagemesh does each strategy, and how torch does.

To add one: two classes with a `step`, and an entry in STRATEGIES.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.training_model import batch, loss_of, make_model, make_optimizer
from stagemesh.comm.process_group import ProcessGroup
from stagemesh.parallel.data.data_parallel import DataParallel

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


STRATEGIES: Mapping[str, Strategy] = MappingProxyType(
    {
        "dp": Strategy(
            title="DataParallel",
            peer_title="DistributedDataParallel",
            make=_data_parallel,
            make_peer=_torch_data_parallel,
        ),
    }
)
"""By the name on the command line."""
