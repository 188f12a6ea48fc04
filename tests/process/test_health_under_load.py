"""A daemon answers its health call while a large tensor moves through it."""

import asyncio
import signal

import pytest

from benchmarks.health import HEALTH_FLOOR_MS, MIN_CALLS, ask_until, measure, node

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


async def test_health_is_answered_in_time_while_256_mib_moves() -> None:
    measured = await measure(transfers=3)
    assert len(measured.latencies) >= MIN_CALLS
    p99 = 1e3 * measured.percentile(99)
    assert p99 <= HEALTH_FLOOR_MS, f"p99 {p99:.1f} ms, max {1e3 * max(measured.latencies):.1f} ms"


async def test_a_daemon_that_stands_still_is_seen() -> None:
    """Negative control of the measurement."""
    async with node("n0") as (process, address):
        done = asyncio.Event()
        asking = asyncio.ensure_future(ask_until(done, address))
        await asyncio.sleep(0.5)
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(0.5)
        process.send_signal(signal.SIGCONT)
        await asyncio.sleep(0.2)
        done.set()
        assert max(await asking) > 0.4
