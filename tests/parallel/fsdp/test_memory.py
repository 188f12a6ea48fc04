"""Bytes per rank, counted on the storages that are really there, against the formulas."""

import gc
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.parallel.fsdp.config import ShardingStrategy
from stagemesh.parallel.fsdp.fsdp import Fsdp
from tests.parallel.fsdp.training import Block, batches, config, loss_of, make_model, wrap
from tests.support.ranks import run_ranks

FULL = ShardingStrategy.FULL_SHARD
GRAD_OP = ShardingStrategy.SHARD_GRAD_OP
NONE = ShardingStrategy.NO_SHARD

TOTAL = 4 * sum(parameter.numel() for parameter in make_model().parameters())
BLOCK = 4 * sum(parameter.numel() for parameter in Block().parameters())
ROOT = 4 * make_model().embedding.weight.numel()
NUM_FLATS = 5


def storage_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Memory behind tensors, each block once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors if t is not None}
    return sum(storage.nbytes() for storage in storages.values())


def whole_bytes(originals: list[nn.Parameter]) -> int:
    """Memory of the parameters that the modules compute with."""
    return storage_bytes(originals)


@pytest.mark.parametrize("strategy", list(ShardingStrategy))
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_what_is_held_between_steps(world_size: int, strategy: ShardingStrategy) -> None:
    """Parameters, gradients and Adam's two moments: all, or one R-th of each."""

    def on_rank(group: ProcessGroup) -> list[int]:
        module = make_model(seed=group.rank)
        originals = list(module.parameters())
        model = Fsdp(module, process_group=group, config=config(sharding_strategy=strategy))
        optimizer = torch.optim.Adam(model.parameters())
        loss_of(model, batches(1)[0]).backward()
        optimizer.step()
        shards = list(model.parameters())
        moments = [value for s in optimizer.state.values() for value in s.values() if value.dim()]
        return [
            # Where nothing is cut the originals lie in the shards' memory.
            storage_bytes([*shards, *originals]),
            storage_bytes(shard.grad for shard in shards),
            storage_bytes(moments),
        ]

    parts = 1 if strategy is NONE else world_size
    padding = NUM_FLATS * 4 if parts > 1 else 0
    for parameters, gradients, moments in run_ranks(world_size, on_rank):
        assert TOTAL / parts <= parameters <= TOTAL / parts + padding
        assert TOTAL / parts <= gradients <= TOTAL / parts + padding
        # Moments have no padding, and the last rank may have fewer.
        assert 2 * (TOTAL / parts - world_size * padding) <= moments
        assert moments <= 2 * (TOTAL / parts + padding)


@pytest.mark.parametrize(
    ("strategy", "in_forward", "after_forward"),
    [
        # A unit and the next one; after it the root and the unit that the backward begins with.
        (FULL, ROOT + 2 * BLOCK, ROOT + BLOCK),
        (GRAD_OP, TOTAL, TOTAL),
    ],
)
def test_what_is_held_within_a_step(
    strategy: ShardingStrategy, in_forward: int, after_forward: int
) -> None:
    def on_rank(group: ProcessGroup) -> list[int]:
        module = make_model(seed=group.rank)
        originals = list(module.parameters())
        held: list[int] = []
        for layer in module.layers:
            layer.register_forward_hook(lambda *_: held.append(whole_bytes(originals)))
            layer.register_full_backward_hook(lambda *_: held.append(whole_bytes(originals)))
        model = Fsdp(module, process_group=group, config=config(sharding_strategy=strategy))
        assert whole_bytes(originals) == 0
        loss_of(model, batches(1)[0]).backward()  # the first has nothing to prefetch by
        model.reset_peak_memory()
        held.clear()
        loss = loss_of(model, batches(1)[0])
        after = whole_bytes(originals)
        loss.backward()
        return [max(held), after, model.memory_stats().peak_gathered_bytes, whole_bytes(originals)]

    padding = NUM_FLATS * 4
    for peak, after, measured, at_the_end in run_ranks(2, on_rank):
        assert in_forward <= peak <= in_forward + padding
        assert after_forward <= after <= after_forward + padding
        assert peak <= measured <= in_forward + padding
        assert at_the_end == 0


