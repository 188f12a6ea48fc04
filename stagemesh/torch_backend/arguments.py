"""Reading what torch passes: options with timeouts and reductions, lists of tensors."""

from collections.abc import Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from stagemesh.comm.reduce import ReduceOp, check_reducible
from stagemesh.errors import ConfigError

_REDUCE_OPS = MappingProxyType(
    {
        dist.ReduceOp.SUM: ReduceOp.SUM,
        dist.ReduceOp.AVG: ReduceOp.AVG,
        dist.ReduceOp.MIN: ReduceOp.MIN,
        dist.ReduceOp.MAX: ReduceOp.MAX,
        dist.ReduceOp.PRODUCT: ReduceOp.PRODUCT,
    }
)


def seconds_of(opts: Any) -> float | None:
    """The timeout of a call's options; None where it sets none."""
    timeout: timedelta | None = None if opts is None else opts.timeout
    return timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None


def reduce_op_of(opts: Any, tensors: Sequence[torch.Tensor]) -> ReduceOp:
    """Our reduction for that of a call's options.

    Raises:
        ConfigError: there is none, or not for the dtype of a tensor.
    """
    known = _REDUCE_OPS.get(opts.reduceOp.op)
    if known is None:
        names = ", ".join(op.name for op in _REDUCE_OPS.values())
        raise ConfigError(
            f"the backend stagemesh has no reduction {opts.reduceOp.op.name}; use one of {names}"
        )
    for tensor in tensors:
        check_reducible(tensor.dtype, known)
    return known


def only(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The one tensor of a call.

    Raises:
        ConfigError: there are more, or none.
    """
    if len(tensors) != 1:
        raise ConfigError(f"expected one tensor per call, got {len(tensors)}")
    return tensors[0]


def flat(lists: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """The tensors of all lists."""
    return [tensor for tensors in lists for tensor in tensors]


def writable(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the same memory that the loop thread may write.

    Tensors made in inference mode may be written in that mode only, which is a thread's own.
    """
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        alias = torch.empty(0, dtype=tensor.dtype)
        return alias.set_(
            tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
        )
