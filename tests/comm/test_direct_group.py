"""Sums between computing threads, by sockets and memory, against those of the group itself."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from stagemesh.comm.direct_group import DirectGroup
from stagemesh.comm.direct_memory import MemoryLinks
from stagemesh.comm.direct_sockets import SocketLinks
from stagemesh.comm.process_group import ProcessGroup
from stagemesh.comm.reduce import ReduceOp
from stagemesh.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    ConfigError,
    GroupAborted,
    PeerLost,
)
from tests.support.ranks import run_ranks

KINDS = {"sockets": SocketLinks, "memory": MemoryLinks}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How messages travel. Memory is for ranks with a core each, which a test may pretend."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    return str(request.param)


def on_direct_ranks(
    world_size: int,
    run: Callable[[DirectGroup, ProcessGroup], Any],
    *,
    kind: str = "sockets",
    **settings: Any,
) -> list[Any]:
    """What `run` gives on ranks that are threads and connected all the same."""

    def on_rank(group: ProcessGroup) -> Any:
        direct = DirectGroup(group)
        direct.connect(within_process=True, shares_memory=kind == "memory")
        assert isinstance(direct.links, KINDS[kind])
        try:
            return run(direct, group)
        finally:
            direct.close()

    return run_ranks(world_size, on_rank, **{"backend": "grpc", **settings})


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(shape, generator=generator) * 100).to(dtype)


@pytest.mark.parametrize("backend", ["grpc", "gloo"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_bits_of_the_groups_own_sums(backend: str, world_size: int, kind: str) -> None:
    """Small and large, of several types; large ones of three ranks go in pieces.

    The largest need more than one message through memory.
    """

    def run(direct: DirectGroup, group: ProcessGroup) -> None:
        cases: list[tuple[torch.dtype, tuple[int, ...], ReduceOp]] = [
            (dtype, shape, ReduceOp.SUM)
            for dtype in (torch.float32, torch.bfloat16, torch.int64)
            for shape in ((1, 1, 576), (1, 70, 577 if world_size == 3 else 1501), (0,), ())
        ]
        cases.append((torch.float32, (2, 3), ReduceOp.MAX))
        cases.append((torch.float32, (300_001,), ReduceOp.AVG))
        cases.append((torch.float64, (100_001,), ReduceOp.SUM))
        for dtype, shape, op in cases:
            ours = values(group.rank, shape, dtype)
            theirs = ours.clone()
            inside = ours.clone()
            assert direct.all_reduce(ours, op=op) is ours
            with torch.inference_mode():
                assert direct.all_reduce(inside, op=op) is inside
            group.all_reduce(theirs, op=op)
            assert torch.equal(ours, theirs), (dtype, shape, op)
            assert torch.equal(inside, theirs), (dtype, shape, op)
        assert direct.time_spent.num_calls == 2 * len(cases)

    on_direct_ranks(world_size, run, backend=backend, kind=kind)


def test_tensors_with_gaps_and_of_inference_mode(kind: str) -> None:
    def run(direct: DirectGroup, group: ProcessGroup) -> None:
        whole = torch.zeros(4, 6)
        direct.all_reduce(whole[:, ::2].fill_(group.rank + 1.0)[1:3])
        assert whole[:, 1::2].eq(0).all()
        assert whole[1:3, ::2].eq(3).all()
        assert whole[0, ::2].eq(group.rank + 1).all()
        with torch.inference_mode():
            inside = torch.ones(3)
            assert direct.all_reduce(inside).tolist() == [2, 2, 2]
        assert direct.all_reduce(inside).tolist() == [4, 4, 4]

    on_direct_ranks(2, run, kind=kind)


def test_gather(kind: str) -> None:
    def run(direct: DirectGroup, group: ProcessGroup) -> None:
        own = values(group.rank, (5, 7), torch.float64)
        ours, theirs = own.new_empty(3, 5, 7), own.new_empty(3, 5, 7)
        direct.all_gather_tensor(ours, own)
        group.all_gather_tensor(theirs, own)
        assert torch.equal(ours, theirs)

    on_direct_ranks(3, run, kind=kind)


@pytest.mark.parametrize(
    "other",
    [
        lambda direct: direct.all_reduce(torch.ones(4)),
        lambda direct: direct.all_reduce(torch.ones(700_000)),
        lambda direct: direct.all_reduce(torch.ones(1, 3)),
        lambda direct: direct.all_reduce(torch.ones(3, dtype=torch.int32)),
        lambda direct: direct.all_reduce(torch.ones(3), op=ReduceOp.MAX),
        lambda direct: direct.all_gather_tensor(torch.ones(direct.size, 2), torch.ones(2)),
    ],
)
@pytest.mark.parametrize(("world_size", "is_inference"), [(2, False), (2, True), (3, False)])
def test_calls_that_differ_raise_on_all_and_leave_the_ranks_in_step(
    world_size: int, other: Callable[[DirectGroup], torch.Tensor], kind: str, *, is_inference: bool
) -> None:
    """In inference mode small sums of two ranks take fewer steps, which must see as much."""

    @torch.inference_mode(is_inference)
    def run(direct: DirectGroup, group: ProcessGroup) -> None:
        tensor = torch.ones(3)
        call = other if group.rank == 1 else lambda direct: direct.all_reduce(tensor)
        with pytest.raises(CollectiveMismatch, match=r"rank 1 called all_"):
            call(direct)
        assert tensor.tolist() == [1, 1, 1]
        assert direct.all_reduce(tensor).tolist() == [world_size] * 3

    on_direct_ranks(world_size, run, kind=kind)


def test_an_argument_that_is_wrong_here_counts_as_no_call() -> None:
    def run(direct: DirectGroup, group: ProcessGroup) -> None:
        if group.rank == 0:
            with pytest.raises(ConfigError, match="avg of int64"):
                direct.all_reduce(torch.ones(3, dtype=torch.int64), op=ReduceOp.AVG)
        assert direct.all_reduce(torch.ones(1)).item() == 2

    on_direct_ranks(2, run)


@pytest.mark.parametrize("backend", ["grpc", "gloo"])
@pytest.mark.parametrize("spins", [True, False])
def test_an_abort_wakes_who_waits(backend: str, kind: str, *, spins: bool) -> None:
    """With its cause, although the links end before the other rank can have heard of it."""

    @torch.inference_mode(spins)
    def run(direct: DirectGroup, group: ProcessGroup) -> str:
        if group.rank == 0:
            time.sleep(0.0005 if spins else 0.1)
            group.abort("the disk is full")
            return ""
        with pytest.raises(GroupAborted) as caught:
            direct.all_reduce(torch.ones(3))
        with pytest.raises(GroupAborted):
            direct.all_reduce(torch.ones(3))
        return str(caught.value)

    started = time.monotonic()
    [_, text] = on_direct_ranks(2, run, kind=kind, backend=backend, timeout_seconds=20.0)
    assert "the disk is full" in text
    assert time.monotonic() - started < 15


def test_a_rank_that_leaves_is_named(kind: str) -> None:
    def run(direct: DirectGroup, group: ProcessGroup) -> None:
        if group.rank == 0:
            direct.close()
            return
        with pytest.raises(PeerLost, match="rank 0 is lost"):
            direct.all_reduce(torch.ones(3))

    on_direct_ranks(2, run, kind=kind)


def test_what_a_small_sum_raises(kind: str) -> None:
    """As a larger one: a rank that has left, by name, and nothing more afterwards."""

    @torch.inference_mode()
    def run(direct: DirectGroup, group: ProcessGroup) -> None:
        assert direct.all_reduce(torch.ones(3)).tolist() == [2, 2, 2]
        if group.rank == 0:
            direct.close()
            return
        with pytest.raises(PeerLost, match="rank 0 is lost"):
            direct.all_reduce(torch.ones(3))
        with pytest.raises(GroupAborted, match="have ended"):
            direct.all_reduce(torch.ones(3))

    on_direct_ranks(2, run, kind=kind)


def test_a_rank_that_does_not_come_is_named_at_the_deadline(kind: str) -> None:
    is_over = threading.Event()

    def run(direct: DirectGroup, group: ProcessGroup) -> None:
        if group.rank == 1:
            assert is_over.wait(20)
            return
        with pytest.raises(CollectiveTimeout, match=r"on rank 0 after 0.2 s: .* rank 1"):
            direct.all_reduce(torch.ones(3), timeout=0.2)
        with pytest.raises(GroupAborted, match="timed out"):
            direct.all_reduce(torch.ones(3))
        is_over.set()

    on_direct_ranks(2, run, kind=kind)


def test_ranks_of_one_process_stay_with_their_group() -> None:
    """Threads of one interpreter would take turns with whoever looks for bytes."""

    def run(group: ProcessGroup) -> bool:
        direct = DirectGroup(group)
        direct.connect()
        assert direct.all_reduce(torch.ones(2)).tolist() == [2, 2]
        gathered = torch.empty(2)
        assert direct.all_gather_tensor(gathered, torch.ones(1) * group.rank).tolist() == [0, 1]
        return direct.is_direct

    assert run_ranks(2, run, backend="grpc") == [False, False]
    assert run_ranks(2, run, backend="local") == [False, False]


def test_who_does_not_know_the_secret_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    strangers: list[socket.socket] = []
    create = socket.create_server

    def create_and_intrude(address: tuple[str, int], **settings: Any) -> socket.socket:
        listener = create(address, **settings)
        stranger = socket.create_connection(listener.getsockname())
        stranger.sendall(b"x" * 32 + (1).to_bytes(4, "little"))
        strangers.append(stranger)
        return listener

    monkeypatch.setattr(socket, "create_server", create_and_intrude)

    def run(direct: DirectGroup, group: ProcessGroup) -> float:
        return direct.all_reduce(torch.full((1,), group.rank + 1.0)).item()

    try:
        assert on_direct_ranks(2, run) == [3.0, 3.0]
        strangers[0].settimeout(2)
        with contextlib.suppress(ConnectionResetError):
            assert strangers[0].recv(1) == b""
    finally:
        for each in strangers:
            each.close()
