"""Send, Recv and AllReduce as a driver calls them, between daemons on loopback."""

import asyncio
import time

import grpc
import grpc.aio
import pytest
import torch

from stagemesh.comm.reduce import ReduceOp
from stagemesh.rpc.v1 import comm_pb2
from tests.comm.daemons import all_reduce, daemons, join, recv, send


async def _status(awaitable) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(awaitable, 20)
    return caught.value.code(), caught.value.details()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.tensor(7, dtype=torch.int64),
        torch.tensor([1, 70000, 2**53 + 1]),
        torch.tensor([True, False, True]),
        torch.empty((2, 0, 8), dtype=torch.bfloat16),
        torch.tensor([1.0, -0.0, 3.140625, 1e38, float("inf")], dtype=torch.bfloat16),
        torch.arange(1048577, dtype=torch.float32),
        torch.arange(16 * 2**20, dtype=torch.float32),
    ],
    ids=lambda t: f"{t.dtype}-{list(t.shape)}".removeprefix("torch."),
)
async def test_a_tensor_goes_from_driver_to_driver_bit_for_bit(tensor):
    async with daemons(2) as pair:
        await join(pair)
        received, _ = await asyncio.gather(recv(pair[1], peer=0), send(pair[0], tensor, peer=1))
    assert received.dtype == tensor.dtype
    assert received.shape == tensor.shape
    assert torch.equal(received, tensor)


@pytest.mark.parametrize("num_elements", [0, 1, 1000, 400_003])
async def test_three_daemons_all_reduce_to_the_same_bits(num_elements):
    inputs = [
        torch.randn(num_elements, generator=torch.Generator().manual_seed(rank))
        for rank in range(3)
    ]
    async with daemons(3) as trio:
        await join(trio)
        results = await asyncio.gather(
            *(all_reduce(daemon, tensor) for daemon, tensor in zip(trio, inputs, strict=True))
        )
        averages = await asyncio.gather(
            *(all_reduce(daemon, torch.tensor(float(r))) for r, daemon in enumerate(trio))
        )
    expected = (inputs[0] + inputs[1]) + inputs[2]
    assert all(torch.equal(result, expected) for result in results)
    assert [average.item() for average in averages] == [3.0, 3.0, 3.0]
    assert all(average.shape == () for average in averages)


async def test_average_keeps_the_shape_of_a_single_number():
    async with daemons(2) as pair:
        await join(pair)
        results = await asyncio.gather(
            *(
                all_reduce(daemon, torch.tensor(float(rank + 1)), op=ReduceOp.AVG)
                for rank, daemon in enumerate(pair)
            )
        )
    assert [(result.item(), result.shape) for result in results] == [(1.5, ())] * 2


async def test_tags_are_matched_in_any_order():
    async with daemons(2) as pair:
        await join(pair)
        for tag in range(3):
            await send(pair[0], torch.tensor(float(tag)), peer=1, tag=tag)
        received = [(tag, await recv(pair[1], peer=0, tag=tag)) for tag in (2, 1, 0)]
    assert [(tag, tensor.item()) for tag, tensor in received] == [(2, 2.0), (1, 1.0), (0, 0.0)]


async def test_an_unexpected_tensor_is_refused_and_the_next_pair_matches():
    async with daemons(2) as pair:
        await join(pair)
        for wrong in (torch.zeros(4), torch.zeros(2), torch.zeros(3, dtype=torch.int32)):
            await send(pair[0], torch.arange(3.0), peer=1)
            code, text = await _status(recv(pair[1], peer=0, like=wrong))
            assert code is grpc.StatusCode.FAILED_PRECONDITION
            assert "float32[3]" in text
            assert str(list(wrong.shape)) in text
        await send(pair[0], torch.arange(4.0), peer=1)
        assert torch.equal(await recv(pair[1], peer=0, like=torch.zeros(4)), torch.arange(4.0))


