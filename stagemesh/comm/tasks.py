"""Two small tools for coroutines that wait on ranks."""

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterable
from types import TracebackType
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


async def run_together(coroutines: Iterable[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """Run all at once; their results in order.

    The first failure cancels the others, waits for them, and is raised as it is (a TaskGroup would
    wrap it).
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    if not tasks:
        return []
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task in done:
                task.result()
        return [task.result() for task in tasks]
    finally:
        await cancel_and_wait(tasks)


async def cancel_and_wait(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel what still runs and wait until it has ended; its errors were not asked for."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class WaitingRanks:
    """Which ranks an operation is waiting for, so that a timeout can name them."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def on(self, rank: int) -> "_Mark":
        """Within the block the operation waits for `rank`.

        An error leaves the mark: when all waits are cancelled at the deadline, the marks are what
        the deadline found.
        """
        return _Mark(self._counts, rank)

    def ranks(self) -> list[int]:
        """Ranks that are waited for now."""
        return sorted(rank for rank, count in self._counts.items() if count > 0)


class _Mark:
    """A block that waits for a rank. A class, as a generator takes over twice as long."""

    __slots__ = ("_counts", "_rank")

    def __init__(self, counts: Counter[int], rank: int) -> None:
        self._counts = counts
        self._rank = rank

    def __enter__(self) -> None:
        self._counts[self._rank] += 1

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc_type is None:
            self._counts[self._rank] -= 1
