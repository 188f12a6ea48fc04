"""Agreement, order, bytes on the wire, and the end of a collective after a fault."""

import asyncio
import contextlib
import random
import re
import time

import pytest
import torch

from stagemesh.comm.async_group import AsyncGroup
from stagemesh.comm.local import LocalNetwork
from stagemesh.comm.reduce import ReduceOp
from stagemesh.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    CommError,
    ConfigError,
    GroupAborted,
    PeerLost,
)
from tests.comm.counting import CountingTransport
from tests.comm.groups import TRANSPORTS, groups, on_ranks


def _lists(tensors):
    return [tensor.tolist() for tensor in tensors]


def _ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


CALLS = {
    "broadcast": (lambda g: g.broadcast(_ones(1, dtype=torch.int64), src=0), "int64[1]"),
    "broadcast[src=1]": (lambda g: g.broadcast(_ones(1), src=1), "float32[1]"),
    "all_reduce(sum)": (lambda g: g.all_reduce(_ones(25)), "float32[25]"),
    "all_reduce(max)": (lambda g: g.all_reduce(_ones(25), op=ReduceOp.MAX), "float32[25]"),
    "all_reduce of int64": (lambda g: g.all_reduce(_ones(25, dtype=torch.int64)), "int64[25]"),
    "all_reduce of 24": (lambda g: g.all_reduce(_ones(24)), "float32[24]"),
    "reduce[dst=0](sum)": (lambda g: g.reduce(_ones(25), dst=0), "float32[25]"),
    "reduce[dst=1](sum)": (lambda g: g.reduce(_ones(25), dst=1), "float32[25]"),
    "reduce_scatter(sum)": (
        lambda g: g.reduce_scatter(_ones(25), [_ones(25)] * g.size),
        "float32[25]",
    ),
    "all_gather": (lambda g: g.all_gather([_ones(25) for _ in range(g.size)], _ones(25)), "[25]"),
    "gather[dst=0]": (lambda g: g.gather(_ones(25), dst=0), "float32[25]"),
    "scatter[src=0]": (
        lambda g: g.scatter(_ones(25), src=0, inputs=[_ones(25)] * (g.size * (g.rank == 0))),
        "float32[25]",
    ),
    "all_to_all": (
        lambda g: g.all_to_all([_ones(25) for _ in range(g.size)], [_ones(25)] * g.size),
        "float32",
    ),
    "all_gather_variable": (lambda g: g.all_gather_variable(_ones(25)), "float32[25]"),
    "barrier": (lambda g: g.barrier(), "barrier"),
}


@pytest.mark.parametrize("direct_bytes", [0, 2**30], ids=["chunked", "direct"])
@pytest.mark.parametrize("second", CALLS)
@pytest.mark.parametrize("first", CALLS)
async def test_different_calls_are_an_error_on_every_rank(first, second, direct_bytes):
    calls = [CALLS[first], CALLS[second]]
    async with groups("local", 2, direct_bytes=direct_bytes, chunk_bytes=16) as ranks:
        results = await on_ranks(ranks, lambda g: calls[g.rank][0](g))
        if first == second:
            # Control: the same pairs of calls do agree with themselves.
            assert not any(isinstance(result, Exception) for result in results)
        else:
            assert all(isinstance(error, CollectiveMismatch) for error in results)
            for name, (_, text) in zip((first, second), calls, strict=True):
                word = name.partition(" of ")[0]
                assert all(word in str(error) and text in str(error) for error in results)
            assert len({str(error) for error in results}) == 1
        await on_ranks(ranks, lambda g: g.barrier())
        results = await on_ranks(ranks, lambda g: g.all_reduce(_ones(2)))
    assert _lists(results) == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_one_of_three_ranks_that_differs_is_named_to_all(transport):
    async with groups(transport, 3) as ranks:
        start = time.monotonic()
        errors = await on_ranks(
            ranks, lambda g: g.barrier() if g.rank == 1 else g.broadcast(_ones(2), src=2)
        )
        assert time.monotonic() - start < 2
        for error in errors:
            assert isinstance(error, CollectiveMismatch)
            assert "rank 0 called broadcast[src=2] on float32[2], rank 1 called barrier," in str(
                error
            )
        results = await on_ranks(ranks, lambda g: g.all_reduce(_ones(1)))
    assert _lists(results) == [[3.0]] * 3


