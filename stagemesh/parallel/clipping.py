"""Clipping by the norm of all gradients, wherever their elements are.

A parameter's elements count once each. So the squares of what is spread over ranks are summed over
them, and those of what is equal on ranks are not:

    norm^2 = sum over `groups` of (replicated + sum over `tensor_group` of tensor_sharded)
"""

from collections.abc import Iterable, Sequence

import torch

from stagemesh.comm.process_group import ProcessGroup

_EPSILON = 1e-6
"""As torch.nn.utils.clip_grad_norm_ has it."""


def clip_grad_norm_(
    parameters: Iterable[torch.Tensor],
    *,
    max_norm: float,
    groups: Sequence[ProcessGroup] = (),
    tensor_group: ProcessGroup | None = None,
) -> torch.Tensor:
    """Scale all gradients so that their norm is at most `max_norm`. A collective of each group.

    Args:
        parameters: this rank's; those without a gradient count as zeros.
        max_norm: largest norm that is left as it is.
        groups: over whose ranks every parameter is spread: those of Fsdp (not NO_SHARD) and of
            pipeline stages. Not those of replicas.
        tensor_group: over whose ranks shards of tensor-parallel layers are spread. Parameters that
            are no such shards are equal on its ranks and count once.

    Returns:
        The norm before clipping: 0-d, float32 (float64, if any gradient is), the same on all ranks.
    """
    parameters = list(parameters)
    norm = global_grad_norm(parameters, groups=groups, tensor_group=tensor_group)
    # No comparison with max_norm: a norm that is not finite must show in all gradients.
    factor = torch.clamp(max_norm / (norm + _EPSILON), max=1.0)
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.grad.device))
    return norm


def global_grad_norm(
    parameters: Iterable[torch.Tensor],
    *,
    groups: Sequence[ProcessGroup] = (),
    tensor_group: ProcessGroup | None = None,
) -> torch.Tensor:
    """The 2-norm of all gradients; arguments and result as of `clip_grad_norm_`."""
    with_grad = [parameter for parameter in parameters if parameter.grad is not None]
    sharded = _sum_of_squares([p for p in with_grad if _is_tensor_sharded(p)])
    replicated = _sum_of_squares([p for p in with_grad if not _is_tensor_sharded(p)])
    if tensor_group is not None and tensor_group.size > 1:
        tensor_group.all_reduce(sharded)
    total = sharded + replicated
    for group in groups:
        if group.size > 1:
            group.all_reduce(total)
    dtypes = {parameter.grad.dtype for parameter in with_grad if parameter.grad is not None}
    return total.sqrt().to(torch.float64 if torch.float64 in dtypes else torch.float32)


def _sum_of_squares(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """0-d, float64: a float32 square would overflow where the norm does not."""
    total = torch.zeros((), dtype=torch.float64)
    for parameter in parameters:
        grad = parameter.grad
        assert grad is not None
        if grad.numel():
            total += _norm(grad.detach()).double().cpu() ** 2
    return total


def _norm(grad: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(grad.dtype, torch.float32)
    norm: torch.Tensor = torch.linalg.vector_norm(grad, dtype=wide)
    # The squares within may have overflowed; to compute all in float64 would take twice the time.
    if not norm.isfinite():
        norm = torch.linalg.vector_norm(grad, dtype=torch.float64)
    return norm


def _is_tensor_sharded(parameter: torch.Tensor) -> bool:
    if getattr(parameter, "tensor_shard", None) is not None:
        return True
    shard = getattr(parameter, "fsdp_shard", None)
    return shard is not None and bool(shard.is_tensor_sharded)
