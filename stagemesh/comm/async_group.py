"""AsyncGroup: send, receive and all-reduce between the ranks of a group, as coroutines.

A group is an argument, never a global: any number of them live in one process, each with its own
transport, timeout and incarnation. Every operation ends: with its result, at its deadline, when a
peer is lost, or when somebody aborts the group.

A send or receive that fails leaves the group usable. A collective that fails after it has begun
does not (some ranks may have finished it): the group is broken, and says so in every later call,
until its ranks join again with a higher incarnation. A CollectiveMismatch or a refused dtype breaks
nothing.
"""

import asyncio
import logging
import math
from collections.abc import Coroutine
from typing import Any, TypeVar

import torch

from stagemesh.comm.collectives import CollectiveCall, all_reduce_chunked, all_reduce_direct
from stagemesh.comm.reduce import ReduceOp, check_reducible
from stagemesh.comm.tasks import WaitingRanks, cancel_and_wait
from stagemesh.comm.transport import MAX_USER_TAG, Envelope, TensorSpec, Transport
from stagemesh.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    ConfigError,
    GroupAborted,
)
from stagemesh.rpc.codec import DEFAULT_CHUNK_BYTES, header_of

logger = logging.getLogger(__name__)

DEFAULT_DIRECT_BYTES = 256 * 1024
"""Up to this size an all-reduce sends the whole tensor to each rank: one hop."""

# Ending a transport is bounded too; what is not told in this time finds out by its own deadline.
_NOTIFY_SECONDS = 2.0

_ResultT = TypeVar("_ResultT")


