"""The four operators of tensor parallelism: what moves in forward, and its conjugate in backward.

    operator             forward          backward         where
    copy_to_group        identity         all-reduce       into a column-parallel layer
    reduce_from_group    all-reduce       identity         out of a row-parallel layer
    split_to_group       own part         all-gather       whole input of a row-parallel layer
    gather_from_group    all-gather       own part         whole output of a column-parallel layer

Each is the transpose of its backward, as operators on the tensors of all ranks together; a tensor
that is replicated has the same gradient on each rank, and that gradient is counted once. The scheme
is that of Megatron-LM (Shoeybi et al., 2019, arXiv:1909.08053), section 3.

All ranks of the group call the operators in the same order; autograd then runs the backwards in the
same order too. A group of one passes its tensors on as they are. Without autograd (`no_grad`, or
an input that needs no gradient) nothing but the collective runs.

Legend: R ranks, r this rank, n_r the size of its part of a dim of size n = n_0 + ... + n_(R-1).
"""

from collections.abc import Sequence
from typing import Any

import torch

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import ConfigError
from stagemesh.parallel.tensor.shards import resolve_sizes, shard_span


def copy_to_group(tensor: torch.Tensor, *, process_group: ProcessGroup) -> torch.Tensor:
    """Let each rank use a replicated tensor for its own part of the work.

        forward     y_r = x
        backward    dx = sum over r of dy_r

    Shapes:
        tensor: any, the same values on each rank.
        result: as `tensor`.
    """
    if process_group.size == 1 or not _needs_graph(tensor):
        return tensor
    return _apply(_CopyToGroup, tensor, process_group)


def reduce_from_group(
    tensor: torch.Tensor, *, process_group: ProcessGroup, inplace: bool = False
) -> torch.Tensor:
    """Add up the ranks' partial results; 16-bit ones are accumulated in float32.

        forward     y = sum over r of x_r
        backward    dx_r = dy

    Shapes:
        tensor: any, partial sums.
        result: as `tensor`, the same bits on each rank.

    Args:
        tensor: this rank's part.
        process_group: the ranks.
        inplace: write the result into `tensor`, whose values nobody may need any more.
    """
    if process_group.size == 1:
        return tensor
    if not _needs_graph(tensor):
        return _all_reduce(tensor, process_group, inplace)
    return _apply(_ReduceFromGroup, tensor, process_group, inplace)


def split_to_group(
    tensor: torch.Tensor,
    *,
    process_group: ProcessGroup,
    dim: int = -1,
    sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """Keep this rank's part of a replicated tensor.

        forward     y_r = x[..., start_r : start_r + n_r, ...]
        backward    dx = concatenation of dy_0, ..., dy_(R-1) along dim

    Shapes:
        tensor: [..., n, ...], the same values on each rank.
        result: [..., n_r, ...].

    Args:
        tensor: what to split.
        process_group: the ranks.
        dim: along which.
        sizes: n_0, ..., n_(R-1); equal ones if left out.

    Raises:
        ConfigError: the ranks do not divide n, or the sizes do not add up to it.
    """
    parts = resolve_sizes(
        sizes,
        total=tensor.shape[dim],
        num_ranks=process_group.size,
        name=f"dim {dim}",
        smallest=0,
    )
    if process_group.size == 1:
        return tensor
    if not _needs_graph(tensor):
        return _own_part(tensor, process_group, dim, parts)
    return _apply(_SplitToGroup, tensor, process_group, dim, parts)


def gather_from_group(
    tensor: torch.Tensor,
    *,
    process_group: ProcessGroup,
    dim: int = -1,
    sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """Put the ranks' parts together to a replicated tensor.

        forward     y = concatenation of x_0, ..., x_(R-1) along dim
        backward    dx_r = dy[..., start_r : start_r + n_r, ...]

    Shapes:
        tensor: [..., n_r, ...].
        result: [..., n, ...], the same bits on each rank.

    Args:
        tensor: this rank's part.
        process_group: the ranks.
        dim: along which.
        sizes: n_0, ..., n_(R-1); all equal to that of `tensor` if left out.

    Raises:
        ConfigError: `tensor` has another size than `sizes` say.
    """
    size = tensor.shape[dim]
    parts = (size,) * process_group.size if sizes is None else tuple(sizes)
    if len(parts) != process_group.size or parts[process_group.rank] != size:
        raise ConfigError(
            f"dim {dim} of rank {process_group.rank}'s part is {size}, which does not fit sizes "
            f"{list(parts)} of {process_group.size} ranks"
        )
    if process_group.size == 1:
        return tensor
    if not _needs_graph(tensor):
        return _all_gather(tensor, process_group, dim, parts)
    return _apply(_GatherFromGroup, tensor, process_group, dim, parts)


# Each backward is the conjugate operator, so that gradients of gradients come out right too.


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, process_group: ProcessGroup) -> torch.Tensor:
        ctx.process_group = process_group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return reduce_from_group(grad, process_group=ctx.process_group), None


class _ReduceFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, process_group: ProcessGroup, inplace: bool
    ) -> torch.Tensor:
        ctx.process_group = process_group
        if inplace:
            ctx.mark_dirty(tensor)
        return _all_reduce(tensor, process_group, inplace)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return copy_to_group(grad, process_group=ctx.process_group), None, None


class _SplitToGroup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, process_group: ProcessGroup, dim: int, sizes: Sequence[int]
    ) -> torch.Tensor:
        ctx.process_group, ctx.dim, ctx.sizes = process_group, dim, sizes
        # A copy: as a view of the input it could not be changed in place later.
        return _own_part(tensor, process_group, dim, sizes).clone(
            memory_format=torch.contiguous_format
        )

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        whole = gather_from_group(
            grad, process_group=ctx.process_group, dim=ctx.dim, sizes=ctx.sizes
        )
        return whole, None, None, None


class _GatherFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, process_group: ProcessGroup, dim: int, sizes: Sequence[int]
    ) -> torch.Tensor:
        ctx.process_group, ctx.dim, ctx.sizes = process_group, dim, sizes
        return _all_gather(tensor, process_group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        part = split_to_group(grad, process_group=ctx.process_group, dim=ctx.dim, sizes=ctx.sizes)
        return part, None, None, None


def _needs_graph(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


def _all_reduce(tensor: torch.Tensor, process_group: ProcessGroup, inplace: bool) -> torch.Tensor:
    result = tensor if inplace else tensor.clone(memory_format=torch.contiguous_format)
    process_group.all_reduce(result)
    return result


def _own_part(
    tensor: torch.Tensor, process_group: ProcessGroup, dim: int, sizes: Sequence[int]
) -> torch.Tensor:
    start, end = shard_span(sizes, rank=process_group.rank)
    return tensor.narrow(dim, start, end - start)


def _all_gather(
    tensor: torch.Tensor, process_group: ProcessGroup, dim: int, sizes: Sequence[int]
) -> torch.Tensor:
    if len(set(sizes)) == 1:
        shape = list(tensor.shape)
        shape[dim] = sum(sizes)
        whole = tensor.new_empty(shape)
        process_group.all_gather(torch.split(whole, sizes[0], dim), tensor)
        return whole
    parts = process_group.all_gather_variable(tensor.movedim(dim, 0))
    return torch.cat([part.movedim(0, dim) for part in parts], dim).to(tensor.device)
