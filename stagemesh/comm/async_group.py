"""AsyncGroup: messages and collectives between the ranks of a group, as coroutines.

A group is an argument, never a global: any number of them live in one process, each with its own
transport, timeout and incarnation. Every operation ends: with its result, at its deadline, when a
peer is lost, or when somebody aborts the group.

A send or receive that fails leaves the group usable. A collective that fails after it has begun
does not (some ranks may have finished it): the group is broken, and says so in every later call,
until its ranks join again with a higher incarnation. A CollectiveMismatch or a ConfigError breaks
nothing.

Legend: R is the group's size, N the bytes of the tensor argument (of the longer side, where an
input and an output differ). "Moves" is what one rank sends, without the agreement that each
collective begins with: R - 1 messages of about 100 bytes.
"""

import math
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import torch

from stagemesh.comm import movement, reductions
from stagemesh.comm.arguments import (
    check_absent,
    check_list,
    check_one_dtype,
    check_root,
    check_tensor,
    rows_per_rank,
    split_rows,
)
from stagemesh.comm.collectives import CollectiveCall
from stagemesh.comm.raw import check_writable, empty_like, flat_bytes, write
from stagemesh.comm.reduce import ReduceOp
from stagemesh.comm.runner import OperationRunner
from stagemesh.comm.tasks import WaitingRanks
from stagemesh.comm.transport import MAX_USER_TAG, Envelope, TensorSpec, Transport
from stagemesh.errors import CollectiveMismatch, ConfigError
from stagemesh.rpc.codec import check_sendable

DEFAULT_DIRECT_BYTES = 256 * 1024
"""Up to this size what a rank has for another travels in the agreement: one hop."""

DEFAULT_MESSAGE_BYTES = 2 * 2**20
"""Size of the messages of what is larger; at 1 MiB an all-reduce of 64 MB took more CPU time."""

_ResultT = TypeVar("_ResultT")


