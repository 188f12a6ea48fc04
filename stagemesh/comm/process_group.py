"""ProcessGroup: the blocking face of a group, for code that computes on threads.

    with init_process_group(config) as group:
        group.all_reduce(gradient, op=ReduceOp.AVG)
        work = group.all_reduce(other, async_op=True)
        ...
        work.wait()

Every method runs the coroutine of the same name on the group's CommLoop and waits for it, or gives
a Work with `async_op=True`. What each does, its shapes and its errors are documented at AsyncGroup.

The order of calls is what pairs them: all ranks call the collectives of one group in the same
order. Any thread may call (autograd's too), as long as the threads of a rank agree on an order;
collectives that are not ordered among each other belong into groups of their own (`subgroup`).
"""

from collections.abc import Sequence
from typing import Any

import torch

from stagemesh.comm.blocking import BlockingGroup
from stagemesh.comm.reduce import ReduceOp
from stagemesh.comm.work import Work


class ProcessGroup(BlockingGroup):
    """One rank's view of a group, blocking. Thread-safe."""

    def send(
        self, tensor: torch.Tensor, *, dst: int, tag: int = 0, timeout: float | None = None
    ) -> None:
        """Send a tensor to a rank."""
        self.isend(tensor, dst=dst, tag=tag, timeout=timeout).wait()

    def recv(
        self,
        tensor: torch.Tensor,
        *,
        src: int | None = None,
        tag: int = 0,
        timeout: float | None = None,
    ) -> int:
        """Receive into a tensor, without `src` from any rank; gives the rank that sent it."""
        return self.irecv(tensor, src=src, tag=tag, timeout=timeout).wait()

    def isend(
        self, tensor: torch.Tensor, *, dst: int, tag: int = 0, timeout: float | None = None
    ) -> Work[None]:
        """Begin to send a tensor to a rank."""
        call = self._group.send(tensor, dst=dst, tag=tag, timeout=timeout)
        return self._start("send", call, timeout=timeout)

    def irecv(
        self,
        tensor: torch.Tensor,
        *,
        src: int | None = None,
        tag: int = 0,
        timeout: float | None = None,
    ) -> Work[int]:
        """Begin to receive into a tensor; the Work gives the rank that sent it."""
        call = self._group.recv(tensor, src=src, tag=tag, timeout=timeout)
        return self._start("recv", call, timeout=timeout)

    def recv_tensor(
        self,
        *,
        src: int | None = None,
        tag: int = 0,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Receive a tensor of any dtype and shape, without `src` from any rank."""
        call = self._group.recv_tensor(src=src, tag=tag, timeout=timeout)
        return self._call("recv", call, timeout=timeout, async_op=async_op)

    def recv_any(
        self, *, tag: int = 0, timeout: float | None = None, async_op: bool = False
    ) -> Any:
        """Receive a tensor of any dtype and shape from any rank; gives rank and tensor."""
        call = self._group.recv_any(tag=tag, timeout=timeout)
        return self._call("recv", call, timeout=timeout, async_op=async_op)

    def all_reduce(
        self,
        tensor: torch.Tensor,
        *,
        op: ReduceOp = ReduceOp.SUM,
        out: torch.Tensor | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Reduce a tensor over all ranks, in place or into `out`; gives the result."""
        call = self._group.all_reduce(tensor, op=op, out=out, timeout=timeout)
        return self._call("all_reduce", call, timeout=timeout, async_op=async_op)

    def broadcast(
        self,
        tensor: torch.Tensor,
        *,
        src: int,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Make the tensor of all ranks that of `src`, in place; gives it."""
        call = self._group.broadcast(tensor, src=src, timeout=timeout)
        return self._call("broadcast", call, timeout=timeout, async_op=async_op)

    def reduce(
        self,
        tensor: torch.Tensor,
        *,
        dst: int,
        op: ReduceOp = ReduceOp.SUM,
        out: torch.Tensor | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """`all_reduce` on `dst` only, in place or into `out`; gives the result."""
        call = self._group.reduce(tensor, dst=dst, op=op, out=out, timeout=timeout)
        return self._call("reduce", call, timeout=timeout, async_op=async_op)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        *,
        op: ReduceOp = ReduceOp.SUM,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Reduce one tensor for each rank; each gets its own into `output`."""
        call = self._group.reduce_scatter(output, inputs, op=op, timeout=timeout)
        return self._call("reduce_scatter", call, timeout=timeout, async_op=async_op)

    def reduce_scatter_tensor(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        op: ReduceOp = ReduceOp.SUM,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """`reduce_scatter` of the equal parts of `input` along its first dimension."""
        call = self._group.reduce_scatter_tensor(output, input, op=op, timeout=timeout)
        return self._call("reduce_scatter_tensor", call, timeout=timeout, async_op=async_op)

    def all_gather(
        self,
        outputs: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Bring the tensors of all ranks to all ranks, into `outputs`."""
        call = self._group.all_gather(outputs, tensor, timeout=timeout)
        return self._call("all_gather", call, timeout=timeout, async_op=async_op)

    def all_gather_tensor(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """`all_gather` into one tensor, along its first dimension."""
        call = self._group.all_gather_tensor(output, input, timeout=timeout)
        return self._call("all_gather_tensor", call, timeout=timeout, async_op=async_op)

    def gather(
        self,
        tensor: torch.Tensor,
        *,
        dst: int,
        outputs: Sequence[torch.Tensor] | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Bring the tensors of all ranks to `dst`, into its `outputs`."""
        call = self._group.gather(tensor, dst=dst, outputs=outputs, timeout=timeout)
        return self._call("gather", call, timeout=timeout, async_op=async_op)

    def scatter(
        self,
        tensor: torch.Tensor,
        *,
        src: int,
        inputs: Sequence[torch.Tensor] | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Give each rank its tensor of the `inputs` of `src`; gives `tensor`."""
        call = self._group.scatter(tensor, src=src, inputs=inputs, timeout=timeout)
        return self._call("scatter", call, timeout=timeout, async_op=async_op)

    def all_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        *,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Send the i-th of `inputs` to rank i; gives `outputs`, by rank."""
        call = self._group.all_to_all(outputs, inputs, timeout=timeout)
        return self._call("all_to_all", call, timeout=timeout, async_op=async_op)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """`all_to_all` of parts of one tensor along its first dimension."""
        call = self._group.all_to_all_single(
            output,
            input,
            output_split_sizes=output_split_sizes,
            input_split_sizes=input_split_sizes,
            timeout=timeout,
        )
        return self._call("all_to_all_single", call, timeout=timeout, async_op=async_op)

    def barrier(self, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Wait until all ranks are here."""
        call = self._group.barrier(timeout=timeout)
        return self._call("barrier", call, timeout=timeout, async_op=async_op)

    def all_gather_variable(
        self, tensor: torch.Tensor, *, timeout: float | None = None, async_op: bool = False
    ) -> Any:
        """All ranks' tensors, whose first dimensions may differ, as a list."""
        call = self._group.all_gather_variable(tensor, timeout=timeout)
        return self._call("all_gather_variable", call, timeout=timeout, async_op=async_op)

    def gather_variable(
        self,
        tensor: torch.Tensor,
        *,
        dst: int,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """`all_gather_variable` for `dst` alone; None on the others."""
        call = self._group.gather_variable(tensor, dst=dst, timeout=timeout)
        return self._call("gather_variable", call, timeout=timeout, async_op=async_op)
