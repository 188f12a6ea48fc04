"""What a group over torch.distributed needs of a transport: abort and incarnation.

Tensors go by torch itself.
"""

import asyncio
import contextlib

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from stagemesh.comm.gloo_wire import Wire
from stagemesh.comm.mailbox import Mailbox
from stagemesh.comm.transport import Envelope, Message
from stagemesh.errors import CommError

_ABORT_KEY = "aborted"
_LOOK_SECONDS = 1.5


class GlooTransport:
    """One rank's end. No message comes into its mailbox; an abort does."""

    def __init__(self, *wires: Wire, store: Store, incarnation: int, name: str) -> None:
        """Wrap connected wires.

        Args:
            wires: at least one.
            store: the group's own part of it.
            incarnation: version of the group.
            name: who this rank is, for the others.
        """
        self._name = name
        self._wires = wires
        self._store = store
        self._mailbox: Mailbox[Message] = Mailbox(incarnation=incarnation)

    @property
    def rank(self) -> int:
        """This rank."""
        return self._wires[0].rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._wires[0].size

    @property
    def mailbox(self) -> Mailbox[Message]:
        """Never filled; aborted with the group."""
        return self._mailbox

    def can_send_now(self, peer_rank: int, *, num_bytes: int) -> bool:
        """Never: nothing is sent here."""
        return False

    async def send(self, peer_rank: int, *, envelope: Envelope, tensor: torch.Tensor) -> None:
        """Not to be called: the group has other means."""
        raise CommError("a Gloo group does not send by its transport")

    async def notify_abort(self, cause: str) -> None:
        """Leave the cause where the others look for it, and cut the connections."""
        await asyncio.to_thread(self._notify, cause)

    async def find_abort(self) -> None:
        """Abort this rank's end too, if another rank has aborted the group."""
        if self._mailbox.aborted.is_set():
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_SECONDS):
                cause = await asyncio.to_thread(self._look)
                if cause:
                    self._mailbox.abort(cause)

    async def close(self) -> None:
        """Leave: the others find this rank gone."""
        self._mailbox.abort(f"rank {self.rank} has left the group")
        await asyncio.to_thread(self.cut)

    def cut(self) -> None:
        """Cut all connections. Blocks."""
        for wire in self._wires:
            wire.abort()

    def _notify(self, cause: str) -> None:
        # Without the store the others hear no cause, but still lose this rank.
        with contextlib.suppress(dist.DistError):
            self._store.set(_ABORT_KEY, f"{self._name} aborted the group: {cause}")
        self.cut()

    def _look(self) -> str:
        with contextlib.suppress(dist.DistError):
            if self._store.check([_ABORT_KEY]):
                return self._store.get(_ABORT_KEY).decode(errors="replace")
        return ""
