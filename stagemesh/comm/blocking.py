"""The life of a blocking group: its loop, its sub-groups, its end. Operations: process_group."""

import contextlib
import weakref
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol, Self

from stagemesh.comm.async_group import AsyncGroup
from stagemesh.comm.comm_loop import CommLoop
from stagemesh.comm.message_group import DEFAULT_DIRECT_BYTES, DEFAULT_MESSAGE_BYTES
from stagemesh.comm.peer_link import PeerAddress
from stagemesh.comm.work import Work
from stagemesh.errors import ConfigError, NotReady, StagemeshError

# Beside the deadline that each operation keeps by itself; only a loop that hangs needs it.
_LOOP_MARGIN_SECONDS = 10.0
_END_SECONDS = 10.0


class GroupOpener(Protocol):
    """What opens the groups of a process: a CommEndpoint or a LocalHub."""

    async def open_group(
        self,
        *,
        group_id: str,
        rank: int,
        members: Sequence[PeerAddress],
        incarnation: int,
        timeout_seconds: float,
        direct_bytes: int = DEFAULT_DIRECT_BYTES,
        chunk_bytes: int = DEFAULT_MESSAGE_BYTES,
    ) -> AsyncGroup:
        """Make this process a rank of a group."""

    async def leave_group(self, group: AsyncGroup) -> None:
        """Leave it."""


class BlockingGroup:
    """What all blocking groups have beside their operations. Thread-safe."""

    def __init__(
        self,
        group: AsyncGroup,
        *,
        loop: CommLoop,
        opener: GroupOpener,
        members: Sequence[PeerAddress],
        on_close: Callable[[], None] | None = None,
    ) -> None:
        """Wrap a group of the loop.

        Args:
            group: does the work.
            loop: on which `group` lives.
            opener: which opened `group`, and opens its sub-groups.
            members: all ranks in rank order.
            on_close: called at the end of `close`.
        """
        self._group = group
        self._loop = loop
        self._opener = opener
        self._members = tuple(members)
        self._on_close = on_close
        self._num_subgroups = 0
        self._subgroups: weakref.WeakSet[BlockingGroup] = weakref.WeakSet()
        self._is_closed = False

    @property
    def rank(self) -> int:
        """This rank, in [0, size)."""
        return self._group.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._group.size

    @property
    def group_id(self) -> str:
        """Name of the group."""
        return self._group.group_id

    @property
    def incarnation(self) -> int:
        """Version of the group."""
        return self._group.incarnation

    @property
    def timeout_seconds(self) -> float:
        """Deadline of an operation that sets none of its own."""
        return self._group.timeout_seconds

    @property
    def members(self) -> tuple[PeerAddress, ...]:
        """All ranks, in rank order."""
        return self._members

    @property
    def async_group(self) -> AsyncGroup:
        """The group for coroutines of the loop."""
        return self._group

    def subgroup(
        self, ranks: Sequence[int], *, timeout_seconds: float | None = None
    ) -> "Self | None":
        """A group of some ranks, with a transport and an order of calls of its own.

        All ranks of this group call it, in the same order and with the same ranks. The i-th of
        `ranks` is rank i of the new group. It ends with this one at the latest.

        Returns:
            The group, or None on a rank that is not in it.

        Raises:
            ConfigError: a rank is out of range or twice there.
        """
        if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(self.size)):
            raise ConfigError(
                f"ranks of a sub-group must be different and in [0, {self.size}), got {list(ranks)}"
            )
        # Not shared: which ranks call it when is the same order as that of the collectives.
        group_id = f"{self.group_id}/{self._num_subgroups}:{'-'.join(map(str, ranks))}"
        self._num_subgroups += 1
        if self.rank not in ranks:
            return None
        members = [
            replace(
                self._members[rank],
                rank=index,
                world_rank=rank if (above := self._members[rank].world_rank) is None else above,
            )
            for index, rank in enumerate(ranks)
        ]
        seconds = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        group = self._loop.run(
            self._opener.open_group(
                group_id=group_id,
                rank=ranks.index(self.rank),
                members=members,
                incarnation=self.incarnation,
                timeout_seconds=seconds,
                direct_bytes=self._group.direct_bytes,
                chunk_bytes=self._group.chunk_bytes,
            ),
            timeout=seconds + _LOOP_MARGIN_SECONDS,
        )
        made = type(self)(group, loop=self._loop, opener=self._opener, members=members)
        self._subgroups.add(made)
        return made

    def abort(self, cause: str) -> None:
        """End the group on all ranks: what waits in it raises GroupAborted with the cause.

        So do the sub-groups that this rank has made of it, for who waits in one of them.
        """
        for group in list(self._subgroups):
            if not group._is_closed:
                # One that has ended already must not keep the others from it.
                with contextlib.suppress(StagemeshError):
                    group.abort(cause)
        self._loop.run(self._group.abort(cause), timeout=_END_SECONDS)

    def call_on_abort(self, callback: Callable[[], None]) -> None:
        """Call back, on the loop's thread, once the group is aborted or left."""
        self._loop.run(self._group.call_on_abort(callback), timeout=_END_SECONDS)

    def find_abort(self, seconds: float) -> None:
        """Wait so long for another rank's abort to be heard of.

        Raises:
            GroupAborted: the group is aborted.
        """
        self._loop.run(self._group.find_abort(seconds), timeout=seconds + _END_SECONDS)

    def close(self) -> None:
        """Leave the group; what still runs in it here raises. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        # A loop that was closed before has ended all that lived on it.
        with contextlib.suppress(NotReady):
            try:
                self._loop.run(self._opener.leave_group(self._group), timeout=_END_SECONDS)
            finally:
                if self._on_close is not None:
                    self._on_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _call(
        self,
        operation: str,
        call: Coroutine[Any, Any, Any],
        *,
        timeout: float | None,
        async_op: bool,
    ) -> Any:
        work = self._start(operation, call, timeout=timeout)
        return work if async_op else work.wait()

    def _start(
        self, operation: str, call: Coroutine[Any, Any, Any], *, timeout: float | None
    ) -> Work[Any]:
        seconds = self.timeout_seconds if timeout is None else timeout
        return Work(
            self._loop.submit(call),
            loop=self._loop,
            operation=f"{operation} in group {self.group_id}",
            limit_seconds=seconds + _LOOP_MARGIN_SECONDS,
        )
