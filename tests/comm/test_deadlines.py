"""Many deadlines under one timer: each block ends at its own, whatever the others do."""

import asyncio

import pytest

from stagemesh.comm.deadlines import Deadlines


async def sleep_at_most(deadlines: Deadlines, *, limit: float, work: float) -> float:
    """Seconds until a block that wants to sleep `work` has ended."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    block = deadlines.limit(limit)
    try:
        async with block:
            await asyncio.sleep(work)
    except TimeoutError:
        assert block.expired()
    return loop.time() - started


async def test_each_block_ends_at_its_own_deadline_or_before():
    deadlines = Deadlines()
    # The timer is set for 5 s first, then earlier twice, then left as it is.
    wanted = [(5.0, 0.1), (0.3, 9.0), (0.05, 9.0), (0.2, 9.0), (9.0, 0.02)]
    seconds = await asyncio.gather(
        *(sleep_at_most(deadlines, limit=limit, work=work) for limit, work in wanted)
    )
    for (limit, work), took in zip(wanted, seconds, strict=True):
        assert min(limit, work) <= took < min(limit, work) + 0.5


async def test_a_deadline_after_one_that_was_not_needed_still_holds():
    deadlines = Deadlines()
    assert await sleep_at_most(deadlines, limit=0.1, work=0.0) < 0.1
    # Its timer fires with nothing under way, or with this one, and must look again.
    took = await sleep_at_most(deadlines, limit=0.3, work=9.0)
    assert 0.3 <= took < 0.8


async def test_all_blocks_can_be_ended_at_once():
    deadlines = Deadlines()
    blocks = [
        asyncio.ensure_future(sleep_at_most(deadlines, limit=9.0, work=8.0)) for _ in range(3)
    ]
    await asyncio.sleep(0.05)
    deadlines.expire_all()
    assert max(await asyncio.gather(*blocks)) < 1.0


async def test_an_error_and_a_cancellation_pass_through():
    deadlines = Deadlines()
    with pytest.raises(ValueError, match="mine"):
        async with deadlines.limit(1.0):
            raise ValueError("mine")

    async def wait() -> None:
        async with deadlines.limit(9.0):
            await asyncio.sleep(8.0)

    task = asyncio.ensure_future(wait())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_blocks_own_timeout_error_is_not_taken_for_the_deadline():
    block = Deadlines().limit(9.0)
    with pytest.raises(TimeoutError):
        async with block:
            raise TimeoutError
    assert not block.expired()
