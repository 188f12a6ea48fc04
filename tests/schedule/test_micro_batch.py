"""The plain view of a schedule: entries, stages, idle slots."""

import pytest

from stagemesh.errors import ConfigError
from stagemesh.schedule.micro_batch import MicroBatchSchedule

SIZES = [(p, m) for p in (1, 2, 3, 4, 6) for m in (1, 2, 3, 5, 8)]


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("make", [MicroBatchSchedule.gpipe, MicroBatchSchedule.one_f_one_b])
def test_bubbles_are_those_of_the_formula(make, p: int, m: int) -> None:
    schedule = make(p, m)
    assert [schedule.bubble_slots(stage) for stage in range(p)] == [2 * (p - 1)] * p
    assert schedule.bubble_slots() == 2 * p * (p - 1)


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("make", [MicroBatchSchedule.gpipe, MicroBatchSchedule.one_f_one_b])
def test_entries_are_all_there_once_and_in_an_order_that_works(make, p: int, m: int) -> None:
    schedule = make(p, m)
    entries = schedule.entries
    assert sorted(entries) == sorted(
        (s, i, f) for s in range(p) for i in range(m) for f in (True, False)
    )
    place = {entry: index for index, entry in enumerate(entries)}
    for stage in range(p):
        for i in range(m):
            assert place[stage, i, True] < place[stage, i, False]
            if stage:
                assert place[stage - 1, i, True] < place[stage, i, True]
                assert place[stage, i, False] < place[stage - 1, i, False]
        assert schedule.stage_schedule(stage) == tuple(e for e in entries if e.stage == stage)


def test_gpipe_has_all_forwards_first() -> None:
    kinds = [entry.is_forward for entry in MicroBatchSchedule.gpipe(4, 3).stage_schedule(2)]
    assert kinds == [True] * 3 + [False] * 3


def test_1f1b_alternates_after_its_warm_up() -> None:
    schedule = MicroBatchSchedule.one_f_one_b(4, 6)
    texts = [
        "".join(
            f"{'F' if e.is_forward else 'B'}{e.micro_batch}" for e in schedule.stage_schedule(stage)
        )
        for stage in range(4)
    ]
    assert texts == [
        "F0F1F2F3B0F4B1F5B2B3B4B5",
        "F0F1F2B0F3B1F4B2F5B3B4B5",
        "F0F1B0F2B1F3B2F4B3F5B4B5",
        "F0B0F1B1F2B2F3B3F4B4F5B5",
    ]


def test_stages_that_do_not_exist_are_refused() -> None:
    schedule = MicroBatchSchedule.gpipe(2, 2)
    for ask in (schedule.stage_schedule, schedule.bubble_slots):
        with pytest.raises(ConfigError, match=r"stage must be in \[0, 2\), got 2"):
            ask(2)
