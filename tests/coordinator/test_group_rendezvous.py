"""Forming groups: who completes one, who is refused, and who has not come."""

import pytest

from coordinator.group_rendezvous import (
    MAX_WAITING_GROUPS,
    MAX_WORLD_SIZE,
    Arrival,
    GroupRendezvous,
    Place,
)
from stagemesh.errors import CapacityExceeded, ConfigError


def arrive(
    meeting: GroupRendezvous,
    address: str,
    *,
    size: int = 3,
    rank: int | None = None,
    group: str = "g",
) -> Arrival:
    return meeting.arrive(group, world_size=size, rank=rank, place=Place(address=address))


@pytest.mark.parametrize(
    ("wanted", "got"),
    [
        ([0, 1, 2], [0, 1, 2]),
        ([2, 0, 1], [2, 0, 1]),
        ([None, None, None], [0, 1, 2]),
        ([None, 0, None], [1, 0, 2]),
        ([None, None, 1], [0, 2, 1]),
    ],
)
def test_the_last_one_completes_the_group(wanted: list[int | None], got: list[int]):
    rendezvous = GroupRendezvous()
    arrivals = []
    for index, rank in enumerate(wanted):
        assert all(arrival.meeting is None for arrival in arrivals)
        arrivals.append(arrive(rendezvous, f"a{index}", rank=rank))
    assert [arrival.rank for arrival in arrivals] == got
    meeting = arrivals[0].meeting
    assert meeting is not None
    assert all(arrival.meeting is meeting for arrival in arrivals)
    assert [meeting.places[rank].address for rank in got] == ["a0", "a1", "a2"]


def test_each_complete_group_has_a_higher_incarnation():
    rendezvous = GroupRendezvous()
    meetings = [arrive(rendezvous, "a", size=1, group=group).meeting for group in "ggh"]
    assert [meeting.incarnation for meeting in meetings if meeting] == [1, 2, 3]


def test_groups_of_other_names_do_not_mix():
    rendezvous = GroupRendezvous()
    first = arrive(rendezvous, "a", size=2, group="x")
    arrive(rendezvous, "b", size=2, group="y")
    assert first.meeting is None
    arrive(rendezvous, "c", size=2, group="x")
    assert first.meeting is not None
    assert [place.address for place in first.meeting.places] == ["a", "c"]


def test_who_withdraws_was_never_there():
    rendezvous = GroupRendezvous()
    gone = arrive(rendezvous, "gone", size=2, rank=0)
    rendezvous.withdraw(gone)
    rendezvous.withdraw(gone)
    last = [arrive(rendezvous, "a", size=2, rank=0), arrive(rendezvous, "b", size=2)]
    assert gone.meeting is None
    assert last[0].meeting is not None
    assert [place.address for place in last[0].meeting.places] == ["a", "b"]
    rendezvous.withdraw(last[0])
    assert last[1].meeting is last[0].meeting


@pytest.mark.parametrize(
    ("size", "rank", "text"),
    [
        (2, None, "b says world_size 2, but a said 3"),
        (3, 1, "b wants to be rank 1, which a is"),
        (3, 3, r"\[0, 3\), got 3"),
        (0, None, "world_size must be in"),
        (MAX_WORLD_SIZE + 1, None, "world_size must be in"),
    ],
)
def test_who_does_not_fit_is_refused_and_the_others_wait_on(size, rank, text):
    rendezvous = GroupRendezvous()
    waiting = [arrive(rendezvous, "a", rank=1)]
    with pytest.raises(ConfigError, match=text):
        arrive(rendezvous, "b", size=size, rank=rank)
    waiting += [arrive(rendezvous, "c"), arrive(rendezvous, "d")]
    assert all(arrival.meeting is not None for arrival in waiting)


@pytest.mark.parametrize(("group", "address"), [("", "a"), ("g" * 201, "a"), ("g", "")])
def test_names_and_addresses_are_bounded(group: str, address: str):
    with pytest.raises(ConfigError, match="characters"):
        arrive(GroupRendezvous(), address, group=group)


def test_the_number_of_groups_is_bounded():
    rendezvous = GroupRendezvous()
    first = arrive(rendezvous, "a", size=2, group="0")
    for number in range(1, MAX_WAITING_GROUPS):
        arrive(rendezvous, "a", size=2, group=str(number))
    with pytest.raises(CapacityExceeded):
        arrive(rendezvous, "a", size=2, group="one more")
    arrive(rendezvous, "b", size=2, group="0")
    assert first.meeting is not None
    arrive(rendezvous, "a", size=2, group="one more")


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([1], "1 of 3 are there; rank 0, 2 did not come"),
        ([0, 2], "2 of 3 are there; rank 1 did not come"),
        ([None, 2], "2 of 3 are there: a0, a1"),
    ],
)
def test_who_is_missing_is_said(ranks: list[int | None], text: str):
    rendezvous = GroupRendezvous()
    arrivals = [arrive(rendezvous, f"a{n}", rank=rank) for n, rank in enumerate(ranks)]
    assert rendezvous.describe_missing(arrivals[0]) == text
