"""The part of a torch ProcessGroup that is no operation: its names, its end, and how work starts.

    caller's thread        loop thread
    allreduce ---------->  wait for the turn -> AsyncGroup.all_reduce -> turn over
    <- MeshWork
    MeshWork.wait <------  result or error

Collectives of a group run one at a time, in the order of their calls, as on a stream of NCCL: ranks
that call them in the same order then agree on what is what. Sends and receives need no turn.
"""

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]

from stagemesh.comm.async_group import AsyncGroup
from stagemesh.torch_backend.work import MeshWork


class GroupHost(Protocol):
    """What runs the operations of a group: the loop thread and the threads of callbacks."""

    @property
    def callbacks(self) -> concurrent.futures.Executor:
        """Where callbacks of futures run."""

    def submit(self, work: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        """Start a coroutine on the loop thread; those of one caller start in order."""

    def leave(self, group: AsyncGroup) -> None:
        """Leave a group, and wait until it is left."""


class MeshGroupBase(ProcessGroup):
    """One rank's end of a group, without its operations."""

    def __init__(self, group: AsyncGroup, *, host: GroupHost, store: Store) -> None:
        # The other constructor, with the store, refuses subclasses in Python.
        super().__init__(group.rank, group.size)  # type: ignore[call-arg]
        self.group = group
        self._host = host
        self._store = store
        self._name = ""
        self._description = ""
        self._turn = asyncio.Lock()
        self._is_shut_down = False

    def getBackendName(self) -> str:  # noqa: N802
        """Name of the backend; torch's C++ side asks by this name."""
        return "stagemesh"

    @property
    def _device_types(self) -> list[torch.device]:
        """Devices whose tensors the group takes; torch picks the one for objects from them."""
        return [torch.device("cpu")]

    # torch's own keep these in the C++ backends of the group, of which this one has none.

    @property
    def group_name(self) -> str:  # type: ignore[override]  # theirs is a NewType of it
        """Name under which torch's functional collectives find the group."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        """What the group is for."""
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def get_group_store(self) -> Store:
        """The store through which the ranks found each other."""
        return self._store

    def abort(self) -> None:
        """End the group on all ranks; pending and later operations raise GroupAborted."""
        self._host.submit(self.group.abort("torch aborted the process group")).result()

    def shutdown(self) -> None:
        """Leave the group. May be called again."""
        if not self._is_shut_down:
            self._is_shut_down = True
            self._host.leave(self.group)

    def start_in_turn(
        self,
        operation: str,
        work: Callable[[], Awaitable[None]],
        *,
        outputs: Sequence[torch.Tensor],
    ) -> MeshWork:
        """Start a collective; it waits for those that were called before."""

        async def in_turn() -> None:
            async with self._turn:
                await work()

        return self.start(operation, in_turn(), outputs)

    def start(
        self, operation: str, work: Coroutine[Any, Any, Any], outputs: Sequence[torch.Tensor]
    ) -> MeshWork:
        """Start an operation at once; a receive gives the rank that sent."""
        return MeshWork(
            self._host.submit(work),
            outputs=outputs,
            operation=operation,
            callbacks=self._host.callbacks,
        )
