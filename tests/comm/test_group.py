"""AsyncGroup against a reference in one process, over each transport."""

import asyncio
import random
import time
import warnings

import numpy as np
import pytest
import torch

from stagemesh.comm.async_group import AsyncGroup
from stagemesh.comm.local import LocalNetwork
from stagemesh.comm.reduce import ReduceOp, reduce_in_order
from stagemesh.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    ConfigError,
    GroupAborted,
    PeerLost,
)
from tests.comm.groups import TRANSPORTS, groups, on_ranks

NUMPY_OPS = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}
INTEGERS = [
    getattr(torch, name)
    for name in ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
]


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _random(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("direct_bytes", [0, 2**30], ids=["chunked", "direct"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_all_reduce_gives_the_sum_in_rank_order_to_all(transport, size, direct_bytes):
    # 1001 elements divide by no size; chunks of 512 bytes make several per rank.
    tensors = [_random(rank, 7, 143) for rank in range(size)]
    expected = sum(tensors[1:], start=tensors[0].clone())
    # Control: in another order the bits differ, so equality below is about the order.
    backwards = sum(tensors[-2::-1], start=tensors[-1].clone())
    assert (_bits(backwards) != _bits(expected)) == (size > 2)
    async with groups(transport, size, direct_bytes=direct_bytes, chunk_bytes=512) as ranks:
        results = await on_ranks(ranks, lambda group: group.all_reduce(tensors[group.rank]))
        assert {_bits(result) for result in results} == {_bits(expected)}
        assert all(result is tensors[rank] for rank, result in enumerate(results))


async def test_direct_and_chunked_give_the_same_bits():
    inputs = [_random(rank, 4099).to(torch.bfloat16) for rank in range(3)]
    seen = set()
    for direct_bytes in (0, 2**30):
        async with groups("local", 3, direct_bytes=direct_bytes, chunk_bytes=100) as ranks:
            results = await on_ranks(
                ranks, lambda group: group.all_reduce(inputs[group.rank].clone(), op=ReduceOp.AVG)
            )
            seen |= {_bits(result) for result in results}
    assert len(seen) == 1
    # In bfloat16 throughout the result would be another one.
    naive = ((inputs[0] + inputs[1]) + inputs[2]) / 3
    assert _bits(naive) not in seen


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("op", list(NUMPY_OPS), ids=lambda op: op.value)
def test_integers_reduce_as_numpy_does(dtype, op):
    generator = torch.Generator().manual_seed(3)
    raw = [
        torch.randint(0, 256, (64 * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        for _ in range(3)
    ]
    parts = [part.view(dtype) for part in raw]
    expected = parts[0].numpy()
    for part in parts[1:]:
        expected = NUMPY_OPS[op](expected, part.numpy())
    result = reduce_in_order(parts, op=op)
    assert result.dtype == dtype
    assert np.array_equal(result.numpy(), expected)


def test_an_overflowing_sum_of_bytes_wraps_as_torch_does():
    parts = [torch.tensor([200], dtype=torch.uint8), torch.tensor([100], dtype=torch.uint8)]
    result = reduce_in_order(parts, op=ReduceOp.SUM)
    assert (result.tolist(), result.dtype) == ([44], torch.uint8)


@pytest.mark.parametrize(
    "dtype",
    [*INTEGERS, torch.float16, torch.bfloat16, torch.float32, torch.float64],
    ids=str,
)
@pytest.mark.parametrize(
    ("op", "expected"),
    [(ReduceOp.SUM, [3, 30]), (ReduceOp.MAX, [2, 20]), (ReduceOp.MIN, [1, 10])],
)
async def test_each_dtype_in_each_operation(dtype, op, expected):
    async with groups("local", 2) as ranks:
        tensors = [torch.tensor([r + 1, 10 * (r + 1)], dtype=dtype) for r in range(2)]
        results = await on_ranks(ranks, lambda g: g.all_reduce(tensors[g.rank], op=op))
    assert [(result.tolist(), result.dtype) for result in results] == [(expected, dtype)] * 2


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (ReduceOp.SUM, [True, True, False]),
        (ReduceOp.MAX, [True, True, False]),
        (ReduceOp.MIN, [True, False, False]),
        (ReduceOp.PRODUCT, [True, False, False]),
    ],
)
async def test_bool_is_or_and_and_stored_as_0_and_1(op, expected):
    tensors = [torch.tensor([True, False, False]), torch.tensor([True, True, False])]
    async with groups("local", 2) as ranks:
        results = await on_ranks(ranks, lambda g: g.all_reduce(tensors[g.rank], op=op))
    for result in results:
        assert result.tolist() == expected
        assert result.dtype == torch.bool
        assert set(result.view(torch.uint8).tolist()) <= {0, 1}


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        (torch.int64, ReduceOp.AVG),
        (torch.bool, ReduceOp.AVG),
        (torch.complex64, ReduceOp.MIN),
        (torch.float8_e8m0fnu, ReduceOp.SUM),
        (torch.float4_e2m1fn_x2, ReduceOp.MAX),
    ],
    ids=str,
)
async def test_pairs_without_a_meaning_are_refused_on_all_ranks_and_break_nothing(dtype, op):
    raw = torch.ones(dtype.itemsize * 2, dtype=torch.uint8)
    for size in (1, 2):
        async with groups("local", size) as ranks:
            errors = await on_ranks(ranks, lambda g: g.all_reduce(raw.view(dtype).clone(), op=op))
            for error in errors:
                assert isinstance(error, ConfigError)
                assert str(dtype).removeprefix("torch.") in str(error)
            results = await on_ranks(ranks, lambda g: g.all_reduce(torch.ones(1)))
            assert [result.item() for result in results] == [size] * size


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32])
async def test_narrow_types_are_summed_in_a_wider_one(dtype):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ComplexHalf")
        parts = [torch.tensor([1.0, -2.0]).to(dtype), torch.tensor([0.5, 1.0]).to(dtype)]
        result = reduce_in_order(parts, op=ReduceOp.SUM)
        assert result.dtype == dtype
        assert result.to(torch.complex64).real.tolist() == [1.5, -1.0]


