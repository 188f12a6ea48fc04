"""The part of AsyncGroup that is no collective: its life, messages, and how a call begins."""

import asyncio
import contextlib
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import torch

from stagemesh.comm.collectives import CollectiveCall, first_tag
from stagemesh.comm.engine import Engine, MeshEngine
from stagemesh.comm.large_copies import write_result
from stagemesh.comm.rank_names import RankNames
from stagemesh.comm.raw import check_writable, flat_bytes
from stagemesh.comm.reduce import ReduceOp
from stagemesh.comm.runner import OperationRunner
from stagemesh.comm.tasks import WaitingRanks
from stagemesh.comm.transport import MAX_USER_TAG, Envelope, TensorSpec, Transport
from stagemesh.errors import CollectiveMismatch, ConfigError
from stagemesh.rpc.codec import check_sendable

DEFAULT_DIRECT_BYTES = 256 * 1024
"""Up to this size what a rank has for another travels in the agreement: one hop. Of an all_reduce
or broadcast, which give the same to all ranks, all copies together count."""

DEFAULT_MESSAGE_BYTES = 2 * 2**20
"""Size of the messages of what is larger; at 1 MiB an all-reduce of 64 MB took more CPU time."""


_LOOK_AGAIN_SECONDS = 0.02

_ResultT = TypeVar("_ResultT")


def check_sizes(*, direct_bytes: int, chunk_bytes: int) -> None:
    """Refuse sizes that no group can have.

    Raises:
        ConfigError: one is too small.
    """
    if direct_bytes < 0 or chunk_bytes < 1:
        raise ConfigError(
            f"direct_bytes must be >= 0 and chunk_bytes >= 1, got {direct_bytes}, {chunk_bytes}"
        )


