"""A moment in which nobody else computes on the host, so that what is measured is this node.

When a whole cluster starts on one machine, its daemons still load libraries while the first ones
measure themselves: one measurement in ten was off by a factor of two to four then.
"""

import asyncio
import time

import psutil

_SAMPLE_SECONDS = 0.2
_BUSY_CORES = 0.3
"""Others that take less do not count: a desktop is never wholly idle."""
_MOST_SECONDS = 3.0
_YOUNG_SECONDS = 12.0
"""A daemon that is older did not start together with others, or has waited for them already."""


async def until_quiet() -> bool:
    """Wait until other processes leave the host's cores alone: some seconds, at a daemon's start.

    Returns:
        Whether it was seen to be quiet.
    """
    own = psutil.Process()
    left = min(_MOST_SECONDS, _YOUNG_SECONDS - (time.time() - own.create_time()))
    deadline = time.monotonic() + left
    while time.monotonic() < deadline:
        started, before = time.monotonic(), _others_seconds(own)
        await asyncio.sleep(_SAMPLE_SECONDS)
        taken = _others_seconds(own) - before
        if taken < _BUSY_CORES * (time.monotonic() - started):
            return True
    return False


def _others_seconds(own: psutil.Process) -> float:
    """Seconds of cores that all other processes have taken so far."""
    times, mine = psutil.cpu_times(), own.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    # On Linux a guest's time is in the user's as well.
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    return float(sum(times) - guests - idle - mine.user - mine.system)
