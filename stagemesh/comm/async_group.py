"""AsyncGroup: messages and collectives between the ranks of a group, as coroutines.

A group is an argument, never a global: any number of them live in one process, each with its own
transport, timeout and incarnation. Every operation ends: with its result, at its deadline, when a
peer is lost, or when somebody aborts the group.

A send or receive that fails leaves the group usable. A collective that fails after it has begun
does not (some ranks may have finished it): the group is broken, and says so in every later call,
until its ranks join again with a higher incarnation. A CollectiveMismatch or a ConfigError breaks
nothing. Over torch.distributed a few things differ: see TorchEngine.

Legend: R is the group's size, N the bytes of the tensor argument (of the longer side, where an
input and an output differ). "Moves" is what one rank sends, without the agreement that each
collective begins with: R - 1 messages of about 100 bytes.
"""

from collections.abc import Sequence

import torch

from stagemesh.comm.arguments import (
    check_absent,
    check_list,
    check_one_dtype,
    check_out,
    check_root,
    check_tensor,
    rows_per_rank,
    split_rows,
)
from stagemesh.comm.large_copies import copy_first
from stagemesh.comm.message_group import MessageGroup
from stagemesh.comm.raw import empty_like
from stagemesh.comm.reduce import ReduceOp
from stagemesh.comm.transport import TensorSpec
from stagemesh.errors import ConfigError


class AsyncGroup(MessageGroup):
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

    async def barrier(self, *, timeout: float | None = None) -> None:
        """Return when all ranks have called it. Moves nothing."""
        call = self._begin("barrier", None, timeout=timeout)
        await self._finish(call, self._engine.barrier(call))

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
        call = self._begin(f"broadcast[src={src}]", tensor, timeout=timeout)
        await self._finish(call, self._engine.broadcast(call, tensor, src=src))
        return tensor

    async def all_reduce(
        self,
        tensor: torch.Tensor,
        *,
        op: ReduceOp = ReduceOp.SUM,
        out: torch.Tensor | None = None,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """Reduce a tensor over all ranks, in place or into `out`; returns the result.

        Every rank gets the same bits. What each dtype does: see stagemesh.comm.reduce (sum of bool
        is "or"; avg of integers is refused). Moves (small) (R - 1) N; (large) 2 (R - 1) / R N.

        Shapes:
            tensor: any, the same on each rank.
            out: as the tensor, which is then left alone; after a failure `out` equals it.

        Raises:
            ConfigError: the dtype does not support the op; on each rank.
        """
        check_out(tensor, out)
        call = self._begin("all_reduce", tensor, op=op, timeout=timeout)
        if out is None:
            await self._finish(call, self._engine.all_reduce(call, tensor, op=op))
            return tensor
        work = copy_first(tensor, out, lambda: self._engine.all_reduce(call, out, op=op))
        await self._finish(call, work)
        return out

    async def reduce(
        self,
        tensor: torch.Tensor,
        *,
        dst: int,
        op: ReduceOp = ReduceOp.SUM,
        out: torch.Tensor | None = None,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """As `all_reduce`, on rank `dst` only; the others' tensors, and `out`, are left alone.

        Moves (small) N, but nothing on dst; (large) N, and (R - 1) / R N on dst.
        """
        check_root(dst, name="dst", size=self.size)
        if self.rank == dst:
            check_out(tensor, out)
        else:
            check_tensor(tensor)
        call = self._begin(f"reduce[dst={dst}]", tensor, op=op, timeout=timeout)
        if out is None or self.rank != dst:
            await self._finish(call, self._engine.reduce(call, tensor, op=op, dst=dst))
            return tensor
        work = copy_first(tensor, out, lambda: self._engine.reduce(call, out, op=op, dst=dst))
        await self._finish(call, work)
        return out

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
        call = self._begin(f"gather[dst={dst}]", tensor, timeout=timeout)
        await self._finish(call, self._engine.gather(call, outputs or (), tensor, dst=dst))
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
        call = self._begin(f"scatter[src={src}]", tensor, timeout=timeout)
        await self._finish(call, self._engine.scatter(call, tensor, inputs or (), src=src))
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
        call = self._begin(operation, output, op=op, timeout=timeout)
        work = self._engine.reduce_scatter(call, output, inputs, op=op)
        await self._finish(call, work)
        return output

    async def _all_gather(
        self,
        operation: str,
        outputs: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        timeout: float | None,
    ) -> Sequence[torch.Tensor]:
        check_tensor(tensor)
        call = self._begin(operation, tensor, timeout=timeout)
        await self._finish(call, self._engine.all_gather(call, outputs, tensor))
        return outputs

    async def _gather_variable(
        self, operation: str, tensor: torch.Tensor, receivers: Sequence[int], timeout: float | None
    ) -> list[torch.Tensor] | None:
        check_tensor(tensor)
        if not tensor.dim():
            raise ConfigError("a variable gather needs at least one dim, got a 0-d tensor")
        call = self._begin(operation, tensor, has_free_dim=True, timeout=timeout)
        work = self._engine.gather_variable(call, tensor, receivers=receivers)
        return await self._finish(call, work)

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
        call = self._begin(operation, total, has_free_dim=True, timeout=timeout)
        await self._finish(call, self._engine.all_to_all(call, outputs, inputs))
