"""The border between the event loop and disks: reads, writes and hashes happen on threads."""

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_NUM_THREADS = 4


class DiskThreads:
    """A few threads, started when they are needed, so that a slow disk delays no heartbeat.

    Args:
        name: begin of the threads' names, for debuggers.
    """

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(max_workers=_NUM_THREADS, thread_name_prefix=name)

    async def run(self, function: Callable[[], T]) -> T:
        """Run `function` on a thread and return what it returns.

        A cancelled caller does not stop a function that has begun, so it must own what it uses.
        """
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(
            self._pool, lambda: context.run(function)
        )

    def close(self) -> None:
        """Drop what has not begun; do not wait for what has."""
        self._pool.shutdown(wait=False, cancel_futures=True)
