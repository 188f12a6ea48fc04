"""Where a rank stands among data-, pipeline- and tensor-parallel axes. Torch-free.

    world_size = dp * pp * tp
    rank = (dp_index * pp + pp_index) * tp + tp_index

tp is the innermost axis: its ranks speak most, so they are neighbours and share a host where the
world's ranks are numbered host by host. dp is the outermost: it speaks once per step.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from stagemesh.errors import ConfigError

Axis = Literal["dp", "pp", "tp"]

AXES: tuple[Axis, ...] = get_args(Axis)
"""From the outermost to the innermost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """Position of a rank on each axis."""

    dp: int
    """Which replica of the model."""
    pp: int
    """Which stage of the replica."""
    tp: int
    """Which shard of the stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The degrees of the three axes."""

    dp: int = 1
    """Replicas; with sharded data parallelism, the ranks that share one replica's parameters."""
    pp: int = 1
    """Pipeline stages of a replica."""
    tp: int = 1
    """Tensor-parallel ranks of a stage."""

    def __post_init__(self) -> None:
        for axis in AXES:
            if self.degree(axis) < 1:
                raise ConfigError(f"degree of {axis} must be at least 1, got {self.degree(axis)}")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.pp * self.tp

    def degree(self, axis: Axis) -> int:
        """Number of ranks along an axis."""
        return {"dp": self.dp, "pp": self.pp, "tp": self.tp}[axis]

    def coordinates(self, rank: int) -> Coordinates:
        """Where a rank stands.

        Raises:
            ConfigError: there is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank must be in [0, {self.world_size}), got {rank}")
        outer, tp = divmod(rank, self.tp)
        dp, pp = divmod(outer, self.pp)
        return Coordinates(dp=dp, pp=pp, tp=tp)

    def rank_of(self, *, dp: int, pp: int, tp: int) -> int:
        """The rank at a place.

        Raises:
            ConfigError: there is no such place.
        """
        places: tuple[tuple[Axis, int], ...] = (("dp", dp), ("pp", pp), ("tp", tp))
        for axis, index in places:
            if not 0 <= index < self.degree(axis):
                raise ConfigError(f"{axis} index must be in [0, {self.degree(axis)}), got {index}")
        return (dp * self.pp + pp) * self.tp + tp

    def axis_ranks(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` on one axis only, itself among them, in order."""
        at = self.coordinates(rank)
        place = {"dp": at.dp, "pp": at.pp, "tp": at.tp}
        return tuple(self.rank_of(**{**place, axis: index}) for index in range(self.degree(axis)))

    def all_groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """The groups of an axis, ordered by their first ranks; each rank is in exactly one."""
        return tuple(sorted({self.axis_ranks(axis, rank) for rank in range(self.world_size)}))
