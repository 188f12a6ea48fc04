"""Ranks that fail: the others raise out of backward, within the timeout."""

import threading
import time

import pytest
import torch
from torch import nn

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import (
    CollectiveTimeout,
    CommError,
    GroupAborted,
    NotReady,
    StagemeshError,
)
from stagemesh.parallel.data.config import DataParallelConfig
from stagemesh.parallel.data.data_parallel import DataParallel
from tests.parallel.data.training import data, loss_of, make_model
from tests.support.ranks import run_ranks

SMALL = DataParallelConfig(bucket_bytes=100, first_bucket_bytes=10)


def test_an_abort_ends_the_backward_of_the_others() -> None:
    def on_rank(group: ProcessGroup) -> None:
        model = DataParallel(make_model(), process_group=group, config=SMALL)
        loss = loss_of(model, data(0))
        if group.rank == 1:
            group.abort("the disk of rank 1 is full")
            return
        started = time.perf_counter()
        with pytest.raises(GroupAborted, match="the disk of rank 1 is full"):
            loss.backward()
        assert time.perf_counter() - started < 5

    run_ranks(2, on_rank)


@pytest.mark.parametrize("backend", ["local", "grpc", "gloo"])
def test_a_rank_that_leaves(backend: str) -> None:
    def on_rank(group: ProcessGroup) -> None:
        model = DataParallel(make_model(), process_group=group, config=SMALL)
        if group.rank == 1:
            group.close()
            return
        started = time.perf_counter()
        with pytest.raises(CommError):
            loss_of(model, data(0)).backward()
        assert time.perf_counter() - started < 8
        # No step may follow; a new wrapper over a new group goes on.
        with pytest.raises(NotReady, match="wrap the module again"):
            loss_of(model, data(0))

    run_ranks(2, on_rank, backend=backend, timeout_seconds=4.0)


def test_a_rank_that_hangs() -> None:
    is_over = threading.Event()

    def on_rank(group: ProcessGroup) -> None:
        model = DataParallel(make_model(), process_group=group, config=SMALL)
        if group.rank == 1:
            is_over.wait(20)
            return
        started = time.perf_counter()
        try:
            with pytest.raises(CollectiveTimeout, match="waiting for rank 1"):
                loss_of(model, data(0)).backward()
        finally:
            is_over.set()
        assert 0.9 < time.perf_counter() - started < 5

    run_ranks(2, on_rank, timeout_seconds=1.0)


class Failing(nn.Module):
    """The backward of its first layer fails, when those after it are through."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.is_failing = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if self.is_failing:
            hidden.register_hook(self._fail)
        return self.last(hidden)

    def _fail(self, _: torch.Tensor) -> None:
        raise RuntimeError("out of memory")


def test_a_backward_that_fails_half_way() -> None:
    """The rank itself sees its own error; the ranks are out of step, and say so."""

    def on_rank(group: ProcessGroup) -> None:
        module = Failing()
        module.is_failing = group.rank == 0
        model = DataParallel(module, process_group=group, config=SMALL)
        loss = model(torch.ones(1, 4)).sum()
        if group.rank == 0:
            with pytest.raises(RuntimeError, match="out of memory"):
                loss.backward()
            for again in (lambda: model(torch.ones(1, 4)), model.sync_gradients):
                with pytest.raises(NotReady, match="an earlier backward failed"):
                    again()
            return
        with pytest.raises(CommError):
            loss.backward()

    run_ranks(2, on_rank, timeout_seconds=2.0)


def test_training_goes_on_over_a_new_group() -> None:
    def fail(group: ProcessGroup) -> nn.Module:
        module = Failing()
        model = DataParallel(module, process_group=group, config=SMALL)
        with pytest.raises((RuntimeError, StagemeshError)):
            model(torch.ones(1, 4)).sum().backward()
        module.is_failing = False
        return model.unwrap()

    modules = run_ranks(2, fail)

    def go_on(group: ProcessGroup) -> torch.Tensor:
        module = modules[group.rank]
        module.zero_grad()
        model = DataParallel(module, process_group=group, config=SMALL)
        model(torch.full((1, 4), float(group.rank))).sum().backward()
        grad: torch.Tensor = module.first.bias.grad
        return grad

    [ours, theirs] = run_ranks(2, go_on)
    assert torch.equal(ours, theirs)
