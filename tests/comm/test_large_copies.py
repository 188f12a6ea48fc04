"""Whole tensors are copied beside the event loop when they are large."""

import asyncio
import threading
import time
from typing import Any

import pytest
import torch

from stagemesh.comm import large_copies, movement
from stagemesh.comm.large_copies import run_copy
from stagemesh.comm.reduce import ReduceOp
from stagemesh.errors import CollectiveTimeout
from tests.comm.groups import groups, on_ranks

LARGE = large_copies._OFF_LOOP_BYTES

# Operations on a column of n numbers, which each has to copy; what they write to is one, too.
OPERATIONS: dict[str, Any] = {
    "all_reduce": lambda g, x: g.all_reduce(x),
    "reduce": lambda g, x: g.reduce(x, dst=0),
    "broadcast": lambda g, x: g.broadcast(x, src=0),
    "reduce_scatter": lambda g, x: g.reduce_scatter(x, [x.clone(), x], op=ReduceOp.SUM),
    "all_gather": lambda g, x: g.all_gather([x.clone(), x.clone()], x),
    "gather": lambda g, x: g.gather(x, dst=0),
    "scatter": lambda g, x: g.scatter(x, src=0, inputs=None if g.rank else [x.clone(), x]),
    "all_to_all": lambda g, x: g.all_to_all([x.clone(), x.clone()], [x, x]),
    "all_gather_variable": lambda g, x: g.all_gather_variable(x),
    "gather_variable": lambda g, x: g.gather_variable(x, dst=0),
    "recv": lambda g, x: g.recv(x, src=0) if g.rank else g.send(x.contiguous(), dst=1),
}


@pytest.mark.parametrize("name", OPERATIONS)
async def test_only_small_copies_are_made_on_the_loops_thread(name, monkeypatch):
    loop_thread = threading.get_ident()
    copied: dict[bool, int] = {True: 0, False: 0}

    def watched(inner: Any, num_bytes_of: Any) -> Any:
        def copy(*arguments: Any, **settings: Any) -> Any:
            is_on_loop = threading.get_ident() == loop_thread
            copied[is_on_loop] = max(copied[is_on_loop], num_bytes_of(arguments))
            return inner(*arguments, **settings)

        return copy

    def of_target(arguments: Any) -> int:
        return arguments[0].numel() * arguments[0].element_size()

    def of_source(arguments: Any) -> int:
        return 0 if arguments[0].is_contiguous() else of_target(arguments)

    for module in (large_copies, movement):
        monkeypatch.setattr(module, "write", watched(module.write, of_target))
    monkeypatch.setattr(large_copies, "flat_bytes", watched(large_copies.flat_bytes, of_source))
    shaped = watched(movement.shaped, lambda arguments: sum(map(len, arguments[0])))
    monkeypatch.setattr(movement, "shaped", shaped)
    async with groups("local", 2, timeout_seconds=20) as ranks:
        for numel in (1000, LARGE // 4):
            columns = [torch.arange(float(2 * numel)).view(numel, 2)[:, 0] for _ in ranks]
            results = await on_ranks(ranks, lambda g, c=columns: OPERATIONS[name](g, c[g.rank]))
            assert not any(isinstance(result, Exception) for result in results), results
            if numel == 1000:
                # Control: these were seen, and on the loop.
                assert copied[True]
                assert not copied[False]
    assert copied[True] < LARGE
    assert copied[False] >= LARGE


async def test_the_loop_goes_on_while_a_large_copy_runs():
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    for num_bytes, goes_on in ((LARGE, True), (LARGE - 1, False)):
        ticking = asyncio.ensure_future(tick())
        await asyncio.sleep(0)
        ticks = 0
        await run_copy(lambda: time.sleep(0.2), num_bytes=num_bytes)
        assert (ticks > 2) is goes_on
        ticking.cancel()


async def test_a_copy_that_is_cancelled_has_ended():
    ended = threading.Event()

    def copy() -> None:
        time.sleep(0.2)
        ended.set()

    running = asyncio.ensure_future(run_copy(copy, num_bytes=LARGE))
    await asyncio.sleep(0.05)
    running.cancel()
    await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended.is_set()


async def test_a_deadline_in_a_copy_is_one_of_the_operation(monkeypatch):
    ended = threading.Event()

    def slow(target: torch.Tensor, chunks: Any) -> None:
        time.sleep(0.6)
        ended.set()

    monkeypatch.setattr(large_copies, "write", slow)
    async with groups("local", 1) as (group,):
        with pytest.raises(CollectiveTimeout, match="all_reduce"):
            await group.all_reduce(torch.zeros(LARGE // 4), timeout=0.3)
        assert ended.is_set()
