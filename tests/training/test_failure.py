"""Whose loss an error tells of, whatever group it was seen in; and who learns of it."""

from collections.abc import Callable

import pytest
import torch

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import CollectiveTimeout, CommError, GroupAborted, PeerLost
from stagemesh.parallel.mesh import open_mesh
from stagemesh.topology import Topology
from stagemesh.training.failure import RankFailure
from tests.support.ranks import run_ranks

TOPOLOGY = Topology(dp=2, pp=2)

Told = Callable[[list[str]], CommError]
"""An error, from the names of the world's nodes."""

TELL_OF_RANK_3: list[Told] = [
    lambda nodes: PeerLost("gone", rank=1, node_id=nodes[3]),
    lambda nodes: GroupAborted(
        f"rank 0 (node {nodes[0]} at 127.0.0.1:1) aborted the group: PeerLost: rank 1 (node "
        f"{nodes[3]} at 127.0.0.1:2) is lost to group world/4:1-3: it left the group"
    ),
    lambda nodes: GroupAborted(
        f"rank 1 (rank 3 of the world, node {nodes[3]} at [::1]:2) cannot be reached for group x"
    ),
    lambda nodes: PeerLost(
        f"rank 1 (rank 3 of the world, node {nodes[3]}) is lost: a collective over Gloo failed"
    ),
    lambda nodes: GroupAborted(
        f"rank 0 (rank 0 of the world, node {nodes[0]}) aborted the group: the backward of stage 0 "
        f"failed: PeerLost: rank 1 (rank 3 of the world, node {nodes[3]}) is lost: a collective"
    ),
    lambda nodes: GroupAborted("stopped: rank 3 (dp 1, pp 1, tp 0) is lost: rank 1 (node y)"),
]
TELL_OF_NOBODY: list[Told] = [
    lambda nodes: GroupAborted("rank 3 failed: ValueError: bad batch"),
    lambda nodes: CollectiveTimeout("all_reduce timed out after 1 s: rank 3 did not come"),
    lambda nodes: PeerLost("gone", rank=3, node_id="a stranger"),
]


def lost_ranks(told: list[Told]) -> list[int | None]:
    def run(world: ProcessGroup) -> list[int | None]:
        with open_mesh(world, TOPOLOGY) as mesh:
            failure = RankFailure(mesh)
            nodes = [member.node_id for member in world.members]
            assert len(set(nodes)) == 4
            return [failure.lost_rank(make(nodes)) for make in told]

    ranks = run_ranks(4, run)
    assert all(found == ranks[0] for found in ranks)
    return ranks[0]


def test_a_loss_is_named_by_the_rank_in_the_world() -> None:
    assert lost_ranks(TELL_OF_RANK_3) == [3] * len(TELL_OF_RANK_3)


def test_other_errors_name_nobody() -> None:
    """Negative control: a rank that is only mentioned is not lost."""
    assert lost_ranks(TELL_OF_NOBODY) == [None] * len(TELL_OF_NOBODY)


LOST = "rank 0 (rank 1 of the world, node x at y:1) is lost to group z"


def step(world: ProcessGroup, group: ProcessGroup, failure: RankFailure) -> None:
    with failure:
        if world.rank == 3:
            raise PeerLost(LOST)
        group.all_reduce(torch.ones(2))


@pytest.mark.parametrize("backend", ["local", "grpc"])
def test_an_error_on_one_rank_reaches_those_that_share_no_group_with_it(backend: str) -> None:
    def run(world: ProcessGroup) -> str:
        with open_mesh(world, TOPOLOGY) as mesh:
            # Rank 0 waits for rank 2, which waits for rank 3 in a sub-group of a sub-group.
            inner = mesh.pp.subgroup([0, 1])
            assert inner is not None
            world.barrier()
            group = mesh.dp if world.rank == 0 else inner
            with pytest.raises(PeerLost) as caught:
                step(world, group, RankFailure(mesh))
            return str(caught.value)

    told = run_ranks(4, run, backend=backend, timeout_seconds=20)
    # Rank 1 is alive here, and hears of its own loss as all others do.
    for text in told:
        assert text == f"rank 1 (dp 0, pp 1, tp 0) is lost: {LOST}", told