def test_gradients_are_not_kept_whole() -> None:
    """At most those of the units whose reductions run, and never those of the whole model."""

    def on_rank(group: ProcessGroup) -> int:
        module = make_model(seed=group.rank)
        originals = list(module.parameters())
        peaks: list[int] = []
        for layer in module.layers:
            layer.register_full_backward_hook(
                lambda *_: peaks.append(storage_bytes(p.grad for p in originals))
            )
        model = Fsdp(module, process_group=group, config=config())
        loss_of(model, batches(1)[0]).backward()
        assert all(p.grad is None for p in originals)
        return max(peaks)

    assert all(peak <= ROOT + BLOCK for peak in run_ranks(2, on_rank))


@pytest.mark.parametrize(
    ("dtype", "strategy", "world_size", "percent"),
    [
        (torch.float32, FULL, 4, 75.0),
        (torch.float64, FULL, 2, 50.0),
        (torch.bfloat16, GRAD_OP, 2, 50.0),
        (torch.float32, NONE, 2, 0.0),
        (torch.float32, FULL, 1, 0.0),
    ],
)
def test_stats(
    dtype: torch.dtype, strategy: ShardingStrategy, world_size: int, percent: float
) -> None:
    def on_rank(group: ProcessGroup) -> Any:
        settings = config(sharding_strategy=strategy)
        model = Fsdp(make_model().to(dtype), process_group=group, config=settings)
        loss_of(model, batches(1)[0]).backward()
        return model.memory_stats()

    total = TOTAL // 4 * dtype.itemsize
    for stats in run_ranks(world_size, on_rank):
        assert stats.total_parameter_bytes == total
        assert stats.local_shard_bytes == pytest.approx(total * (100 - percent) / 100, rel=0.01)
        assert stats.saved_bytes == total - stats.local_shard_bytes
        assert stats.reduction_percent == pytest.approx(percent, abs=0.5)
        assert stats.gathered_bytes == 0
        assert (stats.peak_gathered_bytes == 0) is (percent == 0.0)


def test_the_peak_follows_the_dtype_of_the_computation() -> None:
    def on_rank(group: ProcessGroup) -> list[int]:
        peaks = []
        for mixed in (False, True):
            model = wrap(group, mixed_precision=mixed)
            loss_of(model, batches(1)[0]).backward()
            peaks.append(model.memory_stats().peak_gathered_bytes)
        return peaks

    for exact, mixed in run_ranks(2, on_rank):
        assert exact == pytest.approx(2 * mixed, rel=0.01)


def test_originals_are_freed_when_wrapped() -> None:
    """Nothing else keeps them: not the wrapper, not autograd."""

    def on_rank(group: ProcessGroup) -> int:
        model = wrap(group)
        gc.collect()
        return storage_bytes([*model.parameters(), *model.buffers()])

    for held in run_ranks(4, on_rank):
        assert held <= TOTAL / 4 + NUM_FLATS * 4 + 4


def test_offloaded_shards_train_alike() -> None:
    """On the CPU there is nowhere to offload to: the same bits, and shards in host memory."""

    def on_rank(group: ProcessGroup) -> bool:
        found = []
        for is_offloaded in (False, True):
            model = wrap(group, cpu_offload=is_offloaded)
            loss_of(model, batches(1)[0]).backward()
            assert all(p.is_cpu and p.grad.is_cpu for p in model.parameters())
            found.append([p.grad for p in model.parameters()])
        return all(torch.equal(one, other) for one, other in zip(*found, strict=True))

    assert run_ranks(2, on_rank) == [True, True]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("is_flattened", [True, False])
def test_offloaded_shards_are_in_host_memory(is_flattened: bool) -> None:
    def on_rank(group: ProcessGroup) -> float:
        module = make_model().cuda()
        originals = list(module.parameters())
        settings = config(cpu_offload=True, flatten_parameters=is_flattened)
        model = Fsdp(module, process_group=group, config=settings)
        loss = loss_of(model, batches(1)[0].cuda())
        loss.backward()
        assert all(p.is_cpu and p.grad.is_cpu for p in model.parameters())
        assert all(p.is_cuda for p in originals)
        torch.optim.Adam(model.parameters()).step()
        return loss.item()

    expected = loss_of(make_model(), batches(1)[0]).item()
    assert run_ranks(2, on_rank) == pytest.approx([expected] * 2, rel=1e-4)
