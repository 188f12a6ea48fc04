"""The schedules: complete, as long as the formulas say, within their memory, printable."""

import itertools
import subprocess
import sys

import pytest

from stagemesh.errors import ConfigError
from stagemesh.schedule.builders import (
    build_schedule,
    gpipe,
    interleaved,
    one_f_one_b,
    zero_bubble,
)
from stagemesh.schedule.grid import Costs, max_in_flight, simulate
from stagemesh.schedule.schedule import Schedule
from stagemesh.schedule.transfers import add_transfers
from stagemesh.schedule.validate import validate

RANKS = (1, 2, 3, 4, 7)
MICROBATCHES = (1, 2, 3, 4, 5, 8, 13)
SIZES = list(itertools.product(RANKS, MICROBATCHES))
B_IS_TWO = Costs(backward=2)


def all_schedules(num_ranks: int, num_microbatches: int) -> list[Schedule]:
    return [
        gpipe(num_ranks, num_microbatches),
        gpipe(num_ranks, num_microbatches, stages_per_rank=2),
        one_f_one_b(num_ranks, num_microbatches),
        zero_bubble(num_ranks, num_microbatches),
        *(interleaved(num_ranks, num_microbatches, stages_per_rank=v) for v in (1, 2, 3)),
    ]


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_every_schedule_is_valid_with_and_without_transfers(p: int, m: int) -> None:
    for schedule in all_schedules(p, m):
        validate(schedule)
        with_transfers = add_transfers(schedule)
        validate(with_transfers)
        assert with_transfers.compute_only() == schedule
        assert with_transfers.has_transfers == (p > 1)


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("build", [gpipe, one_f_one_b])
def test_gpipe_and_1f1b_idle_two_slots_per_other_stage(build, p: int, m: int) -> None:
    grid = simulate(build(p, m))
    assert [grid.bubble_slots(rank) for rank in range(p)] == [2 * (p - 1)] * p
    assert grid.bubble_ratio() == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("v", [2, 3])
def test_interleaving_divides_the_bubble_by_the_stages_of_a_rank(p: int, m: int, v: int) -> None:
    # One slot of 1F1B is v of these: the stages are shorter.
    idle = [simulate(interleaved(p, m, stages_per_rank=v)).bubble_slots(r) for r in range(p)]
    assert len(set(idle)) == 1
    if m >= p:
        assert idle[0] == 2 * (p - 1)
    elif m > 1:
        assert idle[0] < v * 2 * (p - 1)
    else:
        assert idle[0] == v * 2 * (p - 1)  # one micro-batch is on one rank at a time


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_zero_bubble_idles_a_third_of_1f1b_and_holds_no_more(p: int, m: int) -> None:
    schedule, reference = zero_bubble(p, m), one_f_one_b(p, m)
    grid, reference_grid = simulate(schedule, costs=B_IS_TWO), simulate(reference, costs=B_IS_TWO)
    assert [reference_grid.bubble_slots(r) for r in range(p)] == [3 * (p - 1)] * p
    assert [grid.bubble_slots(r) for r in range(p)] == [p - 1 + max(0, p - m)] * p
    for rank in range(p):
        assert max_in_flight(schedule.programs[rank])[rank] <= min(p, m)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_1f1b_holds_no_more_than_stages_behind_it(p: int, m: int) -> None:
    for rank, program in enumerate(one_f_one_b(p, m).programs):
        assert max_in_flight(program) == {rank: min(m, p - rank)}
    for rank, program in enumerate(gpipe(p, m).programs):
        assert max_in_flight(program) == {rank: m}


def test_grids_are_as_they_are_drawn() -> None:
    assert simulate(gpipe(3, 2)).render().splitlines() == [
        "rank 0 | F0 F1 .  .  .  .  B0 B1",
        "rank 1 | .  F0 F1 .  .  B0 B1 .",
        "rank 2 | .  .  F0 F1 B0 B1 .  .",
    ]
    assert simulate(one_f_one_b(4, 6)).render().splitlines() == [
        "rank 0 | F0 F1 F2 F3 .  .  .  B0 F4 B1 F5 B2 .  B3 .  B4 .  B5",
        "rank 1 | .  F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 .  B4 .  B5 .",
        "rank 2 | .  .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 F5 B4 .  B5 .  .",
        "rank 3 | .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 .  .  .",
    ]
    assert simulate(zero_bubble(4, 5)).render().splitlines() == [
        "rank 0 | F0 F1 F2 F3 .  .  .  I0 W0 F4 I1 W1 I2 W2 I3 W3 I4 W4",
        "rank 1 | .  F0 F1 F2 .  .  I0 F3 I1 W0 F4 I2 W1 I3 W2 I4 W3 W4",
        "rank 2 | .  .  F0 F1 .  I0 F2 I1 F3 I2 W0 F4 I3 W1 I4 W2 W3 W4",
        "rank 3 | .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 W2 W3 W4",
    ]
    assert simulate(interleaved(2, 3, stages_per_rank=2)).render().splitlines() == [
        "rank 0 | F0.0 F0.1 F0.2 F2.0 F2.1 F2.2 B2.0 .    B2.1 .    B2.2 B0.0 B0.1 B0.2",
        "rank 1 | .    F1.0 F1.1 F1.2 F3.0 B3.0 F3.1 B3.1 F3.2 B3.2 B1.0 B1.1 B1.2 .",
    ]


def test_a_schedule_prints_its_programs() -> None:
    assert str(add_transfers(gpipe(2, 1))).splitlines() == [
        "gpipe: 2 stages, 1 micro-batches",
        "rank 0: F0.0 F>0.0 >B0.0 B0.0",
        "rank 1: >F1.0 F1.0 B1.0 B>1.0",
    ]


def test_costs_move_the_grid() -> None:
    grid = simulate(gpipe(2, 1), costs=Costs(forward=2, backward=4, transfer=0.5))
    assert grid.makespan == 2 + 0.5 + 2 + 4 + 0.5 + 4
    assert grid.idle(0) == 7


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: gpipe(0, 1), "num_ranks must be at least 1, got 0"),
        (lambda: one_f_one_b(2, 0), "num_microbatches must be at least 1, got 0"),
        (lambda: interleaved(2, 2, stages_per_rank=0), "stages_per_rank must be at least 1"),
        (lambda: Costs(forward=0), "cost of FORWARD must be positive, got 0"),
        (lambda: Costs(transfer=-1), "must not be negative, got -1"),
        (
            lambda: build_schedule("1f1b", num_ranks=2, num_microbatches=2),
            "one of gpipe, one_f_one_b, interleaved, zero_bubble, got '1f1b'",
        ),
        (
            lambda: build_schedule(
                "one_f_one_b", num_ranks=2, num_microbatches=2, stages_per_rank=2
            ),
            "one stage per rank, got 2",
        ),
    ],
)
def test_what_is_out_of_range_is_refused(make, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


def test_schedules_import_no_torch() -> None:
    code = (
        "import sys, stagemesh.schedule.validate, stagemesh.schedule.micro_batch;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