class AsyncGroup:
    """One rank's view of a group. Loop-bound.

    All ranks must call the collectives in the same order.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        group_id: str,
        timeout_seconds: float,
        direct_bytes: int = DEFAULT_DIRECT_BYTES,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    ) -> None:
        """Make the group of a transport; nothing is sent yet.

        Args:
            transport: this rank's end; it carries rank, size and incarnation.
            group_id: the name in errors.
            timeout_seconds: deadline of every operation that sets none of its own.
            direct_bytes: largest all-reduce that takes one hop. Equal on all ranks.
            chunk_bytes: message size of larger ones. Equal on all ranks.

        Raises:
            ConfigError: a value is out of range.
        """
        if not 0 < timeout_seconds < math.inf:
            raise ConfigError(f"timeout_seconds must be positive, got {timeout_seconds}")
        if direct_bytes < 0 or chunk_bytes < 1:
            raise ConfigError(
                f"direct_bytes must be >= 0 and chunk_bytes >= 1, got {direct_bytes}, {chunk_bytes}"
            )
        self.group_id = group_id
        self._transport = transport
        self._timeout = timeout_seconds
        self._direct_bytes = direct_bytes
        self._chunk_bytes = chunk_bytes
        self._sequence = 0
        self._broken = ""

    @property
    def rank(self) -> int:
        """This rank, in [0, size)."""
        return self._transport.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._transport.size

    @property
    def incarnation(self) -> int:
        """Version of the group; messages of older ones are dropped."""
        return self._transport.mailbox.incarnation

    @property
    def timeout_seconds(self) -> float:
        """Deadline of an operation that sets none of its own."""
        return self._timeout

    async def send(
        self, tensor: torch.Tensor, *, peer: int, tag: int = 0, timeout: float | None = None
    ) -> None:
        """Send a tensor to a rank. Its memory may be reused when this returns.

        Raises:
            ConfigError: peer or tag is out of range, or the tensor cannot travel.
            PeerLost: the peer is gone.
            CollectiveTimeout: the peer takes nothing within the deadline.
            GroupAborted: the group was aborted or is broken.
        """
        self._check_peer(peer, tag)
        header_of(tensor)
        waiting = WaitingRanks()

        async def work() -> None:
            with waiting.on(peer):
                await self._transport.send(
                    peer, envelope=Envelope(tag=tag, operation="send"), tensor=tensor
                )

        await self._run(f"send to rank {peer}", work(), waiting=waiting, timeout=timeout)

    async def recv(
        self, tensor: torch.Tensor, *, peer: int, tag: int = 0, timeout: float | None = None
    ) -> None:
        """Receive into a tensor of the dtype and shape that the peer sends.

        A tensor that does not fit is dropped, and the buffer stays as it was, so that the next send
        and receive match again.

        Raises:
            CollectiveMismatch: naming both dtypes and shapes.
            ConfigError, PeerLost, CollectiveTimeout, GroupAborted: as in `send`.
        """
        expected = TensorSpec.of(tensor)
        received = await self.recv_tensor(peer=peer, tag=tag, expected=expected, timeout=timeout)
        with torch.no_grad():
            tensor.copy_(received)

    async def recv_tensor(
        self,
        *,
        peer: int,
        tag: int = 0,
        expected: TensorSpec | None = None,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """Receive a tensor into memory of its own; of any dtype and shape unless `expected` is set.

        Raises:
            CollectiveMismatch, ConfigError, PeerLost, CollectiveTimeout, GroupAborted: see `recv`.
        """
        self._check_peer(peer, tag)
        waiting = WaitingRanks()

        async def work() -> torch.Tensor:
            with waiting.on(peer):
                return (await self._transport.mailbox.get(peer, tag)).tensor

        operation = f"recv from rank {peer}"
        tensor = await self._run(operation, work(), waiting=waiting, timeout=timeout)
        if expected is not None and TensorSpec.of(tensor) != expected:
            raise CollectiveMismatch(
                f"{operation} (tag {tag}) in group {self.group_id}: rank {self.rank} expects "
                f"{expected}, rank {peer} sent {TensorSpec.of(tensor)}"
            )
        return tensor

    async def all_reduce(
        self,
        tensor: torch.Tensor,
        *,
        op: ReduceOp = ReduceOp.SUM,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """Reduce a tensor over all ranks, in place; returns it.

        Every rank gets the same bits. Strided views and 0-d tensors are fine. The tensor changes
        only when the operation succeeds. What each dtype does: see stagemesh.comm.reduce (sum of
        bool is "or"; avg of integers is refused).

        Shapes:
            tensor: any, the same on each rank.

        Raises:
            CollectiveMismatch: ranks called it with another op, dtype or shape; on each rank.
            ConfigError: the dtype does not support the op.
            PeerLost, CollectiveTimeout, GroupAborted: as in `send`.
        """
        header = header_of(tensor)
        self._check_usable()
        if self.size == 1:
            check_reducible(tensor.dtype, op)
            return tensor
        call = self._begin("all_reduce", tensor=tensor, op=op)
        if header.num_bytes <= self._direct_bytes:
            work = all_reduce_direct(call, tensor.detach(), op=op)
        else:
            work = all_reduce_chunked(call, tensor, op=op, chunk_bytes=self._chunk_bytes)
        reduced = await self._run_collective(call, work, timeout=timeout)
        with torch.no_grad():
            return tensor.copy_(reduced)

    async def abort(self, cause: str) -> None:
        """End the group here and, as far as they can be reached, on all ranks.

        All pending and later operations raise GroupAborted with the cause. May be called again.
        """
        mailbox = self._transport.mailbox
        if mailbox.aborted.is_set():
            return
        mailbox.abort(f"group {self.group_id} was aborted: {cause}")
        try:
            async with asyncio.timeout(_NOTIFY_SECONDS):
                await self._transport.notify_abort(cause)
        except TimeoutError:
            logger.warning("not all peers heard of the abort", extra={"group_id": self.group_id})

    async def close(self) -> None:
        """Leave the group: later operations raise, and the peers find this rank gone."""
        await self._transport.close()

    def _begin(self, operation: str, *, tensor: torch.Tensor, op: ReduceOp) -> CollectiveCall:
        envelope = Envelope(
            tag=0,
            operation=operation,
            sequence=self._sequence,
            reduce_op=op,
            called_with=TensorSpec.of(tensor),
        )
        self._sequence += 1
        return CollectiveCall(
            group_id=self.group_id,
            transport=self._transport,
            envelope=envelope,
            waiting=WaitingRanks(),
        )

    def _check_peer(self, peer: int, tag: int) -> None:
        self._check_usable()
        if not 0 <= peer < self.size or peer == self.rank:
            raise ConfigError(
                f"peer must be another rank in [0, {self.size}), got {peer} on rank {self.rank}"
            )
        if not 0 <= tag <= MAX_USER_TAG:
            raise ConfigError(f"tag must be in [0, {MAX_USER_TAG}], got {tag}")

    def _check_usable(self) -> None:
        self._transport.mailbox.raise_if_aborted()
        if self._broken:
            raise GroupAborted(
                f"group {self.group_id} is broken by an earlier failure: {self._broken}; "
                "its ranks must join again with a higher incarnation"
            )

    async def _run_collective(
        self,
        call: CollectiveCall,
        work: Coroutine[Any, Any, _ResultT],
        *,
        timeout: float | None,
    ) -> _ResultT:
        try:
            return await self._run(
                call.envelope.operation, work, waiting=call.waiting, timeout=timeout
            )
        except (CollectiveMismatch, ConfigError):
            raise
        except BaseException as error:
            # Cancellation counts: the other ranks went on without this one.
            self._broken = self._broken or f"{type(error).__name__}: {error}"
            raise

    async def _run(
        self,
        operation: str,
        work: Coroutine[Any, Any, _ResultT],
        *,
        waiting: WaitingRanks,
        timeout: float | None,
    ) -> _ResultT:
        """Run until it ends, the deadline passes or the group is aborted."""
        seconds = self._timeout if timeout is None else timeout
        task = asyncio.ensure_future(work)
        aborted = asyncio.ensure_future(self._transport.mailbox.aborted.wait())
        try:
            await asyncio.wait(
                {task, aborted}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if task.done():
                return task.result()
            self._transport.mailbox.raise_if_aborted()
            ranks = ", ".join(str(rank) for rank in waiting.ranks())
            raise CollectiveTimeout(
                f"{operation} in group {self.group_id} timed out on rank {self.rank} after "
                f"{seconds:g} s: waiting for rank {ranks or 'unknown'}"
            )
        finally:
            await cancel_and_wait([task, aborted])