class AsyncGroup:
    """One rank's view of a group. Loop-bound.

    All ranks must call the collectives in the same order. Several may be under way at once: their
    order is that in which the coroutines begin to run, which for tasks is that of their creation.

    Tensors may be of each dtype of the wire, strided, 0-d or empty. Results are copied into the
    elements of the tensor that was given, and only when the operation succeeds. Until it ends,
    nobody else may write to its tensors. Each operation can raise, beside what it names itself:

        ConfigError         an argument is wrong on this rank; the call counts as not made
        CollectiveMismatch  ranks called different operations, roots, reduce ops, dtypes or shapes:
                            on each rank, with every rank's call
        PeerLost            a rank is gone
        CollectiveTimeout   the deadline passed; names the ranks that were waited for
        GroupAborted        the group was aborted or is broken
    """

    def __init__(
        self,
        transport: Transport,
        *,
        group_id: str,
        timeout_seconds: float,
        direct_bytes: int = DEFAULT_DIRECT_BYTES,
        chunk_bytes: int = DEFAULT_MESSAGE_BYTES,
    ) -> None:
        """Make the group of a transport; nothing is sent yet.

        Args:
            transport: this rank's end; it carries rank, size and incarnation.
            group_id: the name in errors.
            timeout_seconds: deadline of every operation that sets none of its own.
            direct_bytes: what is larger does not travel in the agreement. Equal on all ranks.
            chunk_bytes: message size of what is larger. Equal on all ranks.

        Raises:
            ConfigError: a value is out of range.
        """
        if not 0 < timeout_seconds < math.inf:
            raise ConfigError(f"timeout_seconds must be positive, got {timeout_seconds}")
        if direct_bytes < 0 or chunk_bytes < 1:
            raise ConfigError(
                f"direct_bytes must be >= 0 and chunk_bytes >= 1, got {direct_bytes}, {chunk_bytes}"
            )
        self._transport = transport
        self._direct_bytes = direct_bytes
        self._chunk_bytes = chunk_bytes
        self._runner = OperationRunner(
            transport, group_id=group_id, timeout_seconds=timeout_seconds
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

    async def send(
        self, tensor: torch.Tensor, *, peer: int, tag: int = 0, timeout: float | None = None
    ) -> None:
        """Send a tensor to a rank. Its memory may be reused when this returns. Moves N."""
        self._check_peer(peer, tag)
        check_sendable(tensor)
        waiting = WaitingRanks()

        async def work() -> None:
            with waiting.on(peer):
                await self._transport.send(
                    peer, envelope=Envelope(tag=tag, operation="send"), tensor=tensor
                )

        await self._runner.run(f"send to rank {peer}", work(), waiting=waiting, timeout=timeout)

    async def recv(
        self, tensor: torch.Tensor, *, peer: int, tag: int = 0, timeout: float | None = None
    ) -> None:
        """Receive into a tensor of the dtype and shape that the peer sends.

        A tensor that does not fit is dropped, and the buffer stays as it was, so that the next send
        and receive match again.

        Raises:
            CollectiveMismatch: it does not fit; naming both dtypes and shapes.
        """
        check_writable(tensor, name="tensor")
        expected = TensorSpec.of(tensor)
        received = await self.recv_tensor(peer=peer, tag=tag, expected=expected, timeout=timeout)
        write(tensor, [flat_bytes(received)])

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
            CollectiveMismatch: see `recv`.
        """
        self._check_peer(peer, tag)
        waiting = WaitingRanks()

        async def work() -> torch.Tensor:
            with waiting.on(peer):
                return (await self._transport.mailbox.get(peer, tag)).tensor

        operation = f"recv from rank {peer}"
        tensor = await self._runner.run(operation, work(), waiting=waiting, timeout=timeout)
        if expected is not None and TensorSpec.of(tensor) != expected:
            raise CollectiveMismatch(
                f"{operation} (tag {tag}) in group {self.group_id}: rank {self.rank} expects "
                f"{expected}, rank {peer} sent {TensorSpec.of(tensor)}"
            )
        return tensor

    async def barrier(self, *, timeout: float | None = None) -> None:
        """Return when all ranks have called it. Moves nothing."""
        call = self._begin("barrier", None)
        await self._finish(call, movement.barrier(call), timeout)

    async def broadcast(
        self, tensor: torch.Tensor, *, src: int, timeout: float | None = None
    ) -> torch.Tensor:
        """Put the tensor of rank `src` into those of all others; returns it.

        Moves (small) (R - 1) N on src and nothing on others; (large) N on src and
        (R - 2) / (R - 1) N on others, which pass chunks on as they come.

        Shapes:
            tensor: any, the same on each rank.
        """
        check_root(src, name="src", size=self.size)
        check_tensor(tensor, is_written=self.rank != src)
        call = self._begin(f"broadcast[src={src}]", tensor)
        await self._finish(call, movement.broadcast(call, tensor, src=src), timeout)
        return tensor

    async def all_reduce(
        self,
        tensor: torch.Tensor,
        *,
        op: ReduceOp = ReduceOp.SUM,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """Reduce a tensor over all ranks, in place; returns it.

        Every rank gets the same bits. What each dtype does: see stagemesh.comm.reduce (sum of bool
        is "or"; avg of integers is refused). Moves (small) (R - 1) N; (large) 2 (R - 1) / R N.

        Shapes:
            tensor: any, the same on each rank.

        Raises:
            ConfigError: the dtype does not support the op; on each rank.
        """
        check_tensor(tensor, is_written=True)
        call = self._begin("all_reduce", tensor, op=op)
        await self._finish(call, reductions.all_reduce(call, tensor, op=op), timeout)
        return tensor

    async def reduce(
        self,
        tensor: torch.Tensor,
        *,
        dst: int,
        op: ReduceOp = ReduceOp.SUM,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """As `all_reduce`, in place on rank `dst` only; the others' tensors are left alone.

        Moves (small) N, but nothing on dst; (large) N, and (R - 1) / R N on dst.
        """
        check_root(dst, name="dst", size=self.size)
        check_tensor(tensor, is_written=self.rank == dst)
        call = self._begin(f"reduce[dst={dst}]", tensor, op=op)
        await self._finish(call, reductions.reduce_to_one(call, tensor, op=op, dst=dst), timeout)
        return tensor

    async def reduce_scatter(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        *,
        op: ReduceOp = ReduceOp.SUM,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """Reduce the ranks' `inputs[r]` into the output of rank r; returns it.

        Same bits as `all_reduce` of the whole. Moves (R - 1) / R N.

        Shapes:
            output: any, the same on each rank.
            inputs: R tensors of the output's shape and dtype.

        Raises:
            ConfigError: the dtype does not support the op; on each rank.
        """
        return await self._reduce_scatter("reduce_scatter", output, inputs, op, timeout)

    async def reduce_scatter_tensor(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        op: ReduceOp = ReduceOp.SUM,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """As `reduce_scatter`, of the R pieces of one tensor.

        Shapes:
            output: [d, ...], the same on each rank.
            input: [R * d, ...] or [R, d, ...].
        """
        names = ("input", "output")
        inputs = rows_per_rank(input, output, size=self.size, names=names)
        return await self._reduce_scatter("reduce_scatter_tensor", output, inputs, op, timeout)

    async def all_gather(
        self,
        outputs: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        *,
        timeout: float | None = None,
    ) -> Sequence[torch.Tensor]:
        """Put the tensor of rank r into `outputs[r]` of each rank; returns them.

        Moves (R - 1) / R N, where N is the bytes of all outputs.

        Shapes:
            tensor: any, the same on each rank (else: `all_gather_variable`).
            outputs: R tensors of that shape and dtype.
        """
        check_list(outputs, name="outputs", like=tensor, size=self.size, is_written=True)
        return await self._all_gather("all_gather", outputs, tensor, timeout)

    async def all_gather_tensor(
        self, output: torch.Tensor, input: torch.Tensor, *, timeout: float | None = None
    ) -> torch.Tensor:
        """As `all_gather`, into the R pieces of one tensor; `input` may be one of them.

        Shapes:
            input: [d, ...], the same on each rank.
            output: [R * d, ...] or [R, d, ...].
        """
        check_tensor(output, name="output", is_written=True)
        pieces = rows_per_rank(output, input, size=self.size, names=("output", "input"))
        await self._all_gather("all_gather_tensor", pieces, input, timeout)
        return output

    async def all_gather_variable(
        self, tensor: torch.Tensor, *, timeout: float | None = None
    ) -> list[torch.Tensor]:
        """The tensors of all ranks in rank order, in memory of their own; rows may differ.

        Moves (R - 1) times the rank's own tensor.

        Shapes:
            tensor: [d, ...], where d may be another number on each rank, 0 too.
        """
        receivers = range(self.size)
        gathered = await self._gather_variable("all_gather_variable", tensor, receivers, timeout)
        assert gathered is not None
        return gathered

    async def gather(
        self,
        tensor: torch.Tensor,
        *,
        dst: int,
        outputs: Sequence[torch.Tensor] | None = None,
        timeout: float | None = None,
    ) -> Sequence[torch.Tensor] | None:
        """Put the tensor of rank r into `outputs[r]` of rank `dst`; returns them there, else None.

        Without `outputs` rank `dst` gets new tensors. Moves N, but nothing on dst.

        Shapes:
            tensor: any, the same on each rank (else: `gather_variable`).
            outputs: on dst, R tensors of that shape and dtype.
        """
        check_root(dst, name="dst", size=self.size)
        check_tensor(tensor)
        if self.rank != dst:
            check_absent(outputs, name="outputs", root=dst)
            outputs = None
        else:
            if outputs is None:
                outputs = [empty_like(tensor) for _ in range(self.size)]
            check_list(outputs, name="outputs", like=tensor, size=self.size, is_written=True)
        call = self._begin(f"gather[dst={dst}]", tensor)
        await self._finish(call, movement.gather(call, outputs or (), tensor, dst=dst), timeout)
        return outputs

    async def gather_variable(
        self, tensor: torch.Tensor, *, dst: int, timeout: float | None = None
    ) -> list[torch.Tensor] | None:
        """As `all_gather_variable`, on rank `dst` only; None on the others.

        Moves the rank's own tensor, but nothing on dst.
        """
        check_root(dst, name="dst", size=self.size)
        return await self._gather_variable(f"gather_variable[dst={dst}]", tensor, [dst], timeout)

    async def scatter(
        self,
        tensor: torch.Tensor,
        *,
        src: int,
        inputs: Sequence[torch.Tensor] | None = None,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """Put `inputs[r]` of rank `src` into the tensor of rank r; returns it.

        Moves (R - 1) / R of the inputs on src, nothing on others.

        Shapes:
            tensor: any, the same on each rank.
            inputs: on src, R tensors of that shape and dtype.
        """
        check_root(src, name="src", size=self.size)
        check_tensor(tensor, is_written=True)
        if self.rank == src:
            check_list(inputs or (), name="inputs", like=tensor, size=self.size)
        else:
            check_absent(inputs, name="inputs", root=src)
        call = self._begin(f"scatter[src={src}]", tensor)
        await self._finish(call, movement.scatter(call, tensor, inputs or (), src=src), timeout)
        return tensor

    async def all_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        *,
        timeout: float | None = None,
    ) -> Sequence[torch.Tensor]:
        """Put `inputs[r]` of rank q into `outputs[q]` of rank r; returns the outputs.

        Moves the bytes of the R - 1 inputs for other ranks.

        Shapes:
            inputs, outputs: R tensors each, of one dtype; `inputs[r]` on rank q as `outputs[q]` on
                rank r.
        """
        await self._all_to_all("all_to_all", outputs, inputs, timeout)
        return outputs

    async def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """As `all_to_all`, of the rows of one tensor; evenly split without split sizes.

        Shapes:
            input, output: [rows, ...]; rows are the sum of the split sizes.
        """
        outputs = split_rows(output, output_split_sizes, name="output", size=self.size)
        inputs = split_rows(input, input_split_sizes, name="input", size=self.size)
        await self._all_to_all("all_to_all_single", outputs, inputs, timeout)
        return output

    async def abort(self, cause: str) -> None:
        """End the group here and, as far as they can be reached, on all ranks.

        All pending and later operations raise GroupAborted with the cause. May be called again.
        """
        await self._runner.abort(cause)

    async def close(self) -> None:
        """Leave the group: later operations raise, and the peers find this rank gone."""
        await self._transport.close()

    async def _reduce_scatter(
        self,
        operation: str,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        op: ReduceOp,
        timeout: float | None,
    ) -> torch.Tensor:
        check_tensor(output, name="output", is_written=True)
        check_list(inputs, name="inputs", like=output, size=self.size)
        call = self._begin(operation, output, op=op)
        work = reductions.reduce_scatter(call, output, inputs, op=op)
        await self._finish(call, work, timeout)
        return output

    async def _all_gather(
        self,
        operation: str,
        outputs: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        timeout: float | None,
    ) -> Sequence[torch.Tensor]:
        check_tensor(tensor)
        call = self._begin(operation, tensor)
        await self._finish(call, movement.all_gather(call, outputs, tensor), timeout)
        return outputs

    async def _gather_variable(
        self, operation: str, tensor: torch.Tensor, receivers: Sequence[int], timeout: float | None
    ) -> list[torch.Tensor] | None:
        check_tensor(tensor)
        if not tensor.dim():
            raise ConfigError("a variable gather needs at least one dim, got a 0-d tensor")
        call = self._begin(operation, tensor, has_free_dim=True)
        work = movement.gather_variable(call, tensor, receivers=receivers)
        return await self._finish(call, work, timeout)

    async def _all_to_all(
        self,
        operation: str,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        timeout: float | None,
    ) -> None:
        check_one_dtype(outputs, inputs, size=self.size)
        # The shapes are compared apart, pair by pair; the call names the number of elements.
        total = TensorSpec(dtype=inputs[0].dtype, shape=(sum(t.numel() for t in inputs),))
        call = self._begin(operation, total, has_free_dim=True)
        await self._finish(call, movement.all_to_all(call, outputs, inputs), timeout)

    def _begin(
        self,
        operation: str,
        called_with: torch.Tensor | TensorSpec | None,
        *,
        op: ReduceOp | None = None,
        has_free_dim: bool = False,
    ) -> CollectiveCall:
        self._runner.check_usable()
        spec = TensorSpec.of(called_with) if isinstance(called_with, torch.Tensor) else called_with
        envelope = Envelope(
            tag=0,
            operation=operation,
            sequence=self._runner.next_sequence(),
            reduce_op=op,
            called_with=spec,
        )
        return CollectiveCall(
            group_id=self.group_id,
            transport=self._transport,
            envelope=envelope,
            waiting=WaitingRanks(),
            direct_bytes=self._direct_bytes,
            chunk_bytes=self._chunk_bytes,
            has_free_dim=has_free_dim,
        )

    async def _finish(
        self,
        call: CollectiveCall,
        work: Coroutine[Any, Any, _ResultT],
        timeout: float | None,
    ) -> _ResultT:
        return await self._runner.run_collective(
            call.envelope.operation, work, waiting=call.waiting, timeout=timeout
        )

    def _check_peer(self, peer: int, tag: int) -> None:
        self._runner.check_usable()
        if not 0 <= peer < self.size or peer == self.rank:
            raise ConfigError(
                f"peer must be another rank in [0, {self.size}), got {peer} on rank {self.rank}"
            )
        if not 0 <= tag <= MAX_USER_TAG:
            raise ConfigError(f"tag must be in [0, {MAX_USER_TAG}], got {tag}")
