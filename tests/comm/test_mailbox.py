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
