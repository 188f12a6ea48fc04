"""Deadlines of many short operations, under one timer.

A timer of its own for each operation costs it some 20 us, of which most goes into timers that never
fire. Here a timer stands for all: it is set for the earliest deadline that was known when it was
set, and looks again when it fires. Loop-bound.
"""

import asyncio
from types import TracebackType


class Deadlines:
    """The operations of one group that are under way."""

    def __init__(self) -> None:
        self._limits: set[Limit] = set()
        self._timer: asyncio.TimerHandle | None = None

    def limit(self, seconds: float) -> "Limit":
        """A block that may take so long."""
        return Limit(self, seconds)

    def expire_all(self) -> None:
        """End what is under way now."""
        for limit in list(self._limits):
            limit.expire()

    def add(self, limit: "Limit") -> None:
        """Watch a block that begins."""
        self._limits.add(limit)
        if self._timer is None or limit.deadline < self._timer.when():
            self._set_timer(limit.deadline)

    def discard(self, limit: "Limit") -> None:
        """The block has ended. The timer is left as it is: it would be set again at once."""
        self._limits.discard(limit)

    def _set_timer(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(when, self._look)

    def _look(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time()
        for limit in list(self._limits):
            if limit.deadline <= now:
                limit.expire()
        waiting = [limit.deadline for limit in self._limits if limit.deadline > now]
        if waiting:
            self._set_timer(min(waiting))


class Limit:
    """An `asyncio.timeout` block whose timer is shared. Raises TimeoutError at the deadline."""

    __slots__ = ("_deadlines", "_timeout", "deadline")

    def __init__(self, deadlines: Deadlines, seconds: float) -> None:
        self._deadlines = deadlines
        self._timeout = asyncio.timeout(None)
        self.deadline = asyncio.get_running_loop().time() + seconds

    def expired(self) -> bool:
        """Whether the block was ended here."""
        return self._timeout.expired()

    def expire(self) -> None:
        """End the block now."""
        if not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._deadlines.add(self)

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._deadlines.discard(self)
        await self._timeout.__aexit__(exc_type, exc_value, traceback)
