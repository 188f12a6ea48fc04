"""The topology against numpy's own indexing of a dp x pp x tp block."""

import numpy as np
import pytest

from stagemesh.errors import ConfigError
from stagemesh.topology import AXES, Topology

SHAPES = [(1, 1, 1), (2, 1, 1), (1, 3, 2), (2, 2, 2), (3, 1, 4)]


@pytest.mark.parametrize(("dp", "pp", "tp"), SHAPES)
def test_ranks_are_numbered_as_a_row_major_block(dp: int, pp: int, tp: int) -> None:
    topology = Topology(dp=dp, pp=pp, tp=tp)
    block = np.arange(dp * pp * tp).reshape(dp, pp, tp)
    for (i, j, k), rank in np.ndenumerate(block):
        at = topology.coordinates(int(rank))
        assert (at.dp, at.pp, at.tp) == (i, j, k)
        assert topology.rank_of(dp=i, pp=j, tp=k) == rank
        assert topology.axis_ranks("dp", int(rank)) == tuple(block[:, j, k])
        assert topology.axis_ranks("pp", int(rank)) == tuple(block[i, :, k])
        assert topology.axis_ranks("tp", int(rank)) == tuple(block[i, j, :])


@pytest.mark.parametrize(("dp", "pp", "tp"), SHAPES)
def test_the_groups_of_an_axis_hold_each_rank_once(dp: int, pp: int, tp: int) -> None:
    topology = Topology(dp=dp, pp=pp, tp=tp)
    for axis in AXES:
        groups = topology.all_groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(dp * pp * tp))
        assert {len(group) for group in groups} == {topology.degree(axis)}


def test_what_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="degree of pp must be at least 1, got 0"):
        Topology(pp=0)
    with pytest.raises(ConfigError, match=r"rank must be in \[0, 4\), got 4"):
        Topology(dp=2, tp=2).coordinates(4)
    with pytest.raises(ConfigError, match=r"tp index must be in \[0, 2\), got 2"):
        Topology(dp=2, tp=2).rank_of(dp=0, pp=0, tp=2)
