"""The schedules we have: GPipe, 1F1B, interleaved 1F1B, zero-bubble ZB-H1. Torch-free.

    p ranks, m micro-batches, v stages per rank          what each rank idles, and holds at most
    gpipe         all forwards, then all backwards       (p - 1) (F + B); m activations
    one_f_one_b   backwards as early as they can be      (p - 1) (F + B); min(m, p - stage)
    interleaved   1F1B with v shorter stages per rank    (p - 1) (F + B) / v
    zero_bubble   weight halves fill the cool-down       (p - 1) (F + I - W); min(m, p)

Any m will do. With fewer than p the last two idle more than that, but never more than 1F1B. None
of them has sends and receives yet: see `add_transfers`.

Sources: Huang et al. 2018 (GPipe); Narayanan et al. 2021, "Efficient Large-Scale Language Model
Training on GPU Clusters" (1F1B as it is used since, interleaving); Qi et al. 2023, "Zero Bubble
Pipeline Parallelism" (ZB-H1: no more memory than 1F1B).
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from stagemesh.errors import ConfigError
from stagemesh.schedule.actions import Action, ActionKind
from stagemesh.schedule.schedule import Program, Schedule, check_sizes

ScheduleName = Literal["gpipe", "one_f_one_b", "interleaved", "zero_bubble"]


def build_schedule(
    name: str, *, num_ranks: int, num_microbatches: int, stages_per_rank: int = 1
) -> Schedule:
    """A schedule by its name.

    Raises:
        ConfigError: there is none of that name, or it cannot have several stages per rank.
    """
    match name:
        case "gpipe":
            return gpipe(num_ranks, num_microbatches, stages_per_rank=stages_per_rank)
        case "interleaved":
            return interleaved(num_ranks, num_microbatches, stages_per_rank=stages_per_rank)
        case "one_f_one_b" | "zero_bubble":
            if stages_per_rank != 1:
                raise ConfigError(
                    f"schedule {name} has one stage per rank, got {stages_per_rank}; "
                    "'interleaved' and 'gpipe' take several"
                )
            build = one_f_one_b if name == "one_f_one_b" else zero_bubble
            return build(num_ranks, num_microbatches)
        case _:
            allowed = ", ".join(get_args(ScheduleName))
            raise ConfigError(f"schedule must be one of {allowed}, got {name!r}")


def gpipe(num_ranks: int, num_microbatches: int, *, stages_per_rank: int = 1) -> Schedule:
    """All forwards, then all backwards. Stage s is on rank s mod p."""
    check_sizes(
        num_ranks=num_ranks, num_microbatches=num_microbatches, stages_per_rank=stages_per_rank
    )
    return sweep(tuple(range(num_ranks)) * stages_per_rank, num_microbatches)


def sweep(stage_ranks: tuple[int, ...], num_microbatches: int) -> Schedule:
    """GPipe with the stages where they are: stage s on rank `stage_ranks[s]`."""
    programs = []
    for rank in range(max(stage_ranks) + 1):
        stages = [stage for stage, owner in enumerate(stage_ranks) if owner == rank]
        forwards = [(s, m) for s in stages for m in range(num_microbatches)]
        backwards = [(s, m) for s in reversed(stages) for m in range(num_microbatches)]
        programs.append(
            (*_actions(ActionKind.FORWARD, forwards), *_actions(ActionKind.BACKWARD, backwards))
        )
    return Schedule(
        name="gpipe",
        num_microbatches=num_microbatches,
        stage_ranks=stage_ranks,
        programs=tuple(programs),
    )


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Warm-up forwards, then a forward and a backward in turn, then the backwards that are left.

    p = 4, m = 6, F = B = 1:
    stage 0 | F0 F1 F2 F3 .  .  .  B0 F4 B1 F5 B2 .  B3 .  B4 .  B5
    stage 3 | .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 .  .  .
    """
    check_sizes(num_ranks=num_ranks, num_microbatches=num_microbatches)
    programs = []
    for rank in range(num_ranks):
        cells = [(rank, microbatch) for microbatch in range(num_microbatches)]
        backwards = [[backward] for backward in _actions(ActionKind.BACKWARD, cells)]
        programs.append(
            _in_turn(_actions(ActionKind.FORWARD, cells), backwards, num_ahead=num_ranks - 1 - rank)
        )
    return _schedule("one_f_one_b", num_microbatches, 1, programs)


