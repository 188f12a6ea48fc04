"""Mesh: one rank's groups along the axes of a topology.

world of 8, dp 2 x pp 2 x tp 2        rank 5 = (dp 1, pp 0, tp 1)

    dp 0   pp 0   0 1                 mesh.tp   ranks 4, 5      shards of its stage
           pp 1   2 3                 mesh.pp   ranks 5, 7      stages of its replica
    dp 1   pp 0   4 5                 mesh.dp   ranks 1, 5      replicas of its shard
           pp 1   6 7
"""

import contextlib
from types import TracebackType
from typing import Self

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import ConfigError
from stagemesh.topology import AXES, Axis, Coordinates, Topology


class Mesh:
    """The groups of one rank. Made by `open_mesh`; an argument, never a global."""

    def __init__(
        self, world: ProcessGroup, *, topology: Topology, groups: dict[Axis, ProcessGroup]
    ) -> None:
        self.world = world
        """All ranks."""
        self.topology = topology
        """The degrees of the axes."""
        self._groups = groups

    @property
    def coordinates(self) -> Coordinates:
        """Where this rank stands."""
        return self.topology.coordinates(self.world.rank)

    @property
    def dp(self) -> ProcessGroup:
        """The ranks that hold the same shard of the same stage."""
        return self._groups["dp"]

    @property
    def pp(self) -> ProcessGroup:
        """The stages of this rank's replica, in order."""
        return self._groups["pp"]

    @property
    def tp(self) -> ProcessGroup:
        """The ranks that share this rank's stage."""
        return self._groups["tp"]

    def group(self, axis: Axis) -> ProcessGroup:
        """The group along an axis."""
        return self._groups[axis]

    def close(self) -> None:
        """Leave the axes' groups; the world is its owner's."""
        for axis in AXES:
            self._groups[axis].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def open_mesh(world: ProcessGroup, topology: Topology) -> Mesh:
    """Open the groups of all axes. Every rank of the world calls it with the same topology.

    Raises:
        ConfigError: the topology is not of the world's size.
    """
    if topology.world_size != world.size:
        raise ConfigError(
            f"dp {topology.dp} x pp {topology.pp} x tp {topology.tp} needs {topology.world_size} "
            f"ranks, the group has {world.size}"
        )
    groups: dict[Axis, ProcessGroup] = {}
    with contextlib.ExitStack() as opened:
        for axis in AXES:
            # All ranks ask for all groups, in one order: that is what names them.
            for ranks in topology.all_groups(axis):
                group = world.subgroup(ranks)
                if group is not None:
                    groups[axis] = group
                    opened.callback(group.close)
        opened.pop_all()
    return Mesh(world, topology=topology, groups=groups)