class MessageGroup:
    """What a group has beside its collectives. Loop-bound; see AsyncGroup."""

    def __init__(
        self,
        transport: Transport,
        *,
        group_id: str,
        timeout_seconds: float,
        direct_bytes: int = DEFAULT_DIRECT_BYTES,
        chunk_bytes: int = DEFAULT_MESSAGE_BYTES,
        engine: Engine | None = None,
        rank_names: Sequence[str] = (),
    ) -> None:
        """Make the group of a transport; nothing is sent yet.

        Args:
            transport: this rank's end; it carries rank, size and incarnation.
            group_id: the name in errors.
            timeout_seconds: deadline of every operation that sets none of its own.
            direct_bytes: what is larger does not travel in the agreement (DEFAULT_DIRECT_BYTES says
                what counts); 0 for nothing. Equal on all ranks.
            chunk_bytes: message size of what is larger. Equal on all ranks.
            engine: carries out the operations; without one our own algorithms over the transport.
            rank_names: who the ranks are, for errors; without, "rank 0", "rank 1", ...

        Raises:
            ConfigError: a value is out of range.
        """
        if not 0 < timeout_seconds < math.inf:
            raise ConfigError(f"timeout_seconds must be positive, got {timeout_seconds}")
        check_sizes(direct_bytes=direct_bytes, chunk_bytes=chunk_bytes)
        self._transport = transport
        self._engine: Engine = MeshEngine(transport) if engine is None else engine
        self._direct_bytes = direct_bytes
        self._chunk_bytes = chunk_bytes
        self._runner = OperationRunner(
            transport,
            group_id=group_id,
            timeout_seconds=timeout_seconds,
            names=RankNames(rank_names),
        )

    @property
    def rank(self) -> int:
        """This rank, in [0, size)."""
        return self._transport.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._transport.size

    @property
    def group_id(self) -> str:
        """Name of the group in errors."""
        return self._runner.group_id

    @property
    def incarnation(self) -> int:
        """Version of the group; messages of older ones are dropped."""
        return self._transport.mailbox.incarnation

    @property
    def timeout_seconds(self) -> float:
        """Deadline of an operation that sets none of its own."""
        return self._runner.timeout_seconds

    @property
    def direct_bytes(self) -> int:
        """Up to this size tensors travel in the agreement."""
        return self._direct_bytes

    @property
    def chunk_bytes(self) -> int:
        """Size of the messages of larger ones."""
        return self._chunk_bytes

    @property
    def is_over(self) -> bool:
        """Whether it was aborted or broken: every later operation raises."""
        return self._runner.is_over

    async def send(
        self, tensor: torch.Tensor, *, dst: int, tag: int = 0, timeout: float | None = None
    ) -> None:
        """Send a tensor to a rank. Its memory may be reused when this returns. Moves N."""
        self._check_peer(dst, tag, name="dst")
        check_sendable(tensor)
        operation = f"send to {self._runner.names.of(dst)}"
        self._runner.check_usable(operation)
        waiting = WaitingRanks()
        work = self._engine.send(tensor, peer=dst, tag=tag, waiting=waiting)
        await self._run_message(operation, work, waiting, timeout)

    async def recv(
        self,
        tensor: torch.Tensor,
        *,
        src: int | None = None,
        tag: int = 0,
        timeout: float | None = None,
    ) -> int:
        """Receive into a tensor of the dtype and shape that `src` sends; returns the sender.

        Without `src` from any: what arrives first with the tag. A tensor that does not fit is
        dropped, and the buffer stays as it was, so that the next send and receive match again.

        Raises:
            CollectiveMismatch: it does not fit; naming both dtypes and shapes.
            PeerLost: `src` is lost; without one, all others are.
        """
        check_writable(tensor, name="tensor")
        expected = TensorSpec.of(tensor)
        source, received = await self._receive(src, tag, expected, timeout)
        await write_result(tensor, [flat_bytes(received)])
        return source

    async def recv_tensor(
        self,
        *,
        src: int | None = None,
        tag: int = 0,
        expected: TensorSpec | None = None,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """Receive a tensor into memory of its own; of any dtype and shape unless `expected` is set.

        Raises:
            CollectiveMismatch, PeerLost: see `recv`.
        """
        return (await self._receive(src, tag, expected, timeout))[1]

    async def recv_any(
        self,
        *,
        tag: int = 0,
        expected: TensorSpec | None = None,
        timeout: float | None = None,
    ) -> tuple[int, torch.Tensor]:
        """As `recv_tensor` from any rank, with the rank that sent it.

        Raises:
            CollectiveMismatch, PeerLost: see `recv`.
        """
        return await self._receive(None, tag, expected, timeout)

    @property
    def names(self) -> RankNames:
        """Who the ranks are, for errors."""
        return self._runner.names

    async def call_on_abort(self, callback: Callable[[], None]) -> None:
        """Call back on the loop once the group is aborted or left; at once, if it is already."""
        if self._transport.mailbox.aborted.is_set():
            callback()
        else:
            self._transport.mailbox.call_on_abort(callback)

    async def find_abort(self, seconds: float) -> None:
        """Return after so long, unless the group is aborted, here or by another rank.

        Raises:
            GroupAborted: it is.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._transport.mailbox.aborted.is_set():
                    await self._engine.find_abort()
                    await asyncio.sleep(_LOOK_AGAIN_SECONDS)
        self._transport.mailbox.raise_if_aborted()

    async def abort(self, cause: str) -> None:
        """End the group here and, as far as they can be reached, on all ranks.

        All pending and later operations raise GroupAborted with the cause. May be called again.
        """
        await self._runner.abort(cause)

    async def close(self) -> None:
        """Leave the group: later operations raise, and the peers find this rank gone."""
        await self._transport.close()
        await self._engine.close()

    async def _receive(
        self, src: int | None, tag: int, expected: TensorSpec | None, timeout: float | None
    ) -> tuple[int, torch.Tensor]:
        self._check_peer(src, tag, name="src")
        who = "any rank" if src is None else self._runner.names.of(src)
        operation = f"recv from {who}"
        self._runner.check_usable(operation)
        waiting = WaitingRanks()
        work = self._engine.receive(peer=src, tag=tag, waiting=waiting)
        source, tensor = await self._run_message(operation, work, waiting, timeout)
        if expected is not None and TensorSpec.of(tensor) != expected:
            raise CollectiveMismatch(
                f"{operation} (tag {tag}) in group {self.group_id}: rank {self.rank} expects "
                f"{expected}, {self._runner.names.of(source)} sent {TensorSpec.of(tensor)}"
            )
        return source, tensor

    async def _run_message(
        self,
        operation: str,
        work: Coroutine[Any, Any, _ResultT],
        waiting: WaitingRanks,
        timeout: float | None,
    ) -> _ResultT:
        can_break = self._engine.messages_can_break
        run = self._runner.run_collective if can_break else self._runner.run
        return await run(operation, work, waiting=waiting, timeout=timeout)

    def _check_peer(self, peer: int | None, tag: int, *, name: str) -> None:
        if peer is None and self.size == 1:
            raise ConfigError("a group of one rank has nobody to receive from")
        if peer is not None and (not 0 <= peer < self.size or peer == self.rank):
            raise ConfigError(
                f"{name} must be another rank in [0, {self.size}), got {peer} on rank {self.rank}"
            )
        if not 0 <= tag <= MAX_USER_TAG:
            raise ConfigError(f"tag must be in [0, {MAX_USER_TAG}], got {tag}")

    def _begin(
        self,
        operation: str,
        called_with: torch.Tensor | TensorSpec | None,
        *,
        timeout: float | None,
        op: ReduceOp | None = None,
        has_free_dim: bool = False,
    ) -> CollectiveCall:
        """A collective takes its place in the order of the calls."""
        self._runner.check_usable(operation)
        spec = TensorSpec.of(called_with) if isinstance(called_with, torch.Tensor) else called_with
        sequence = self._runner.next_sequence()
        envelope = Envelope(
            tag=first_tag(sequence),
            operation=operation,
            sequence=sequence,
            reduce_op=op,
            called_with=spec,
        )
        return CollectiveCall(
            group_id=self._runner.group_id,
            transport=self._transport,
            names=self._runner.names,
            envelope=envelope,
            waiting=WaitingRanks(),
            direct_bytes=self._direct_bytes,
            chunk_bytes=self._chunk_bytes,
            seconds=self._runner.timeout_seconds if timeout is None else timeout,
            has_free_dim=has_free_dim,
        )

    async def _finish(self, call: CollectiveCall, work: Coroutine[Any, Any, _ResultT]) -> _ResultT:
        return await self._runner.run_collective(
            call.envelope.operation, work, waiting=call.waiting, timeout=call.seconds
        )
