"""Every collective through the daemons, asked for by drivers."""

import asyncio
from typing import Any

import grpc
import pytest
import torch

from stagemesh.comm.driver_calls import _COLLECTIVES
from stagemesh.comm.reduce import ReduceOp
from stagemesh.rpc.convert import our_version
from stagemesh.rpc.v1 import comm_pb2
from tests.comm.daemons import Daemon, all_reduce, collective, daemons, join

SIZE = 3
ROOT = 1
KINDS = comm_pb2.CollectiveKind


def _kind(name: str) -> Any:
    return KINDS.Value(f"COLLECTIVE_KIND_{name}")


def _mine(rank: int, *, numel: int = 4) -> torch.Tensor:
    return torch.arange(float(numel)) + 100 * rank


def _each(rank: int, *, numel: int = 4) -> list[torch.Tensor]:
    """For rank r: what `rank` has for it."""
    return [_mine(rank, numel=numel) + 10 * r for r in range(SIZE)]


def _only(rank: int, values: list[torch.Tensor]) -> list[torch.Tensor]:
    return values if rank == ROOT else []


# Name: what rank r gives, what it expects, what it gets.
CASES: dict[str, Any] = {
    "BARRIER": (lambda r, n: [], lambda r, n: [], lambda r, n: []),
    "BROADCAST": (
        lambda r, n: _only(r, [_mine(r, numel=n)]),
        lambda r, n: [] if r == ROOT else [torch.zeros(n)],
        lambda r, n: [_mine(ROOT, numel=n)],
    ),
    "ALL_REDUCE": (
        lambda r, n: [_mine(r, numel=n)],
        lambda r, n: [],
        lambda r, n: [_mine(2, numel=n)],
    ),
    "REDUCE": (
        lambda r, n: [_mine(r, numel=n)],
        lambda r, n: [],
        lambda r, n: _only(r, [_mine(2, numel=n)]),
    ),
    "REDUCE_SCATTER": (
        lambda r, n: _each(r, numel=n),
        lambda r, n: [],
        lambda r, n: [_each(2, numel=n)[r]],
    ),
    "ALL_GATHER": (
        lambda r, n: [_mine(r, numel=n)],
        lambda r, n: [],
        lambda r, n: [_mine(q, numel=n) for q in range(SIZE)],
    ),
    "GATHER": (
        lambda r, n: [_mine(r, numel=n)],
        lambda r, n: [],
        lambda r, n: _only(r, [_mine(q, numel=n) for q in range(SIZE)]),
    ),
    "SCATTER": (
        lambda r, n: _only(r, _each(r, numel=n)),
        lambda r, n: [] if r == ROOT else [torch.zeros(n)],
        lambda r, n: [_each(ROOT, numel=n)[r]],
    ),
    # Rank q has r + 1 elements for rank r.
    "ALL_TO_ALL": (
        lambda q, n: [_each(q, numel=n + r + 1)[r] for r in range(SIZE)],
        lambda r, n: [torch.zeros(n + r + 1)] * SIZE,
        lambda r, n: [_each(q, numel=n + r + 1)[r] for q in range(SIZE)],
    ),
    "ALL_GATHER_VARIABLE": (
        lambda r, n: [_mine(r, numel=n * r)],
        lambda r, n: [],
        lambda r, n: [_mine(q, numel=n * q) for q in range(SIZE)],
    ),
    "GATHER_VARIABLE": (
        lambda r, n: [_mine(r, numel=n * r)],
        lambda r, n: [],
        lambda r, n: _only(r, [_mine(q, numel=n * q) for q in range(SIZE)]),
    ),
}


def test_each_kind_of_the_wire_is_served_and_tested():
    served = {KINDS.Name(kind).removeprefix("COLLECTIVE_KIND_") for kind in _COLLECTIVES}
    on_wire = {name.removeprefix("COLLECTIVE_KIND_") for name in KINDS.DESCRIPTOR.values_by_name}
    assert served == set(CASES) == on_wire - {"UNSPECIFIED"}


