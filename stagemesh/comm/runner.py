"""Runs the operations of a group: each with a deadline, woken by an abort, refused once broken."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from stagemesh.comm.deadlines import Deadlines
from stagemesh.comm.rank_names import RankNames
from stagemesh.comm.tasks import WaitingRanks
from stagemesh.comm.transport import Transport
from stagemesh.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    CommError,
    ConfigError,
    GroupAborted,
    PeerLost,
)

logger = logging.getLogger(__name__)

# Ending a transport is bounded too; what is not told in this time finds out by its own deadline.
_NOTIFY_SECONDS = 2.0

_ResultT = TypeVar("_ResultT")


class OperationRunner:
    """What the operations of a group have in common. Loop-bound."""

    def __init__(
        self, transport: Transport, *, group_id: str, timeout_seconds: float, names: RankNames
    ) -> None:
        self.transport = transport
        self.names = names
        self.group_id = group_id
        self.timeout_seconds = timeout_seconds
        self._sequence = 0
        self._broken = ""
        self._deadlines = Deadlines()
        transport.mailbox.call_on_abort(self._deadlines.expire_all)

    def next_sequence(self) -> int:
        """Number of the collective that begins now."""
        sequence = self._sequence
        self._sequence += 1
        return sequence

    @property
    def is_over(self) -> bool:
        """Whether `check_usable` raises."""
        return bool(self._broken) or self.transport.mailbox.aborted.is_set()

    def check_usable(self, operation: str) -> None:
        """Refuse an operation of a group that is over.

        Raises:
            GroupAborted: the group was aborted, or an earlier failure broke it.
        """
        try:
            self.transport.mailbox.raise_if_aborted()
        except GroupAborted as error:
            raise self._about(operation, error) from error
        if self._broken:
            raise GroupAborted(
                f"group {self.group_id} is broken by an earlier failure: {self._broken}; "
                "its ranks must join again with a higher incarnation"
            )

    async def run(
        self,
        operation: str,
        work: Coroutine[Any, Any, _ResultT],
        *,
        waiting: WaitingRanks,
        timeout: float | None,
    ) -> _ResultT:
        """Run until it ends, the deadline passes or the group is aborted.

        Raises:
            CollectiveTimeout: naming the operation and the ranks it waits for.
            PeerLost, GroupAborted: naming the operation that they ended.
        """
        seconds = self.timeout_seconds if timeout is None else timeout
        # In the caller's task: tasks of their own for the work, the deadline and the abort would
        # cost a small collective more than its message does.
        limit = self._deadlines.limit(seconds)
        try:
            try:
                async with limit:
                    return await work
            except TimeoutError:
                if not limit.expired():
                    raise
                self.transport.mailbox.raise_if_aborted()
        except (PeerLost, GroupAborted) as error:
            raise self._about(operation, error) from error
        ranks = waiting.ranks()
        raise CollectiveTimeout(
            f"{operation} in group {self.group_id} timed out on "
            f"{self.names.of(self.transport.rank)} after {seconds:g} s: waiting for "
            f"{self.names.of_all(ranks) if ranks else 'rank unknown'}"
        )

    async def run_collective(
        self,
        operation: str,
        work: Coroutine[Any, Any, _ResultT],
        *,
        waiting: WaitingRanks,
        timeout: float | None,
    ) -> _ResultT:
        """As `run`; a failure that leaves the ranks out of step breaks the group."""
        try:
            return await self.run(operation, work, waiting=waiting, timeout=timeout)
        except (CollectiveMismatch, ConfigError):
            raise
        except BaseException as error:
            # Cancellation counts: the other ranks went on without this one.
            self._broken = self._broken or f"{type(error).__name__}: {error}"
            raise

    def _about(self, operation: str, error: PeerLost | GroupAborted) -> CommError:
        """The same error, of an operation; who raises it knows of messages only."""
        own = self.names.of(self.transport.rank)
        text = f"{operation} in group {self.group_id} failed on {own}: {error}"
        if isinstance(error, PeerLost):
            return PeerLost(text, rank=error.rank, node_id=error.node_id)
        return GroupAborted(text)

    async def abort(self, cause: str) -> None:
        """End the group here and, as far as they can be reached, on all ranks."""
        mailbox = self.transport.mailbox
        if mailbox.aborted.is_set():
            return
        mailbox.abort(f"group {self.group_id} was aborted: {cause}")
        try:
            async with asyncio.timeout(_NOTIFY_SECONDS):
                await self.transport.notify_abort(cause)
        except TimeoutError:
            logger.warning("not all peers heard of the abort", extra={"group_id": self.group_id})
