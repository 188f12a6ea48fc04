"""The mailbox alone."""

import asyncio
from dataclasses import dataclass

import pytest

from stagemesh.comm.mailbox import CreditWindow, Mailbox, message_cost
from stagemesh.errors import CapacityExceeded, GroupAborted, PeerLost, ProtocolError


@dataclass(frozen=True)
class Letter:
    text: str = ""
    source_rank: int = 0
    tag: int = 0
    incarnation: int = 2
    num_bytes: int = 0


async def test_messages_wait_by_source_and_tag_in_order():
    box = Mailbox(incarnation=2)
    for letter in (Letter("a"), Letter("b", tag=1), Letter("c"), Letter("d", source_rank=1)):
        assert box.put(letter)
    taken = [(await box.get(*key)).text for key in ((1, 0), (0, 0), (0, 0), (0, 1))]
    assert taken == ["d", "a", "c", "b"]


async def test_old_incarnations_are_dropped_and_later_ones_refused():
    box = Mailbox(incarnation=2)
    assert not box.put(Letter("old", incarnation=1))
    assert box.num_dropped == 1
    with pytest.raises(ProtocolError, match="incarnation 3"):
        box.put(Letter(incarnation=3))
    box.put(Letter("new"))
    assert (await box.get(0, 0)).text == "new"


async def test_a_source_that_ignores_its_credit_is_refused_and_others_are_not():
    taken = []
    box = Mailbox(
        incarnation=2, capacity_bytes=3000, on_taken=lambda rank, cost: taken.append((rank, cost))
    )
    box.put(Letter(num_bytes=1000))
    with pytest.raises(CapacityExceeded, match="limit is 3000"):
        box.put(Letter(num_bytes=1000))
    box.put(Letter(source_rank=1, num_bytes=100_000))
    await box.get(0, 0)
    box.put(Letter(num_bytes=1000))
    assert taken == [(0, message_cost(1000))]


async def test_empty_messages_count_too():
    box = Mailbox(incarnation=2, capacity_bytes=10_000)
    for _ in range(9):
        box.put(Letter())
    with pytest.raises(CapacityExceeded):
        box.put(Letter())


async def test_abort_and_loss_wake_every_waiter():
    box = Mailbox(incarnation=2)
    waits = [asyncio.ensure_future(box.get(source, 0)) for source in (0, 1)]
    await asyncio.sleep(0)
    box.fail_source(1, "rank 1 is gone", node_id="n1")
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        await waits[1]
    assert not waits[0].done()
    box.abort("stopped")
    with pytest.raises(GroupAborted, match="stopped"):
        await waits[0]
    with pytest.raises(GroupAborted, match="stopped"):
        await box.get(1, 0)
    assert not box.put(Letter())


async def test_a_cancelled_receive_gives_its_message_back():
    box = Mailbox(incarnation=2)
    waiting = asyncio.ensure_future(box.get(0, 0))
    await asyncio.sleep(0)
    # The message reaches the waiter and the cancellation comes before the waiter runs.
    box.put(Letter("first"))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    box.put(Letter("second"))
    assert [(await box.get(0, 0)).text for _ in range(2)] == ["first", "second"]


async def test_a_window_lets_one_large_message_through_and_then_waits():
    window = CreditWindow(capacity_bytes=10)
    await window.acquire(100)
    blocked = asyncio.ensure_future(window.acquire(1))
    await asyncio.sleep(0.01)
    assert not blocked.done()
    window.release(100)
    await blocked
    waiting = asyncio.ensure_future(window.acquire(10))
    await asyncio.sleep(0.01)
    window.fail(lambda: PeerLost("gone"))
    with pytest.raises(PeerLost, match="gone"):
        await waiting


async def test_any_source_gets_what_arrived_first():
    box = Mailbox(incarnation=2)
    letters = [("a", 2), ("b", 0), ("c", 1), ("d", 2), ("e", 0)]
    for text, source in letters:
        box.put(Letter(text, source_rank=source))
    box.put(Letter("other tag", source_rank=1, tag=5))
    taken = [await box.get_any(0, sources=(0, 1, 2)) for _ in range(3)]
    assert [(each.text, each.source_rank) for each in taken] == letters[:3]
    # A named receive takes its own out of the middle.
    assert (await box.get(0, 0)).text == "e"
    assert (await box.get_any(0, sources=(0, 1, 2))).text == "d"
    assert (await box.get_any(5, sources=(0, 1))).text == "other tag"


async def test_who_asks_first_gets_the_message():
    box = Mailbox(incarnation=2)
    waits = []
    for source in (None, 1, None, 1):
        get = box.get_any(0, sources=(0, 1)) if source is None else box.get(source, 0)
        waits.append(asyncio.ensure_future(get))
        await asyncio.sleep(0)
    for text, source in (("a", 1), ("b", 1), ("c", 0), ("d", 1)):
        box.put(Letter(text, source_rank=source))
    assert [(await wait).text for wait in waits] == ["a", "b", "c", "d"]


async def test_any_source_waits_until_all_are_lost():
    box = Mailbox(incarnation=2)
    wait = asyncio.ensure_future(box.get_any(0, sources=(0, 1, 2)))
    for source in (2, 0):
        box.fail_source(source, f"rank {source} is gone")
        await asyncio.sleep(0)
        assert not wait.done()
    box.put(Letter("last", source_rank=1))
    assert (await wait).text == "last"
    box.put(Letter("left over", source_rank=1))
    wait = asyncio.ensure_future(box.get_any(1, sources=(0, 1, 2)))
    await asyncio.sleep(0)
    box.fail_source(1, "rank 1 is gone")
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        await wait
    assert (await box.get_any(0, sources=(0, 1, 2))).text == "left over"
    with pytest.raises(PeerLost):
        await box.get_any(0, sources=(0, 1, 2))


async def test_any_source_is_woken_by_an_abort():
    box = Mailbox(incarnation=2)
    wait = asyncio.ensure_future(box.get_any(0, sources=(0, 1)))
    await asyncio.sleep(0)
    box.abort("stopped")
    with pytest.raises(GroupAborted, match="stopped"):
        await wait


@pytest.mark.parametrize("named", [True, False], ids=["named", "any"])
async def test_a_message_given_back_goes_to_who_waits_already(named):
    box = Mailbox(incarnation=2)

    def get(is_named):
        call = box.get(0, 0) if is_named else box.get_any(0, sources=(0, 1))
        return asyncio.ensure_future(call)

    first = get(named)
    await asyncio.sleep(0)
    second = get(not named)
    await asyncio.sleep(0)
    box.put(Letter("first"))
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    box.put(Letter("second"))
    assert (await second).text == "first"
    assert (await box.get_any(0, sources=(0, 1))).text == "second"


async def test_cancelled_receives_leave_nothing_behind():
    box = Mailbox(incarnation=2)
    waits = [asyncio.ensure_future(box.get(0, tag)) for tag in range(5)]
    waits += [asyncio.ensure_future(box.get_any(tag, sources=(0, 1))) for tag in range(5)]
    await asyncio.sleep(0)
    for wait in waits:
        wait.cancel()
    await asyncio.wait(waits)
    assert not box._waiters
    assert not box._any_waiters
