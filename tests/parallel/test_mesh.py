"""Each axis's group holds the ranks that it should, and the groups do not disturb one another."""

import pytest
import torch

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import ConfigError
from stagemesh.parallel.mesh import open_mesh
from stagemesh.topology import AXES, Topology
from tests.support.ranks import run_ranks


@pytest.mark.parametrize("backend", ["local", "grpc", "gloo"])
@pytest.mark.parametrize(("dp", "pp", "tp"), [(2, 1, 2), (1, 2, 2), (2, 2, 1)])
def test_a_sum_over_an_axis_is_that_of_its_ranks(backend: str, dp: int, pp: int, tp: int) -> None:
    topology = Topology(dp=dp, pp=pp, tp=tp)

    def run(world: ProcessGroup) -> dict[str, int]:
        with open_mesh(world, topology) as mesh:
            sums = {}
            for axis in AXES:
                group = mesh.group(axis)
                assert group.size == topology.degree(axis)
                assert group.rank == getattr(mesh.coordinates, axis)
                total = group.all_reduce(torch.tensor([2**world.rank]))
                sums[axis] = int(total)
            return sums

    for rank, sums in enumerate(run_ranks(4, run, backend=backend)):
        for axis in AXES:
            assert sums[axis] == sum(2**other for other in topology.axis_ranks(axis, rank))


def test_a_topology_of_another_size_is_refused() -> None:
    def run(world: ProcessGroup) -> None:
        with pytest.raises(ConfigError, match=r"dp 3 x pp 1 x tp 1 needs 3 ranks, the group has 2"):
            open_mesh(world, Topology(dp=3))

    run_ranks(2, run)