async def test_nan_wins_min_and_max():
    tensors = [torch.tensor([1.0, float("nan")]), torch.tensor([float("nan"), 1.0])]
    for op in (ReduceOp.MIN, ReduceOp.MAX):
        assert reduce_in_order(tensors, op=op).isnan().all()


@pytest.mark.parametrize("direct_bytes", [0, 2**30])
@pytest.mark.parametrize("transport", ["local", "grpc"])
async def test_a_column_is_reduced_and_its_neighbour_is_left_alone(transport, direct_bytes):
    bases = [torch.arange(6.0).reshape(3, 2) + 10 * rank for rank in range(2)]
    async with groups(transport, 2, direct_bytes=direct_bytes, chunk_bytes=4) as ranks:
        await on_ranks(ranks, lambda g: g.all_reduce(bases[g.rank][:, 0]))
    assert [base[:, 0].tolist() for base in bases] == [[10.0, 14.0, 18.0]] * 2
    assert [base[:, 1].tolist() for base in bases] == [[1.0, 3.0, 5.0], [11.0, 13.0, 15.0]]


async def test_a_parameter_that_requires_grad_is_reduced():
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    async with groups("local", 2) as ranks:
        await on_ranks(ranks, lambda g: g.all_reduce(parameters[g.rank]))
    assert [p.tolist() for p in parameters] == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("shape", [(1, 0, 2), (0,)])
@pytest.mark.parametrize("direct_bytes", [0, 2**30])
async def test_empty_tensors_stay_empty(shape, direct_bytes):
    async with groups("local", 4, direct_bytes=direct_bytes) as ranks:
        results = await on_ranks(ranks, lambda g: g.all_reduce(torch.ones(shape)))
    assert [result.shape for result in results] == [shape] * 4


async def test_a_group_of_one_returns_at_once():
    async with groups("local", 1) as (group,):
        start = time.monotonic()
        for op in ReduceOp:
            assert (await group.all_reduce(torch.tensor([1.0, 2.0]), op=op)).tolist() == [1.0, 2.0]
    assert time.monotonic() - start < 0.1


def _call(shape=(8,), dtype=torch.float32, op=ReduceOp.SUM):
    return torch.ones(shape, dtype=dtype), op


