"""Training with DataParallel ends where one process does."""

from collections.abc import Callable

import pytest
import torch

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.parallel.data.config import DataParallelConfig
from stagemesh.parallel.data.data_parallel import DataParallel
from tests.parallel.data.training import (
    BATCH,
    data,
    distance,
    loss_of,
    make_model,
    part,
    reference,
    train,
)
from tests.support.ranks import run_ranks

SMALL_BUCKETS = DataParallelConfig(bucket_bytes=600, first_bucket_bytes=64)
ONE_BUCKET = DataParallelConfig()

Backward = Callable[[DataParallel, ProcessGroup], Callable[[torch.Tensor], None]]


def plain(model: DataParallel, group: ProcessGroup) -> Callable[[torch.Tensor], None]:
    """Equal parts on the ranks, no weights."""
    return lambda tokens: loss_of(model, part(tokens, group.rank, group.size)).backward()


def accumulated(model: DataParallel, group: ProcessGroup) -> Callable[[torch.Tensor], None]:
    """Three equal micro-steps, whose losses are divided by their number."""

    def backward(tokens: torch.Tensor) -> None:
        own = part(tokens, group.rank, group.size)
        with model.no_sync():
            for index in range(2):
                (loss_of(model, part(own, index, 3)) / 3).backward()
        (loss_of(model, part(own, 2, 3)) / 3).backward()

    return backward


def late(model: DataParallel, group: ProcessGroup) -> Callable[[torch.Tensor], None]:
    """All micro-steps without reduction, then one."""

    def backward(tokens: torch.Tensor) -> None:
        own = part(tokens, group.rank, group.size)
        with model.no_sync():
            for index in range(2):
                (loss_of(model, part(own, index, 2)) / 2).backward()
        model.sync_gradients()

    return backward


def weighted(model: DataParallel, group: ProcessGroup) -> Callable[[torch.Tensor], None]:
    """Parts of all sizes: rank 0 has 1 sample and then 4; others share the rest."""

    def backward(tokens: torch.Tensor) -> None:
        first, rest = tokens[:5], tokens[5:]
        if group.rank == 0:
            parts = [first[:1], first[1:]]
        else:
            own = part(rest, group.rank - 1, group.size - 1)
            parts = [own[:-1], own[-1:]]
        with model.no_sync():
            model.backward(loss_of(model, parts[0]), weight=len(parts[0]))
        model.backward(loss_of(model, parts[1]), weight=len(parts[1]))

    return backward


def run(
    backward: Backward,
    *,
    world_size: int = 2,
    backend: str = "local",
    config: DataParallelConfig = SMALL_BUCKETS,
    dtype: torch.dtype = torch.float32,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    to_none: bool = True,
) -> list[dict[str, torch.Tensor]]:
    def on_rank(group: ProcessGroup) -> dict[str, torch.Tensor]:
        model = DataParallel(
            make_model(seed=group.rank, dtype=dtype), process_group=group, config=config
        )
        return train(model, backward(model, group), optimizer=optimizer, to_none=to_none)

    results = run_ranks(world_size, on_rank, backend=backend)
    for other in results[1:]:
        assert all(torch.equal(other[name], value) for name, value in results[0].items())
    return results


@pytest.mark.parametrize(
    ("backward", "world_size", "backend", "config"),
    [
        (plain, 1, "local", SMALL_BUCKETS),
        (plain, 2, "local", SMALL_BUCKETS),
        (plain, 3, "local", ONE_BUCKET),
        (plain, 2, "grpc", ONE_BUCKET),
        (plain, 2, "gloo", SMALL_BUCKETS),
        (accumulated, 1, "local", SMALL_BUCKETS),
        (accumulated, 2, "local", SMALL_BUCKETS),
        (late, 2, "local", ONE_BUCKET),
        (weighted, 2, "local", SMALL_BUCKETS),
        (weighted, 3, "local", ONE_BUCKET),
    ],
)
def test_twenty_steps(
    backward: Backward, world_size: int, backend: str, config: DataParallelConfig
) -> None:
    [ours, *_] = run(backward, world_size=world_size, backend=backend, config=config)
    assert distance(ours, reference()) < 1e-5


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_may_be_zeroed_in_place(to_none: bool) -> None:
    # SGD: weight decay of AdamW would change a parameter whose gradient is zero and not None.
    [ours, _] = run(plain, optimizer=torch.optim.SGD, to_none=to_none)
    assert distance(ours, reference(optimizer=torch.optim.SGD)) < 1e-5


def test_weights_in_a_group_of_one() -> None:
    def on_rank(group: ProcessGroup) -> dict[str, torch.Tensor]:
        model = DataParallel(make_model(), process_group=group)

        def backward(tokens: torch.Tensor) -> None:
            with model.no_sync():
                model.backward(loss_of(model, tokens[:1]), weight=1)
            model.backward(loss_of(model, tokens[1:]), weight=BATCH - 1)

        return train(model, backward)

    [ours] = run_ranks(1, on_rank)
    assert distance(ours, reference()) < 1e-5


@pytest.mark.parametrize(
    ("dtype", "reduce_dtype", "tolerance"),
    [
        # Both sides round each step's parameters to 8 bits; their roundings differ.
        (torch.bfloat16, None, 3e-2),
        (torch.bfloat16, torch.float32, 3e-2),
        # Gradients rounded to 8 bits move AdamW's steps, which are about as large for any gradient.
        (torch.float32, torch.bfloat16, 2e-2),
        (torch.float32, torch.float16, 5e-3),
    ],
)
def test_sixteen_bits(
    dtype: torch.dtype, reduce_dtype: torch.dtype | None, tolerance: float
) -> None:
    config = DataParallelConfig(first_bucket_bytes=64, reduce_dtype=reduce_dtype)
    [ours, _] = run(plain, dtype=dtype, config=config)
    assert all(value.dtype == dtype for value in ours.values())
    assert distance(ours, reference(dtype=dtype)) < tolerance


def test_fewer_bits_travel() -> None:
    """Negative control of the above: the reduction in 16 bits is not that in 32."""
    config = DataParallelConfig(reduce_dtype=torch.bfloat16)
    [ours, _] = run(plain, config=config)
    assert distance(ours, reference()) > 1e-5


def not_reduced(model: DataParallel, group: ProcessGroup) -> Callable[[torch.Tensor], None]:
    """Wrong: rank 1's data is lost."""

    def backward(tokens: torch.Tensor) -> None:
        with model.no_sync():
            loss_of(model, part(tokens, 0, group.size)).backward()

    return backward


def not_weighted(model: DataParallel, group: ProcessGroup) -> Callable[[torch.Tensor], None]:
    """Wrong: parts of 3 and of 9 samples count the same."""
    return lambda tokens: loss_of(model, tokens[:3] if group.rank else tokens[3:]).backward()


@pytest.mark.parametrize("backward", [not_reduced, not_weighted])
def test_the_comparison_sees_wrong_training(backward: Backward) -> None:
    """Negative controls."""
    [ours, _] = run(backward)
    assert distance(ours, reference()) > 1e-3


def test_gradients_of_one_backward() -> None:
    model = make_model()
    loss_of(model, data(0)).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def on_rank(group: ProcessGroup) -> dict[str, torch.Tensor]:
        model = DataParallel(make_model(), process_group=group, config=SMALL_BUCKETS)
        plain(model, group)(data(0))
        named = model.module.named_parameters()
        return {name: p.grad for name, p in named if p.grad is not None}

    for ours in run_ranks(2, on_rank):
        assert distance(ours, expected) < 1e-6