async def test_mismatched_calls_fail_on_every_daemon_and_the_group_goes_on():
    async with daemons(3) as trio:
        await join(trio)
        shapes = (8, 6, 8)
        outcomes = await asyncio.gather(
            *(_status(all_reduce(d, torch.ones(n))) for d, n in zip(trio, shapes, strict=True))
        )
        for code, text in outcomes:
            assert code is grpc.StatusCode.FAILED_PRECONDITION
            assert "float32[8]" in text
            assert "float32[6]" in text
        results = await asyncio.gather(*(all_reduce(d, torch.ones(2)) for d in trio))
        assert all(result.tolist() == [3.0, 3.0] for result in results)


async def test_a_missing_rank_is_named_at_the_deadline():
    async with daemons(3) as trio:
        await join(trio, timeout_seconds=0.5)
        start = time.monotonic()
        outcomes = await asyncio.gather(
            *(_status(all_reduce(trio[rank], torch.ones(2))) for rank in (0, 2))
        )
        elapsed = time.monotonic() - start
    assert elapsed < 2.5
    for code, text in outcomes:
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "waiting for rank 1" in text


async def test_a_daemon_that_stops_is_lost_to_the_ranks_that_wait_for_it():
    async with daemons(3) as trio:
        await join(trio, timeout_seconds=20)
        await asyncio.gather(*(all_reduce(d, torch.ones(2)) for d in trio))
        waits = [
            asyncio.ensure_future(_status(all_reduce(trio[rank], torch.ones(2)))) for rank in (0, 2)
        ]
        await asyncio.sleep(0.1)
        assert not any(wait.done() for wait in waits)
        start = time.monotonic()
        await trio[1].stop()
        outcomes = await asyncio.gather(*waits)
    assert time.monotonic() - start < 8
    for code, text in outcomes:
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "rank 1 (node n1" in text


async def test_a_rank_that_joins_late_is_waited_for():
    async with daemons(2) as pair:
        await join(pair, ranks=[0])
        sending = asyncio.ensure_future(send(pair[0], torch.ones(2), peer=1))
        await asyncio.sleep(0.2)
        assert not sending.done()
        await join(pair, ranks=[1])
        assert (await recv(pair[1], peer=0)).tolist() == [1.0, 1.0]
        await sending


async def test_a_new_incarnation_drops_what_the_old_one_sent():
    async with daemons(2) as pair:
        await join(pair)
        await send(pair[0], torch.tensor([1.0]), peer=1)
        waiting = asyncio.ensure_future(_status(recv(pair[1], peer=0, tag=5)))
        await asyncio.sleep(0.1)
        await join(pair, incarnation=2, ranks=[1, 0])
        code, text = await waiting
        assert code is grpc.StatusCode.ABORTED
        assert "left" in text
        await send(pair[0], torch.tensor([2.0]), peer=1)
        assert (await recv(pair[1], peer=0)).tolist() == [2.0]
        code, text = await _status(join(pair, incarnation=2))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "needs a higher one" in text


async def test_hello_of_an_old_incarnation_is_refused():
    async with daemons(2) as pair:
        await join(pair, incarnation=4)
        code, text = await _status(_hello(pair[1], incarnation=3))
    assert code is grpc.StatusCode.ABORTED
    assert "incarnation 3" in text
    assert "has joined 4" in text