MISMATCHES = {
    "shape": (_call(), _call((6,))),
    "equal numel": (_call((3, 0)), _call((5, 0))),
    "dtype": (_call(), _call(dtype=torch.int64)),
    "op": (_call(), _call(op=ReduceOp.MAX)),
    "one side chunked": (_call((8,)), _call((1000,))),
    "both sides chunked": (_call((999,)), _call((1000,))),
}


@pytest.mark.parametrize("name", MISMATCHES)
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_mismatch_is_an_error_on_each_rank_and_the_group_goes_on(transport, name):
    calls = MISMATCHES[name]
    async with groups(transport, 3, direct_bytes=100, chunk_bytes=64) as ranks:

        async def run(group):
            tensor, op = calls[min(group.rank, 1)]
            return await group.all_reduce(tensor.clone(), op=op)

        errors = await on_ranks(ranks, run)
        for error in errors:
            assert isinstance(error, CollectiveMismatch)
            for tensor, op in calls:
                dtype = str(tensor.dtype).removeprefix("torch.")
                assert f"all_reduce({op.value}) on {dtype}{list(tensor.shape)}" in str(error)
        results = await on_ranks(ranks, lambda g: g.all_reduce(torch.ones(2)))
        assert [result.tolist() for result in results] == [[3.0, 3.0]] * 3


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_rank_that_does_not_call_is_named_and_the_group_is_broken(transport):
    async with groups(transport, 3, timeout_seconds=0.4) as ranks:
        present = [ranks[0], ranks[2]]
        kept = torch.ones(2)
        errors = await on_ranks(present, lambda g: g.all_reduce(kept))
        for error in errors:
            assert isinstance(error, CollectiveTimeout)
            assert "waiting for rank 1" in str(error)
        assert kept.tolist() == [1.0, 1.0]
        later = await on_ranks(present, lambda g: g.all_reduce(torch.ones(2)))
        assert all(isinstance(error, GroupAborted) for error in later)
        assert all("waiting for rank 1" in str(error) for error in later)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_receive_that_times_out_leaves_the_group_usable(transport):
    async with groups(transport, 2) as (first, second):
        with pytest.raises(CollectiveTimeout, match=r"recv from rank 0 .* waiting for rank 0"):
            await second.recv(torch.zeros(1), src=0, timeout=0.1)
        buffer = torch.zeros(1)
        await asyncio.gather(first.send(torch.ones(1), dst=1), second.recv(buffer, src=0))
        assert buffer.item() == 1.0


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_abort_wakes_all_ranks_with_the_cause(transport):
    async with groups(transport, 3, timeout_seconds=20) as ranks:
        waits = [
            asyncio.ensure_future(ranks[0].all_reduce(torch.ones(2))),
            asyncio.ensure_future(ranks[1].recv(torch.ones(2), src=2)),
        ]
        await asyncio.sleep(0.1)
        start = time.monotonic()
        await ranks[2].abort("disk is full")
        outcomes = await asyncio.gather(*waits, return_exceptions=True)
        assert time.monotonic() - start < 2
        later = await on_ranks(ranks, lambda g: g.all_reduce(torch.ones(2)))
    for error in (*outcomes, *later):
        assert isinstance(error, GroupAborted)
        assert "disk is full" in str(error)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_tags_match_whatever_the_order(transport):
    async with groups(transport, 2) as (first, second):
        buffers = {tag: torch.zeros(1) for tag in (2, 1, 0)}
        start = time.monotonic()
        await asyncio.gather(
            *(first.send(torch.tensor([float(tag)]), dst=1, tag=tag) for tag in range(3)),
            *(second.recv(buffer, src=0, tag=tag) for tag, buffer in buffers.items()),
        )
        assert time.monotonic() - start < 2
    assert {tag: buffer.item() for tag, buffer in buffers.items()} == {0: 0.0, 1: 1.0, 2: 2.0}


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_one_tag_keeps_the_order_of_the_sends(transport):
    async with groups(transport, 2) as (first, second):

        async def send_all():
            for number in range(20):
                await first.send(torch.tensor([number]), dst=1, tag=number % 2)

        async def receive(tag):
            return [(await second.recv_tensor(src=0, tag=tag)).item() for _ in range(10)]

        _, even, odd = await asyncio.gather(send_all(), receive(0), receive(1))
    assert even == list(range(0, 20, 2))
    assert odd == list(range(1, 20, 2))