@pytest.mark.parametrize("sizes", [{}, {"direct_bytes": 0, "chunk_bytes": 32}])
@pytest.mark.parametrize("seed", range(8))
async def test_operations_that_are_under_way_at_once_do_not_mix(seed, sizes):
    """Each rank starts the same twelve in the same order, and waits for them in its own."""
    network = LocalNetwork(size=3, order=random.Random(seed))
    ranks = [
        AsyncGroup(network.join(rank), group_id="g", timeout_seconds=5, **sizes)
        for rank in range(3)
    ]

    def calls(group, number):
        value = torch.full((30,), float(10 * number + group.rank))
        return [
            lambda: group.all_reduce(value.clone()),
            lambda: group.broadcast(value.clone(), src=number % 3),
            lambda: group.all_gather_variable(value[: group.rank]),
            lambda: group.all_to_all_single(torch.zeros(30), value),
        ]

    async def run(group):
        tasks = [
            asyncio.create_task(call()) for number in range(3) for call in calls(group, number)
        ]
        order = random.Random(seed + group.rank).sample(range(12), 12)
        for index in order:
            await tasks[index]
        return [task.result() for task in tasks]

    for rank, result in enumerate(await on_ranks(ranks, run)):
        assert rank >= 0
        for number in range(3):
            base = 10.0 * number
            total, sent, pieces, rows = result[4 * number : 4 * number + 4]
            assert total.tolist() == [3 * base + 3] * 30
            assert sent.tolist() == [base + number % 3] * 30
            assert _lists(pieces) == [[], [base + 1], [base + 2] * 2]
            assert rows.tolist() == [base + source for source in range(3) for _ in range(10)]


async def test_the_order_of_two_operations_is_that_of_their_start():
    """Control of the test above: another order on one rank is found out."""
    async with groups("local", 2) as ranks:

        async def run(group):
            calls = [group.all_reduce(_ones(1)), group.all_reduce(_ones(2))]
            if group.rank:
                calls.reverse()
            tasks = [asyncio.create_task(call) for call in calls]
            return await asyncio.gather(*tasks, return_exceptions=True)

        results = await on_ranks(ranks, run)
    assert all(isinstance(error, CollectiveMismatch) for pair in results for error in pair)


