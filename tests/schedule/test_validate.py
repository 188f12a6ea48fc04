"""The validator finds what is wrong with a schedule, and names it."""

from collections.abc import Callable

import pytest

from stagemesh.errors import ConfigError
from stagemesh.schedule.actions import Action, ActionKind, moved_by, needs_of, product_of
from stagemesh.schedule.builders import gpipe, interleaved, one_f_one_b, zero_bubble
from stagemesh.schedule.grid import simulate
from stagemesh.schedule.schedule import Schedule
from stagemesh.schedule.transfers import add_transfers, peer_of, receive_of, send_of
from stagemesh.schedule.validate import run_rendezvous, validate

Edit = Callable[[list[Action]], None]

KINDS = {kind.value: kind for kind in ActionKind}


def act(text: str) -> Action:
    """An action as a program prints it."""
    kind = text.rstrip("0123456789.")
    stage, microbatch = text.removeprefix(kind).split(".")
    return Action(kind=KINDS[kind], stage=int(stage), microbatch=int(microbatch))


def edited(schedule: Schedule, rank: int, edit: Edit) -> Schedule:
    programs = [list(program) for program in schedule.programs]
    edit(programs[rank])
    return schedule.with_programs(programs)


def swap(one: str, other: str) -> Edit:
    def edit(program: list[Action]) -> None:
        i, j = program.index(act(one)), program.index(act(other))
        program[i], program[j] = program[j], program[i]

    return edit


def drop(text: str) -> Edit:
    return lambda program: program.remove(act(text))


def add(text: str) -> Edit:
    return lambda program: program.append(act(text))


@pytest.mark.parametrize(
    ("schedule", "rank", "edit", "says"),
    [
        (gpipe(2, 2), 0, drop("F0.1"), "forward of stage 0, micro-batch 1 is there 0 times"),
        (gpipe(2, 2), 1, add("F1.1"), "forward of stage 1, micro-batch 1 is there 2 times"),
        (gpipe(2, 2), 0, drop("B0.0"), "backward of stage 0, micro-batch 0 is there 0 times"),
        (zero_bubble(2, 2), 0, drop("W0.1"), "weight half .* micro-batch 1 is there 0 times"),
        (zero_bubble(2, 2), 0, drop("I0.1"), "input half .* micro-batch 1 is there 0 times"),
        (zero_bubble(2, 2), 0, add("B0.1"), "whole backward beside its halves"),
        (gpipe(2, 2), 0, add("F1.0"), "rank 0 has F1.0, but stage 1 is on rank 1"),
        (gpipe(2, 2), 0, add("F0.2"), "micro-batch that does not exist"),
        (gpipe(2, 2), 0, add("F2.0"), "stage that does not exist"),
        (one_f_one_b(2, 2), 1, swap("F1.0", "B1.0"), "rank 1: the backward of stage 1"),
        (zero_bubble(2, 2), 1, swap("I1.0", "W1.0"), "rank 1: the weight half"),
        # On its own rank each is in order; together the ranks wait for each other.
        (
            gpipe(2, 2),
            0,
            swap("F0.1", "B0.0"),
            "deadlocks: rank 0 at B0.0 waits for the gradient of stage 1, micro-batch 0; "
            "rank 1 at F1.1 waits for the activation of stage 0, micro-batch 1",
        ),
        (
            interleaved(2, 2, stages_per_rank=2),
            0,
            swap("F0.0", "F2.0"),
            "deadlocks: rank 0 at F2.0 waits for the activation of stage 1, micro-batch 0",
        ),
        (add_transfers(gpipe(2, 2)), 0, drop("F>0.1"), "send of the activation .* is missing"),
        (add_transfers(gpipe(2, 2)), 0, drop(">B0.1"), "receive of the gradient .* is missing"),
        (add_transfers(gpipe(2, 2)), 0, add(">B0.1"), "there twice"),
        (add_transfers(gpipe(2, 2)), 0, swap("F0.0", "F>0.0"), "comes before the activation"),
        (add_transfers(gpipe(2, 2)), 1, swap("F1.0", ">F1.0"), "comes before the activation"),
        (add_transfers(gpipe(2, 2)), 1, swap(">F1.0", ">F1.1"), "comes before the activation"),
        (add_transfers(gpipe(2, 3)), 0, swap("F>0.1", "F>0.2"), "comes before the activation"),
        (add_transfers(gpipe(2, 3)), 0, swap(">B0.1", ">B0.2"), "deadlocks|comes before"),
    ],
)
def test_what_is_wrong_is_named(schedule: Schedule, rank: int, edit: Edit, says: str) -> None:
    validate(schedule)
    wrong = edited(schedule, rank, edit)
    with pytest.raises(ConfigError, match=says):
        validate(wrong)


def naive_transfers(schedule: Schedule) -> Schedule:
    """Each receive just before what needs it, each send just after what makes it."""
    programs = []
    for rank, program in enumerate(schedule.programs):
        actions: list[Action] = []
        for action in program:
            needs = needs_of(action, num_stages=schedule.num_stages)
            actions += [receive_of(p) for p in needs if schedule.stage_ranks[p.stage] != rank]
            actions.append(action)
            made = product_of(action)
            if made is not None and peer_of(made, schedule) is not None:
                actions.append(send_of(made))
        programs.append(actions)
    return schedule.with_programs(programs)


@pytest.mark.parametrize("build", [one_f_one_b, zero_bubble])
def test_transfers_beside_their_computation_deadlock_where_a_send_blocks(build) -> None:
    # The negative control of the pass: as people write 1F1B by hand, the first two ranks send to
    # each other at once.
    naive = naive_transfers(build(3, 4))
    simulate(naive)
    with pytest.raises(ConfigError, match="deadlocks where a send waits for its receive: rank 0"):
        validate(naive)
    run_rendezvous(add_transfers(build(3, 4)))


@pytest.mark.parametrize("p", [2, 3, 5])
@pytest.mark.parametrize("m", [1, 3, 8])
def test_one_rank_receives_in_the_order_in_which_the_other_sends(p: int, m: int) -> None:
    for schedule in (one_f_one_b(p, m), zero_bubble(p, m), interleaved(p, m, stages_per_rank=3)):
        programs = add_transfers(schedule).programs
        for source in range(p):
            for target in range(p):
                sent = [
                    moved_by(a)
                    for a in programs[source]
                    if a.kind.is_send and peer_of(moved_by(a), schedule) == target
                ]
                received = [
                    moved_by(a)
                    for a in programs[target]
                    if a.kind.is_receive and schedule.stage_ranks[moved_by(a).stage] == source
                ]
                assert sent == received


def test_a_stage_without_a_rank_is_refused() -> None:
    schedule = gpipe(2, 1)
    wrong = Schedule(
        name="wrong", num_microbatches=1, stage_ranks=(0, 2), programs=schedule.programs
    )
    with pytest.raises(ConfigError, match="stage 1 is on rank 2, but the schedule has the ranks 0"):
        validate(wrong)
