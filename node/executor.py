"""The border between the event loop and torch: one compute thread per device.

Every torch call of a device runs on its thread, in the order submitted: engines need no locks, and
the loop that answers health checks and heartbeats never computes.
"""

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class ComputeThread:
    """Runs functions one after the other on a thread of its own.

    Args:
        name: name of the thread, for debuggers.
    """

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def run(self, function: Callable[[], T]) -> T:
        """Run `function` on the thread and return what it returns.

        The caller's context variables are visible to it, so that log records keep their ids. A
        cancelled caller does not stop a function that has begun.
        """
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(
            self._pool, lambda: context.run(function)
        )

    def close(self) -> None:
        """Drop what has not begun; do not wait for what has: shutdown is bounded by the daemon."""
        self._pool.shutdown(wait=False, cancel_futures=True)
