"""MeshProcessGroup: torch's ProcessGroup over an AsyncGroup.

torch calls the methods below under its own names, from Python and, through them, from C++ (DDP's
reducer, functional collectives). Each starts an operation on the loop thread and returns at once.
"""

# torch's stubs give each method several overloads, of which its own callers use the one we have.
# mypy: disable-error-code="override,assignment"

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from stagemesh.torch_backend.arguments import flat, only, reduce_op_of, seconds_of, writable
from stagemesh.torch_backend.group_base import MeshGroupBase
from stagemesh.torch_backend.work import MeshWork


class MeshProcessGroup(MeshGroupBase):
    """One rank's end of a group, as torch sees it. Made by `MeshBackend.create`."""

    # Collectives.

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> MeshWork:
        """Reduce each tensor over the ranks, in place."""
        opts = opts or dist.AllreduceOptions()
        op, timeout = reduce_op_of(opts, tensors), seconds_of(opts)

        async def work() -> None:
            for tensor in map(writable, tensors):
                await self.group.all_reduce(tensor, op=op, timeout=timeout)

        return self.start_in_turn("allreduce", work, outputs=tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any) -> MeshWork:
        """Copy the root's tensors to all ranks."""
        src, timeout = opts.rootRank, seconds_of(opts)

        async def work() -> None:
            for tensor in map(writable, tensors):
                await self.group.broadcast(tensor, src=src, timeout=timeout)

        return self.start_in_turn("broadcast", work, outputs=tensors)

    def reduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> MeshWork:
        """Reduce tensors to the root, in place there."""
        op, dst, timeout = reduce_op_of(opts, tensors), opts.rootRank, seconds_of(opts)

        async def work() -> None:
            for tensor in map(writable, tensors):
                await self.group.reduce(tensor, dst=dst, op=op, timeout=timeout)

        return self.start_in_turn("reduce", work, outputs=tensors)

    def allgather(
        self,
        outputs: Sequence[Sequence[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        opts: Any = None,
    ) -> MeshWork:
        """Collect each input of all ranks in a list."""
        timeout = seconds_of(opts)

        async def work() -> None:
            for tensors, tensor in zip(outputs, inputs, strict=True):
                await self.group.all_gather(
                    [writable(output) for output in tensors], tensor, timeout=timeout
                )

        return self.start_in_turn("allgather", work, outputs=flat(outputs))

    allgather_coalesced = allgather

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> MeshWork:
        """Collect each input of all ranks in one tensor, along its first dim."""
        timeout = seconds_of(opts)

        async def work() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                await self.group.all_gather_tensor(writable(output), tensor, timeout=timeout)

        return self.start_in_turn("all_gather_single", work, outputs=outputs)

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> MeshWork:
        """Collect the tensors of all ranks in one, along its first dim."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def reduce_scatter(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[Sequence[torch.Tensor]],
        opts: Any = None,
    ) -> MeshWork:
        """Reduce lists of one tensor per rank; each rank keeps its own."""
        opts = opts or dist.ReduceScatterOptions()
        op, timeout = reduce_op_of(opts, outputs), seconds_of(opts)

        async def work() -> None:
            for output, tensors in zip(outputs, inputs, strict=True):
                await self.group.reduce_scatter(writable(output), tensors, op=op, timeout=timeout)

        return self.start_in_turn("reduce_scatter", work, outputs=outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> MeshWork:
        """Reduce tensors; each rank keeps its piece of the first dim."""
        opts = opts or dist.ReduceScatterOptions()
        op, timeout = reduce_op_of(opts, outputs), seconds_of(opts)

        async def work() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                await self.group.reduce_scatter_tensor(
                    writable(output), tensor, op=op, timeout=timeout
                )

        return self.start_in_turn("reduce_scatter_single", work, outputs=outputs)

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> MeshWork:
        """Reduce a tensor; each rank keeps its piece of the first dim."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def gather(
        self,
        outputs: Sequence[Sequence[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        opts: Any,
    ) -> MeshWork:
        """Collect the tensors of all ranks at the root; the others give no outputs."""
        tensor, dst, timeout = only(inputs), opts.rootRank, seconds_of(opts)
        into = [writable(output) for output in flat(outputs)] if self.rank() == dst else None

        async def work() -> None:
            await self.group.gather(tensor, dst=dst, outputs=into, timeout=timeout)

        return self.start_in_turn("gather", work, outputs=flat(outputs))

    def scatter(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[Sequence[torch.Tensor]],
        opts: Any,
    ) -> MeshWork:
        """Hand one tensor of the root to each rank; the others give no inputs."""
        output, src, timeout = writable(only(outputs)), opts.rootRank, seconds_of(opts)
        parts = flat(inputs) if self.rank() == src else None

        async def work() -> None:
            await self.group.scatter(output, src=src, inputs=parts, timeout=timeout)

        return self.start_in_turn("scatter", work, outputs=outputs)

    def alltoall(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> MeshWork:
        """Send input r to rank r; output r is from rank r."""
        into, timeout = [writable(output) for output in outputs], seconds_of(opts)

        async def work() -> None:
            await self.group.all_to_all(into, inputs, timeout=timeout)

        return self.start_in_turn("alltoall", work, outputs=outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> MeshWork:
        """The same with one tensor, cut along its first dim; no sizes means equal pieces."""
        into, timeout = writable(output), seconds_of(opts)

        async def work() -> None:
            await self.group.all_to_all_single(
                into,
                tensor,
                output_split_sizes=list(output_split_sizes or []) or None,
                input_split_sizes=list(input_split_sizes or []) or None,
                timeout=timeout,
            )

        return self.start_in_turn("all_to_all_single", work, outputs=[output])

    def barrier(self, opts: Any = None) -> MeshWork:
        """Wait until all ranks have called it."""
        timeout = seconds_of(opts)

        async def work() -> None:
            await self.group.barrier(timeout=timeout)

        return self.start_in_turn("barrier", work, outputs=[])

    # What some of them were called before torch 2.13, and what C++ callers may still look up.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Point to point.

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> MeshWork:
        """Send a tensor to a rank of the group."""
        return self.start("send", self.group.send(only(tensors), dst=peer, tag=tag), tensors)

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> MeshWork:
        """Receive a tensor from a rank of the group."""
        tensor = writable(only(tensors))
        return self.start("recv", self.group.recv(tensor, src=peer, tag=tag), tensors)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int) -> MeshWork:
        """Receive what arrives first with the tag, from whichever rank of the group."""
        tensor = writable(only(tensors))
        return self.start("recv", self.group.recv(tensor, tag=tag), tensors)
