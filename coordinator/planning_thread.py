"""The border between the loop and the planner, which computes for seconds on large clusters."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def off_the_loop(function: Callable[[], T]) -> T:
    """Run a pure function on a thread and return what it returns.

    A cancelled caller does not stop a function that has begun.
    """
    return await asyncio.to_thread(function)