async def test_each_collective_gives_the_drivers_what_it_should():
    async with daemons(SIZE) as trio:
        await join(trio)
        # One that rides in the agreement, and one of more than a message.
        for numel in (4, 700_000):
            for name, (gives, expects, gets) in CASES.items():
                results = await asyncio.gather(
                    *(
                        collective(
                            daemon,
                            _kind(name),
                            gives(rank, numel),
                            root=ROOT,
                            op=ReduceOp.MAX if "REDUCE" in name else None,
                            expected=expects(rank, numel),
                        )
                        for rank, daemon in enumerate(trio)
                    )
                )
                for rank, result in enumerate(results):
                    wanted = gets(rank, numel)
                    assert len(result) == len(wanted), (name, rank)
                    for got, right in zip(result, wanted, strict=True):
                        assert torch.equal(got, right), (name, rank)


async def _refused(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details()


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("UNSPECIFIED", {}, "unknown collective 0; known are 1 to 11"),
        ("BARRIER", {"tensors": [torch.ones(1)]}, "takes 0 tensors, got 1"),
        ("ALL_REDUCE", {"op": ReduceOp.SUM}, "takes 1 tensors, got 0"),
        ("ALL_REDUCE", {"tensors": [torch.ones(1)]}, "unknown reduce op 0"),
        ("REDUCE_SCATTER", {"tensors": [torch.ones(1)] * 2, "op": ReduceOp.SUM}, "more data came"),
        ("BROADCAST", {"root": 3, "expected": [torch.ones(1)]}, r"src must be in [0, 1), got 3"),
        ("BROADCAST", {"root": 3}, "takes 1 expected, got 0"),
        ("ALL_TO_ALL", {"tensors": [torch.ones(1)]}, "takes 1 expected, got 0"),
        ("ALL_TO_ALL", {"expected": [torch.ones(1)] * 2}, "2 tensors are expected of 1 ranks"),
        ("ALL_GATHER_VARIABLE", {"tensors": [torch.tensor(1.0)]}, "at least one dim"),
    ],
)
async def test_a_wrong_call_says_what_the_collective_takes(name, arguments, text):
    async with daemons(1) as (daemon,):
        await join([daemon])
        code, details = await _refused(collective(daemon, _kind(name), **arguments))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert text in details
        assert (await all_reduce(daemon, torch.ones(1))).tolist() == [1.0]


async def test_no_memory_is_taken_for_what_is_expected_beyond_the_limit():
    async with daemons(2, max_tensor_bytes=1000) as pair:
        await join(pair, timeout_seconds=0.5)
        expected = [torch.ones(1).expand(2**40)]
        code, details = await _refused(
            collective(pair[0], _kind("SCATTER"), root=1, expected=expected)
        )
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert f"{2**42} bytes; the limit is 1000" in details


async def test_drivers_that_call_different_collectives_hear_of_each_other():
    async with daemons(2) as pair:
        await join(pair)
        outcomes = await asyncio.gather(
            _refused(collective(pair[0], _kind("ALL_GATHER"), [torch.ones(2)])),
            _refused(collective(pair[1], _kind("BARRIER"))),
        )
        for code, details in outcomes:
            assert code is grpc.StatusCode.FAILED_PRECONDITION
            assert "rank 0 called all_gather on float32[2], rank 1 called barrier" in details
        results = await asyncio.gather(*(all_reduce(d, torch.ones(2)) for d in pair))
    assert [result.tolist() for result in results] == [[2.0, 2.0]] * 2


async def test_a_join_chooses_the_algorithm():
    async def sizes_of(daemon: Daemon, group_id: str, **sizes: int) -> tuple[int, int]:
        await daemon.stub.JoinGroup(
            comm_pb2.JoinGroupRequest(
                version=our_version(),
                group_id=group_id,
                incarnation=1,
                members=[comm_pb2.GroupMember(node_id="n0", address="127.0.0.1:1")],
                timeout_seconds=5.0,
                **sizes,
            )
        )
        group = daemon.servicer.group(group_id)
        return group.direct_bytes, group.chunk_bytes

    async with daemons(1) as (daemon,):
        assert await sizes_of(daemon, "a", direct_bytes=0, chunk_bytes=100) == (0, 100)
        # Control: the defaults.
        assert await sizes_of(daemon, "b") == (256 * 1024, 2 * 2**20)
        code, details = await _refused(sizes_of(daemon, "c", chunk_bytes=0))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "chunk_bytes >= 1" in details
