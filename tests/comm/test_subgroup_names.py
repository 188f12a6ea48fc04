"""Errors in a sub-group say who its ranks are in the world."""

import time
from typing import Any

import pytest
import torch

from stagemesh.comm.peer_link import PeerAddress, names_of
from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import CollectiveMismatch, CollectiveTimeout, GroupAborted, PeerLost
from tests.support.ranks import BACKENDS, run_ranks

SIZE = 4
# Rank 0 of the sub-group is rank 3 of the world, rank 1 is rank 1.
RANKS = [3, 1]

each_backend = pytest.mark.parametrize("backend", BACKENDS)
WORLD_1 = r"rank 1 \(rank 1 of the world, node [^)]+\)"
WORLD_3 = r"rank 0 \(rank 3 of the world, node [^)]+\)"


def in_subgroup(backend: str, run: Any) -> None:
    def on_rank(world: ProcessGroup) -> None:
        group = world.subgroup(RANKS)
        if group is not None:
            with group:
                run(group)
        world.barrier()

    run_ranks(SIZE, on_rank, backend=backend)


@each_backend
def test_a_mismatch_names_both(backend: str) -> None:
    def run(group: ProcessGroup) -> None:
        wanted = rf"{WORLD_3} called all_reduce\(sum\) on float32\[1\], {WORLD_1} called"
        with pytest.raises(CollectiveMismatch, match=wanted):
            group.all_reduce(torch.ones(1 + group.rank))
        tensors = [torch.ones(1 + group.rank) for _ in range(2)]
        wanted = rf"{WORLD_3} sends float32\[1\] to {WORLD_1}, which expects float32\[2\]"
        with pytest.raises(CollectiveMismatch, match=wanted):
            group.all_to_all(tensors, [tensor.clone() for tensor in tensors])

    in_subgroup(backend, run)


@each_backend
def test_a_message_that_does_not_fit_names_its_sender(backend: str) -> None:
    def run(group: ProcessGroup) -> None:
        if group.rank == 0:
            group.send(torch.ones(3), dst=1)
        else:
            with pytest.raises(CollectiveMismatch, match=rf"{WORLD_3} sent float32\[3\]"):
                group.recv(torch.ones(2))

    in_subgroup(backend, run)


@each_backend
def test_a_deadline_names_who_is_waited_for(backend: str) -> None:
    def run(group: ProcessGroup) -> None:
        if group.rank:
            time.sleep(0.6)
            return
        with pytest.raises(CollectiveTimeout, match=f"timed out on {WORLD_3} .* for {WORLD_1}"):
            group.recv_tensor(src=1, timeout=0.3)

    in_subgroup(backend, run)


@each_backend
def test_an_abort_names_who_did_it(backend: str) -> None:
    def run(group: ProcessGroup) -> None:
        if group.rank:
            group.recv_tensor(src=0)
            group.abort("the disk is full")
            return
        group.send(torch.ones(1), dst=1)
        # gRPC adds the address to the name of the node.
        wanted = r"rank 1 \(rank 1 of the world, .*the disk is full"
        with pytest.raises(
            GroupAborted, match=f"^recv from rank 1 .* failed on {WORLD_3}.*{wanted}"
        ):
            group.recv_tensor(src=1)

    in_subgroup(backend, run)


@each_backend
@pytest.mark.parametrize("collective", [False, True])
def test_a_lost_rank_is_named(backend: str, collective: bool) -> None:
    def run(group: ProcessGroup) -> None:
        group.barrier()
        if group.rank == 0:
            # Who sends to a local rank that has left hears that as the end of the group.
            kinds = (PeerLost, GroupAborted) if backend == "local" else PeerLost
            with pytest.raises(kinds, match=r"rank 1 \(rank 1 of the world, node") as caught:
                group.barrier() if collective else group.recv_tensor(src=1)
            assert getattr(caught.value, "rank", 1) == 1
            operation = "barrier" if collective else "recv from rank 1 "
            assert str(caught.value).startswith(operation)

    in_subgroup(backend, run)


def test_a_group_in_a_group_keeps_the_ranks_of_the_world() -> None:
    def on_rank(world: ProcessGroup) -> list[str] | None:
        middle = world.subgroup([3, 2, 0])
        inner = None if middle is None else middle.subgroup([2, 0])
        return None if inner is None else [member.name for member in inner.members]

    first, *_, last = run_ranks(SIZE, on_rank)
    wanted = [
        "rank 0 (rank 0 of the world, node rank-0)",
        "rank 1 (rank 3 of the world, node rank-3)",
    ]
    assert first == last == wanted


def test_in_the_world_the_rank_says_it_all() -> None:
    members = [PeerAddress(rank=rank, node_id="n", address="a:1") for rank in range(2)]
    assert [member.name for member in members] == ["rank 0", "rank 1"]
    assert names_of(members) == []
