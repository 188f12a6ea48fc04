"""What a pipeline runs: its schedule with transfers, the two sweeps, and that all ranks agree."""

import hashlib
from dataclasses import dataclass

import torch

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import ConfigError
from stagemesh.schedule.actions import ActionKind
from stagemesh.schedule.builders import build_schedule, sweep
from stagemesh.schedule.schedule import Program, Schedule
from stagemesh.schedule.transfers import add_transfers
from stagemesh.schedule.validate import validate

_FORWARD = (ActionKind.FORWARD, ActionKind.SEND_ACTIVATION, ActionKind.RECV_ACTIVATION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The programs of one rank."""

    schedule: Schedule
    """With transfers."""
    step: Program
    """Forwards and backwards as the schedule has them."""
    forward: Program
    """All forwards."""
    backward: Program
    """All backwards."""


def make_plan(
    schedule: str | Schedule,
    *,
    num_ranks: int,
    rank: int,
    num_stages_here: int,
    num_microbatches: int,
) -> Plan:
    """The plan of a rank.

    Raises:
        ConfigError: the schedule is wrong, or not for so many ranks, stages or micro-batches.
    """
    if isinstance(schedule, str):
        schedule = build_schedule(
            schedule,
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            stages_per_rank=num_stages_here,
        )
    if schedule.num_ranks != num_ranks or schedule.num_microbatches != num_microbatches:
        raise ConfigError(
            f"schedule {schedule.name} is for {schedule.num_ranks} ranks and "
            f"{schedule.num_microbatches} micro-batches, the pipeline has {num_ranks} and "
            f"{num_microbatches}"
        )
    if len(schedule.stages_of(rank)) != num_stages_here:
        raise ConfigError(
            f"schedule {schedule.name} has {len(schedule.stages_of(rank))} stages on rank {rank}, "
            f"got {num_stages_here} modules"
        )
    validate(schedule)
    if not schedule.has_transfers:
        schedule = add_transfers(schedule)
        validate(schedule)
    both = add_transfers(sweep(schedule.stage_ranks, num_microbatches)).programs[rank]
    return Plan(
        schedule=schedule,
        step=schedule.programs[rank],
        forward=tuple(action for action in both if action.kind in _FORWARD),
        backward=tuple(action for action in both if action.kind not in _FORWARD),
    )


def check_agreement(schedule: Schedule, *, num_tied: int, process_group: ProcessGroup) -> bool:
    """Whether some rank has tied parameters; all ranks call it, once.

    Raises:
        ConfigError: on all ranks, if their schedules differ.
        CommError: a rank did not come.
    """
    if process_group.size == 1:
        return num_tied > 0
    digest = hashlib.sha256(str(schedule).encode()).digest()
    mine = [
        schedule.num_stages,
        schedule.num_microbatches,
        int.from_bytes(digest[:7]),
        num_tied,
    ]
    gathered = torch.empty(process_group.size, len(mine), dtype=torch.int64)
    process_group.all_gather_tensor(gathered, torch.tensor([mine]))
    ranks = gathered.tolist()
    if any(other[:3] != ranks[0][:3] for other in ranks):
        described = ", ".join(
            f"rank {rank}: {stages} stages, {microbatches} micro-batches, schedule {digest:x}"
            for rank, (stages, microbatches, digest, _) in enumerate(ranks)
        )
        raise ConfigError(f"the ranks of a pipeline must have the same schedule, got {described}")
    if ranks[0][3] != ranks[-1][3]:
        raise ConfigError(
            f"the first and the last rank must have as many tied parameters, got {ranks[0][3]} "
            f"and {ranks[-1][3]}"
        )
    return any(other[3] for other in ranks)