async def _hello(daemon, *, incarnation=1, major=1, source=0, target=1) -> None:
    call = daemon.stub.Exchange()
    await call.write(
        comm_pb2.ExchangeFrame(
            hello=comm_pb2.ExchangeHello(
                version={"major": major, "software": "9.9"} if major else None,
                group_id="g",
                incarnation=incarnation,
                source_rank=source,
                target_rank=target,
            )
        )
    )
    ack = await call.read()
    assert ack.accepted
    call.cancel()


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({"major": 2}, grpc.StatusCode.FAILED_PRECONDITION, "protocol 2.0"),
        ({"major": 0}, grpc.StatusCode.FAILED_PRECONDITION, "no protocol version"),
        ({"source": 7}, grpc.StatusCode.INVALID_ARGUMENT, "rank 7"),
        ({"target": 0}, grpc.StatusCode.INVALID_ARGUMENT, "to rank 0"),
    ],
)
async def test_a_wrong_hello_is_refused(changes, code, text):
    async with daemons(2) as pair:
        await join(pair)
        actual_code, actual_text = await _status(_hello(pair[1], **changes))
        # Control: the right one is accepted by the same daemon.
        await _hello(pair[1])
    assert actual_code is code
    assert text in actual_text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"group_id": ""}, "group_id"),
        ({"rank": 2}, "rank must be in [0, 1), got 2"),
        ({"members": []}, "members, got 0"),
        ({"timeout_seconds": 0.0}, "timeout_seconds"),
        ({"timeout_seconds": float("nan")}, "timeout_seconds"),
        ({"timeout_seconds": float("inf")}, "timeout_seconds"),
        ({"members": [{"node_id": "n0"}]}, "address"),
    ],
)
async def test_a_wrong_join_names_the_field(fields, text):
    request = {
        "version": {"major": 1},
        "group_id": "g",
        "incarnation": 1,
        "rank": 0,
        "members": [{"node_id": "n0", "address": "127.0.0.1:1"}],
        "timeout_seconds": 1.0,
    }
    async with daemons(1) as (daemon,):
        code, details = await _status(
            daemon.stub.JoinGroup(comm_pb2.JoinGroupRequest(**(request | fields)))
        )
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert text in details
        await daemon.stub.JoinGroup(comm_pb2.JoinGroupRequest(**request))


async def test_calls_to_a_group_that_was_never_joined_or_was_left_say_so():
    async with daemons(1) as (daemon,):
        assert (await _status(all_reduce(daemon, torch.ones(1))))[0] is (
            grpc.StatusCode.FAILED_PRECONDITION
        )
        await join([daemon])
        assert (await all_reduce(daemon, torch.ones(1))).tolist() == [1.0]
        for _ in range(2):
            await daemon.stub.LeaveGroup(comm_pb2.LeaveGroupRequest(group_id="g"))
        code, text = await _status(all_reduce(daemon, torch.ones(1)))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "JoinGroup" in text


async def test_a_tensor_over_the_limit_is_refused_with_both_numbers():
    async with daemons(2, max_tensor_bytes=1000) as pair:
        await join(pair)
        code, text = await _status(send(pair[0], torch.zeros(251), peer=1))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "1004" in text
        assert "1000" in text
        await asyncio.gather(send(pair[0], torch.zeros(250), peer=1), recv(pair[1], peer=0))


async def test_daemons_show_each_other_the_token():
    async with daemons(2, token="sesame") as pair:
        await join(pair)
        results = await asyncio.gather(*(all_reduce(d, torch.ones(2)) for d in pair))
    assert [result.tolist() for result in results] == [[2.0, 2.0]] * 2


async def test_a_cancelled_receive_takes_no_message_with_it():
    async with daemons(2) as pair:
        await join(pair)
        mailbox = pair[1].servicer.group("g")._transport.mailbox
        waiting = asyncio.ensure_future(recv(pair[1], peer=0))
        await asyncio.sleep(0.1)
        assert len(mailbox._waiters) == 1
        waiting.cancel()
        for _ in range(50):
            if not mailbox._waiters:
                break
            await asyncio.sleep(0.02)
        assert not mailbox._waiters
        await send(pair[0], torch.ones(2), peer=1)
        assert (await recv(pair[1], peer=0)).tolist() == [1.0, 1.0]


async def test_closing_a_servicer_twice_is_fine_and_ends_its_groups():
    async with daemons(1) as (daemon,):
        await join([daemon])
        await daemon.servicer.close()
        await daemon.servicer.close()
        assert (await _status(all_reduce(daemon, torch.ones(1))))[0] is (
            grpc.StatusCode.FAILED_PRECONDITION
        )
        assert (await _status(join([daemon], incarnation=2)))[0] is (
            grpc.StatusCode.FAILED_PRECONDITION
        )