MEBIBYTE = 2**20
# Bytes that one rank sends, as a part of the tensor's: of root, of the others.
TRAFFIC = {
    "all_reduce": (
        lambda g, x: g.all_reduce(x),
        lambda size: [2 * (size - 1) / size] * size,
    ),
    "reduce": (
        lambda g, x: g.reduce(x, dst=0),
        lambda size: [(size - 1) / size] + [1.0] * (size - 1),
    ),
    "reduce_scatter": (
        lambda g, x: g.reduce_scatter_tensor(torch.zeros(x.numel() // g.size), x),
        lambda size: [(size - 1) / size] * size,
    ),
    "all_gather": (
        lambda g, x: g.all_gather_tensor(torch.zeros_like(x), x[: x.numel() // g.size]),
        lambda size: [(size - 1) / size] * size,
    ),
    "broadcast": (
        lambda g, x: g.broadcast(x, src=0),
        lambda size: [1.0] + [(size - 2) / (size - 1)] * (size - 1),
    ),
    "gather": (lambda g, x: g.gather(x, dst=0), lambda size: [0.0] + [1.0] * (size - 1)),
    "scatter": (
        lambda g, x: g.scatter(
            torch.zeros(x.numel() // g.size),
            src=0,
            inputs=x.chunk(g.size) if g.rank == 0 else None,
        ),
        lambda size: [(size - 1) / size] + [0.0] * (size - 1),
    ),
    "all_to_all": (
        lambda g, x: g.all_to_all_single(torch.zeros_like(x), x),
        lambda size: [(size - 1) / size] * size,
    ),
}


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", TRAFFIC)
async def test_a_large_tensor_moves_no_more_than_it_must(name, size):
    run, expected = TRAFFIC[name]
    num_elements = 3 * MEBIBYTE // 4
    network = LocalNetwork(size=size)
    counts = [CountingTransport(network.join(rank)) for rank in range(size)]
    ranks = [
        AsyncGroup(count, group_id="g", timeout_seconds=20, chunk_bytes=64 * 1024)
        for count in counts
    ]
    results = await on_ranks(ranks, lambda g: run(g, torch.arange(float(num_elements)) + g.rank))
    assert not any(isinstance(result, Exception) for result in results)
    moved = [count.num_bytes / (4 * num_elements) for count in counts]
    assert moved == pytest.approx(expected(size), rel=0.05, abs=0.001)


async def test_a_small_tensor_takes_one_message_per_peer():
    network = LocalNetwork(size=3)
    counts = [CountingTransport(network.join(rank)) for rank in range(3)]
    ranks = [AsyncGroup(count, group_id="g", timeout_seconds=5) for count in counts]
    for run, _ in TRAFFIC.values():
        before = [count.num_messages for count in counts]
        await on_ranks(ranks, lambda g, run=run: run(g, torch.ones(300)))
        sent = [count.num_messages - b for count, b in zip(counts, before, strict=True)]
        assert sent == [2, 2, 2]


async def test_the_counter_sees_the_chunks_of_a_large_tensor():
    """Control of the two tests above."""
    network = LocalNetwork(size=3)
    counts = [CountingTransport(network.join(rank)) for rank in range(3)]
    ranks = [
        AsyncGroup(count, group_id="g", timeout_seconds=5, direct_bytes=0, chunk_bytes=100)
        for count in counts
    ]
    await on_ranks(ranks, lambda g: g.all_reduce(torch.ones(300)))
    # 400 bytes per piece: the agreement, then 4 chunks to each of two ranks in both phases.
    assert [count.num_messages for count in counts] == [2 + 8 + 8] * 3
    # A direct one of that size would send the tensor to both.
    assert [count.num_bytes for count in counts] == [4 * 400] * 3


async def test_a_step_that_fails_raises_there_and_the_others_name_the_rank():
    network = LocalNetwork(size=3)
    ranks = [
        AsyncGroup(network.join(rank), group_id="g", timeout_seconds=0.3, direct_bytes=0)
        for rank in range(3)
    ]
    await on_ranks(ranks, lambda g: g.barrier())
    # The barrier took two messages, and the agreement takes two more.
    assert network.num_sent(1) == 2
    network.fail_at(rank=1, step=4)
    errors = await on_ranks(ranks, lambda g: g.all_reduce(torch.ones(30)))
    assert type(errors[1]) is CommError
    assert "rank 1 fails at step 4" in str(errors[1])
    for error in (errors[0], errors[2]):
        assert isinstance(error, CollectiveTimeout)
        assert re.search(r"waiting for rank (0, |2, )?1", str(error))
    later = await on_ranks(ranks, lambda g: g.barrier())
    assert all(isinstance(error, GroupAborted) for error in later)


async def test_an_error_of_ones_own_is_injected():
    network = LocalNetwork(size=2)
    group = AsyncGroup(network.join(0), group_id="g", timeout_seconds=1)
    network.join(1)
    network.fail_at(rank=0, step=1, error=OSError("no buffer space"))
    await group.send(torch.ones(1), dst=1)
    with pytest.raises(OSError, match="no buffer space"):
        await group.send(torch.ones(1), dst=1)
    await group.send(torch.ones(1), dst=1)


async def test_a_rank_that_hangs_is_named_at_the_deadline():
    network = LocalNetwork(size=3)
    ranks = [AsyncGroup(network.join(rank), group_id="g", timeout_seconds=0.3) for rank in range(3)]
    network.hang_at(rank=2, step=2)
    results = await on_ranks(ranks, lambda g: g.all_reduce(torch.ones(2)))
    assert _lists(results) == [[3.0, 3.0]] * 3
    errors = await on_ranks(ranks[:2], lambda g: g.all_reduce(torch.ones(2)))
    hung = asyncio.ensure_future(ranks[2].send(torch.ones(1), dst=0, timeout=0.2))
    for error in errors:
        assert isinstance(error, CollectiveTimeout)
        assert "waiting for rank 2" in str(error)
    with pytest.raises(CollectiveTimeout):
        await hung


@pytest.mark.parametrize("step", [0, 1, 3, 5, 9])
@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "all_gather"])
async def test_a_rank_that_dies_at_any_step_is_lost_to_all(name, step):
    run, _ = TRAFFIC[name]
    network = LocalNetwork(size=3, order=random.Random(step))
    ranks = [
        AsyncGroup(
            network.join(rank), group_id="g", timeout_seconds=5, direct_bytes=0, chunk_bytes=64
        )
        for rank in range(3)
    ]
    network.drop_peer(0, step=step)
    start = time.monotonic()
    errors = await on_ranks(ranks, lambda g: run(g, torch.ones(300)))
    assert time.monotonic() - start < 2
    assert all(isinstance(error, PeerLost) for error in errors)
    assert [error.rank for error in errors] == [0, 0, 0]


async def test_a_fresh_incarnation_works_after_a_fault():
    network = LocalNetwork(size=2)

    def join(incarnation):
        return [
            AsyncGroup(
                network.join(rank, incarnation=incarnation), group_id="g", timeout_seconds=0.3
            )
            for rank in range(2)
        ]

    network.fail_at(rank=0, step=0)
    assert all(isinstance(e, CommError) for e in await on_ranks(join(1), lambda g: g.barrier()))
    results = await on_ranks(join(2), lambda g: g.all_reduce(torch.ones(1)))
    assert _lists(results) == [[2.0]] * 2


async def test_faults_have_checked_coordinates():
    network = LocalNetwork(size=2)
    group = AsyncGroup(network.join(0), group_id="g", timeout_seconds=1)
    network.join(1)
    await group.send(torch.ones(1), dst=1)
    for fault in (
        lambda: network.fail_at(rank=0, step=0),
        lambda: network.hang_at(rank=2, step=0),
        lambda: network.drop_peer(-1, step=0),
        lambda: network.drop_peer(2),
    ):
        with pytest.raises(ConfigError, match=r"step|rank"):
            fault()


async def test_an_abort_in_the_middle_wakes_every_operation():
    async with groups("local", 3, timeout_seconds=20, direct_bytes=0) as ranks:
        tasks = [
            asyncio.ensure_future(run(group, torch.ones(300)))
            for group in ranks[:2]
            for run, _ in TRAFFIC.values()
        ]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in tasks)
        start = time.monotonic()
        await ranks[2].abort("the disk is full")
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert time.monotonic() - start < 1
    assert all(isinstance(error, GroupAborted) for error in errors)
    assert all("the disk is full" in str(error) for error in errors)


async def test_a_failed_collective_leaves_the_tensors_as_they_were():
    network = LocalNetwork(size=2)
    ranks = [
        AsyncGroup(
            network.join(rank), group_id="g", timeout_seconds=0.2, direct_bytes=0, chunk_bytes=64
        )
        for rank in range(2)
    ]
    network.hang_at(rank=0, step=4)
    tensors = [torch.full((300,), float(rank)) for rank in range(2)]
    errors = await on_ranks(ranks, lambda g: g.broadcast(tensors[g.rank], src=0))
    assert all(isinstance(error, CollectiveTimeout) for error in errors)
    assert [tensor.unique().tolist() for tensor in tensors] == [[0.0], [1.0]]


async def test_windows_of_one_chunk_block_no_operation():
    """Out of credit in all directions: progress needs each rank to keep taking."""
    for run, _ in TRAFFIC.values():
        network = LocalNetwork(size=3, order=random.Random(1), capacity_bytes=600)
        async with contextlib.AsyncExitStack() as stack:
            ranks = [
                AsyncGroup(
                    network.join(rank),
                    group_id="g",
                    timeout_seconds=20,
                    direct_bytes=0,
                    chunk_bytes=400,
                )
                for rank in range(3)
            ]
            for group in ranks:
                stack.push_async_callback(group.close)
            results = await on_ranks(ranks, lambda g, run=run: run(g, torch.ones(3000)))
            assert not any(isinstance(result, Exception) for result in results)