@pytest.mark.parametrize(
    "wrong", [torch.zeros(4), torch.zeros(2), torch.zeros(3, dtype=torch.int32)]
)
async def test_a_buffer_that_does_not_fit_is_not_written(wrong):
    async with groups("local", 2) as (first, second):
        before = wrong.clone()
        await first.send(torch.arange(3.0) + 1, dst=1)
        with pytest.raises(CollectiveMismatch, match=r"float32\[3\]"):
            await second.recv(wrong, src=0)
        assert torch.equal(wrong, before)
        buffer = torch.zeros(4)
        await first.send(torch.arange(4.0), dst=1)
        await second.recv(buffer, src=0)
        assert buffer.tolist() == [0.0, 1.0, 2.0, 3.0]


async def test_the_sender_may_reuse_its_memory_and_strides_are_kept_apart():
    async with groups("local", 2) as (first, second):
        base = torch.arange(6.0).reshape(3, 2)
        await first.send(base[:, 1], dst=1)
        base.zero_()
        into = torch.zeros(3, 2)
        await second.recv(into[:, 0], src=0)
    assert into.tolist() == [[1.0, 0.0], [3.0, 0.0], [5.0, 0.0]]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"dst": 2}, "dst"),
        ({"dst": -1}, "dst"),
        ({"dst": 0}, "dst"),
        ({"tag": -1}, "tag"),
        ({"tag": 2**62}, "tag"),
    ],
)
async def test_a_wrong_peer_or_tag_is_named(fields, text):
    async with groups("local", 2) as (first, _):
        with pytest.raises(ConfigError, match=text):
            await first.send(torch.ones(1), **({"dst": 1} | fields))


async def test_a_lost_peer_wakes_its_waiters_after_what_it_sent_is_taken():
    network = LocalNetwork(size=3)
    ranks = [AsyncGroup(network.join(rank), group_id="g", timeout_seconds=5) for rank in range(3)]
    await ranks[1].send(torch.ones(1), dst=0)
    waits = [
        asyncio.ensure_future(ranks[0].recv(torch.ones(1), src=1, tag=9)),
        asyncio.ensure_future(ranks[2].all_reduce(torch.ones(1))),
    ]
    await asyncio.sleep(0.05)
    network.drop_peer(1)
    for outcome in await asyncio.gather(*waits, return_exceptions=True):
        assert isinstance(outcome, PeerLost)
        assert outcome.rank == 1
    assert (await ranks[0].recv_tensor(src=1)).tolist() == [1.0]
    with pytest.raises(PeerLost, match="rank 1"):
        await ranks[0].recv_tensor(src=1)
    with pytest.raises(PeerLost, match="rank 1"):
        await ranks[0].send(torch.ones(1), dst=1)


async def test_out_of_credit_on_both_sides_does_not_block_a_large_reduction():
    # Windows of one chunk: progress needs every rank to keep taking while it cannot send.
    network = LocalNetwork(size=3, order=random.Random(5), capacity_bytes=600)
    ranks = [
        AsyncGroup(
            network.join(rank), group_id="g", timeout_seconds=20, direct_bytes=0, chunk_bytes=400
        )
        for rank in range(3)
    ]
    results = await on_ranks(ranks, lambda g: g.all_reduce(torch.full((20_000,), float(g.rank))))
    assert all(torch.equal(result, torch.full((20_000,), 3.0)) for result in results)


async def test_a_full_receiver_holds_the_sender_back():
    network = LocalNetwork(size=2, capacity_bytes=10_000)
    first, second = (
        AsyncGroup(network.join(rank), group_id="g", timeout_seconds=5) for rank in range(2)
    )
    for _ in range(2):
        await first.send(torch.ones(1000, dtype=torch.uint8), dst=1)
    with pytest.raises(CollectiveTimeout, match="waiting for rank 1"):
        await first.send(torch.ones(8000, dtype=torch.uint8), dst=1, timeout=0.2)
    await second.recv_tensor(src=0)
    await second.recv_tensor(src=0)
    await first.send(torch.ones(8000, dtype=torch.uint8), dst=1, timeout=1)
    # Larger than the whole window, with nothing under way, is fine.
    await second.recv_tensor(src=0)
    await first.send(torch.ones(50_000, dtype=torch.uint8), dst=1, timeout=1)
