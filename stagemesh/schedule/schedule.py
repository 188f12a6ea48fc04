"""Schedule: who does what in which order, as data. Torch-free.

    rank 0: F0.0 F0.1 F0.2 B0.0 B0.1 B0.2          each rank runs its program from left to right;
    rank 1: F1.0 B1.0 F1.1 B1.1 F1.2 B1.2          what it needs of another rank it waits for

A stage lives on one rank; a rank may have several stages (interleaving).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stagemesh.errors import ConfigError
from stagemesh.schedule.actions import Action, ActionKind

Program = tuple[Action, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The programs of all ranks; `stagemesh.schedule.validate` says whether they are right."""

    name: str
    num_microbatches: int
    stage_ranks: tuple[int, ...]
    """The rank of each stage."""
    programs: tuple[Program, ...]
    """The actions of each rank, in order."""

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return len(self.stage_ranks)

    @property
    def num_ranks(self) -> int:
        """Ranks that run it."""
        return len(self.programs)

    @property
    def has_transfers(self) -> bool:
        """Whether sends and receives were added."""
        return any(not a.kind.is_compute for program in self.programs for a in program)

    @property
    def is_split(self) -> bool:
        """Whether some backward is in two halves."""
        return any(
            a.kind is ActionKind.BACKWARD_INPUT for program in self.programs for a in program
        )

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in order."""
        return tuple(stage for stage, owner in enumerate(self.stage_ranks) if owner == rank)

    def compute_only(self) -> "Schedule":
        """The same without sends and receives."""
        return self.with_programs(
            [[a for a in program if a.kind.is_compute] for program in self.programs]
        )

    def with_programs(self, programs: Sequence[Sequence[Action]]) -> "Schedule":
        """The same with other programs."""
        return replace(self, programs=tuple(tuple(program) for program in programs))

    def __str__(self) -> str:
        rows = [
            f"rank {rank}: " + " ".join(map(str, program))
            for rank, program in enumerate(self.programs)
        ]
        head = f"{self.name}: {self.num_stages} stages, {self.num_microbatches} micro-batches"
        return "\n".join([head, *rows])


def check_sizes(**sizes: int) -> None:
    """Refuse a size below 1.

    Raises:
        ConfigError: naming it.
    """
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{name} must be at least 1, got {size}")
