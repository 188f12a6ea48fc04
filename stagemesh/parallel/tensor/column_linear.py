"""Column-parallel linear layers as one function of their common input."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from stagemesh.comm.process_group import ProcessGroup


def column_parallel_linear(
    input: torch.Tensor,
    *,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    process_group: ProcessGroup,
) -> tuple[torch.Tensor, ...]:
    """Apply the rank's rows of one or more linear layers to an input that they share.

        forward         y_i = x W_i^T + b_i
        input           dx = sum over ranks of (sum over i of dy_i W_i)
        weight, bias    dW_i = dy_i^T x,    db_i = sum over rows of dy_i

    The layers' input gradients are added on the rank first, so one all-reduce serves them all (with
    q, k and v one instead of three). It is under way while the weight gradients are computed, which
    do not need it:

        backward    | sum of dy_i W_i | dW_0, dW_1, ... , db_i | wait |
        network                       |=== all-reduce of dx =======|

    A backward that asks for some gradients only, as each half of a split one does, computes and
    sends no others. Gradients of gradients do not pass through it: autograd refuses them.

    Shapes:
        input: x, [..., K], the same values on each rank.
        weights: W_i, [N_i / R, K], the rank's rows.
        biases: b_i, [N_i / R], or None.
        result: y_i, [..., N_i / R].
    """
    input, weights, biases = _cast_as_autocast_does(input, weights, biases)
    is_reduced = process_group.size > 1 and input.requires_grad and torch.is_grad_enabled()
    if not is_reduced:
        pairs = zip(weights, biases, strict=True)
        return tuple(F.linear(input, weight, bias) for weight, bias in pairs)
    outputs: tuple[torch.Tensor, ...] = _ColumnLinear.apply(  # type: ignore[no-untyped-call]
        process_group, input, *weights, *biases
    )
    return outputs


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        process_group: ProcessGroup,
        input: torch.Tensor,
        *weights_and_biases: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        num_layers = len(weights_and_biases) // 2
        weights = weights_and_biases[:num_layers]
        biases = weights_and_biases[num_layers:]
        ctx.process_group = process_group
        ctx.is_there = [tensor is not None for tensor in weights_and_biases]
        ctx.save_for_backward(input, *weights)
        # An output that was not used has no gradient, rather than one of zeros to multiply with.
        ctx.set_materialize_grads(False)
        return tuple(
            F.linear(input, weight, bias)
            for weight, bias in zip(weights, biases, strict=True)
            if weight is not None
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        input, *weights = ctx.saved_tensors
        flat = [None if grad is None else grad.reshape(-1, grad.shape[-1]) for grad in grads]
        needs_input, *needs_layers = _gradients_asked_for(ctx)
        input_grad, work = None, None
        if needs_input:
            input_grad = _input_gradient(flat, weights).view(input.shape)
            work = ctx.process_group.all_reduce(input_grad, async_op=True)
        rows = input.reshape(-1, input.shape[-1])
        weight_grads = [
            None if grad is None or not is_needed else grad.t() @ rows
            for grad, is_needed in zip(flat, needs_layers[: len(weights)], strict=True)
        ]
        bias_grads = [
            None if grad is None or not is_needed else grad.sum(0)
            for grad, is_needed in zip(flat, needs_layers[len(weights) :], strict=True)
        ]
        if work is not None:
            work.wait()
        return None, input_grad, *weight_grads, *bias_grads


def _gradients_asked_for(ctx: Any) -> list[bool]:
    """Of the input, each weight and each bias: whether this backward wants a gradient of it.

    `ctx.needs_input_grad` says what any backward could want: it is made in the forward.
    """
    # Only tensors among the arguments have one: neither the group nor a bias that is None.
    nodes = iter(ctx.next_functions)
    return [is_there and _is_asked_for(next(nodes)[0]) for is_there in (True, *ctx.is_there)]


def _is_asked_for(node: Any) -> bool:
    if node is None:
        return False
    try:
        # Not public, but what torch's own hooks on several tensors ask.
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        # A leaf that torch.autograd.grad was called for, of which the engine cannot say it.
        return True


def _input_gradient(
    grads: Sequence[torch.Tensor | None], weights: Sequence[torch.Tensor]
) -> torch.Tensor:
    """The rank's part of dx.

    Shapes:
        grads: dy_i, [M, N_i / R], or None.
        weights: W_i, [N_i / R, K].
        result: [M, K].
    """
    total: torch.Tensor | None = None
    for grad, weight in zip(grads, weights, strict=True):
        if grad is not None:
            total = grad @ weight if total is None else total.addmm_(grad, weight)
    assert total is not None, "autograd calls no backward without any gradient"
    return total


def _cast_as_autocast_does(
    input: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, Sequence[torch.Tensor], Sequence[torch.Tensor | None]]:
    """Under autocast: casts that autograd sees. It is off in backward, where dtypes must agree."""
    device = input.device.type
    if not torch.is_autocast_enabled(device):
        return input, weights, biases
    dtype = torch.get_autocast_dtype(device)
    return (
        input.to(dtype),
        [weight.to(dtype) for weight in weights],
        [None if bias is None else bias.to(dtype) for bias in biases],
    )