def interleaved(num_ranks: int, num_microbatches: int, *, stages_per_rank: int) -> Schedule:
    """1F1B where rank r has the stages r, r + p, r + 2p, ...: the bubble is of shorter stages.

    Micro-batches go in rounds: a round passes the first stages of all ranks, then the second ones,
    and so on. A round has p micro-batches or a few more, so that every m can be cut into rounds
    that are (nearly) equal: a short last one would leave a bubble of its own, or deadlock.
    """
    check_sizes(
        num_ranks=num_ranks, num_microbatches=num_microbatches, stages_per_rank=stages_per_rank
    )
    rounds = _rounds(num_microbatches, at_least=num_ranks)
    programs = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * stages_per_rank, num_ranks)
        forwards = [(s, m) for ms in rounds for s in stages for m in ms]
        backwards = [(s, m) for ms in rounds for s in reversed(stages) for m in ms]
        num_ahead = 2 * (num_ranks - 1 - rank) + (stages_per_rank - 1) * len(rounds[0])
        programs.append(
            _in_turn(
                _actions(ActionKind.FORWARD, forwards),
                [[backward] for backward in _actions(ActionKind.BACKWARD, backwards)],
                num_ahead=num_ahead,
            )
        )
    return _schedule("interleaved", num_microbatches, stages_per_rank, programs)


def zero_bubble(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-H1: 1F1B with backwards in halves; stage s does a weight half s micro-batches late.

    The late ones fill the cool-down, and no rank holds the activations of more than p
    micro-batches, which is what rank 0 holds in 1F1B.

    p = 4, m = 5, F = I = W = 1:
    stage 0 | F0 F1 F2 F3 .  .  .  I0 W0 F4 I1 W1 I2 W2 I3 W3 I4 W4
    stage 3 | .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 W2 W3 W4
    """
    check_sizes(num_ranks=num_ranks, num_microbatches=num_microbatches)
    programs = []
    for rank in range(num_ranks):
        cells = [(rank, microbatch) for microbatch in range(num_microbatches)]
        inputs = _actions(ActionKind.BACKWARD_INPUT, cells)
        weights = _actions(ActionKind.BACKWARD_WEIGHT, cells)
        num_late = min(rank, num_microbatches)
        backwards = [
            [half, *weights[index - num_late : index - num_late + 1]]
            if index >= num_late
            else [half]
            for index, half in enumerate(inputs)
        ]
        program = _in_turn(
            _actions(ActionKind.FORWARD, cells), backwards, num_ahead=num_ranks - 1 - rank
        )
        programs.append((*program, *weights[num_microbatches - num_late :]))
    return _schedule("zero_bubble", num_microbatches, 1, programs)


def _in_turn(
    forwards: Sequence[Action], backwards: Sequence[Sequence[Action]], *, num_ahead: int
) -> Program:
    """Some forwards ahead, then one and a backward in turn, then what is left."""
    program = list(forwards[:num_ahead])
    for index, backward in enumerate(backwards, start=num_ahead):
        program += forwards[index : index + 1]
        program += backward
    return tuple(program)


def _rounds(num_microbatches: int, *, at_least: int) -> list[range]:
    """Consecutive micro-batches in rounds of nearly equal size, the larger ones first."""
    num_rounds = max(1, num_microbatches // at_least)
    size, num_larger = divmod(num_microbatches, num_rounds)
    starts = [index * size + min(index, num_larger) for index in range(num_rounds + 1)]
    return [range(start, end) for start, end in itertools.pairwise(starts)]


def _actions(kind: ActionKind, cells: Iterable[tuple[int, int]]) -> tuple[Action, ...]:
    return tuple(Action(kind=kind, stage=stage, microbatch=m) for stage, m in cells)


def _schedule(
    name: str, num_microbatches: int, stages_per_rank: int, programs: Iterable[Program]
) -> Schedule:
    programs = tuple(programs)
    return Schedule(
        name=name,
        num_microbatches=num_microbatches,
        stage_ranks=tuple(range(len(programs))) * stages_per_rank,
        programs=programs,
    )
