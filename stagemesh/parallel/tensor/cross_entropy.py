"""Cross entropy of logits that are cut over the ranks by vocabulary. No rank holds all of them.

With the row maximum m_r and the sum s_r = sum of exp(z - m_r) of each rank's own logits z:

    m = max of m_r      s = sum over r of s_r exp(m_r - m)      loss = log s + m - z[target]

Each rank sends three numbers per row: m_r, s_r, and z[target] if the target is among its words. So
one all-gather does what else takes a maximum and two sums, and all ranks get the same bits.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import ConfigError
from stagemesh.parallel.tensor.shards import shard_span

Reduction = Literal["mean", "sum", "none"]


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    process_group: ProcessGroup,
    sizes: Sequence[int] | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> torch.Tensor:
    """As `torch.nn.functional.cross_entropy`, computed in float32 at least.

        backward    dz = (softmax(z) - [column is the target]) * dloss, of the rank's own columns

    Shapes:
        logits: [..., V_r], the rank's part of a vocabulary of V.
        targets: [...], ids in [0, V) or `ignore_index`, the same on each rank.
        result: [] or, with "none", [...]; the same bits on each rank.

    Args:
        logits: of this rank.
        targets: of the whole vocabulary.
        process_group: the ranks.
        sizes: V_r of each rank; all equal to that of `logits` if left out.
        ignore_index: a target that counts for nothing.
        reduction: "mean" is over the targets that count.

    Raises:
        ConfigError: a shape does not fit, or the reduction is unknown.
        IndexError: a target is out of range.
    """
    width = logits.shape[-1]
    parts = (width,) * process_group.size if sizes is None else tuple(sizes)
    if len(parts) != process_group.size or parts[process_group.rank] != width:
        raise ConfigError(
            f"rank {process_group.rank} has logits of {width} words, which does not fit sizes "
            f"{list(parts)} of {process_group.size} ranks"
        )
    if logits.shape[:-1] != targets.shape:
        raise ConfigError(
            f"targets must have the shape of the logits without their last dim, "
            f"{list(logits.shape[:-1])}, got {list(targets.shape)}"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ConfigError(f"reduction must be mean, sum or none, got {reduction!r}")
    flat = targets.reshape(-1)
    is_counted = flat != ignore_index
    _check_targets(flat[is_counted], vocab_size=sum(parts))
    start, _ = shard_span(parts, rank=process_group.rank)
    losses: torch.Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits.reshape(-1, width), flat - start, is_counted, process_group
    )
    if reduction == "none":
        return losses.view(targets.shape)
    # Without any target the mean is nan, as PyTorch's.
    return losses.sum() / is_counted.sum() if reduction == "mean" else losses.sum()


class _CrossEntropy(torch.autograd.Function):
    """Losses of rows; 0 where a row does not count.

    Shapes:
        logits: [N, V_r].
        local_targets: [N], relative to the rank's first word.
        is_counted: [N], bool.
        result: [N].
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        local_targets: torch.Tensor,
        is_counted: torch.Tensor,
        process_group: ProcessGroup,
    ) -> torch.Tensor:
        is_own = is_counted & (local_targets >= 0) & (local_targets < logits.shape[1])
        columns = local_targets.masked_fill(~is_own, 0).unsqueeze(1)
        wide = logits.to(_compute_dtype(logits))
        row_max = wide.amax(1)
        # A rank all of whose logits are -inf: -inf minus a finite number, instead of nan.
        shift = row_max.clamp(min=torch.finfo(wide.dtype).min)
        row_sum = (wide - shift.unsqueeze(1)).exp_().sum(1)
        target_logit = wide.gather(1, columns).squeeze(1).masked_fill(~is_own, 0)
        maxima, sums, target_logits = _gather_rows(
            torch.stack([row_max, row_sum, target_logit]), process_group
        )
        highest = maxima.amax(0)
        log_sum = (sums * (maxima - highest).exp()).sum(0).log() + highest
        ctx.save_for_backward(logits, columns, is_own, is_counted, log_sum)
        return (log_sum - target_logits.sum(0)).masked_fill(~is_counted, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, columns, is_own, is_counted, log_sum = ctx.saved_tensors
        # Computed again rather than kept: the logits are there anyway.
        softmax = (logits.to(log_sum.dtype) - log_sum.unsqueeze(1)).exp_()
        softmax.scatter_add_(1, columns, -is_own.unsqueeze(1).to(softmax.dtype))
        softmax.mul_(grad.masked_fill(~is_counted, 0).unsqueeze(1))
        return softmax.to(logits.dtype), None, None, None


def _gather_rows(rows: torch.Tensor, process_group: ProcessGroup) -> tuple[torch.Tensor, ...]:
    """Every rank's rows.

    Shapes:
        rows: [K, N].
        result: K tensors [R, N].
    """
    gathered = rows.unsqueeze(0)
    if process_group.size > 1:
        gathered = rows.new_empty((process_group.size, *rows.shape))
        process_group.all_gather_tensor(gathered, rows)
    return gathered.unbind(1)


def _compute_dtype(logits: torch.Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _check_targets(targets: torch.Tensor, *, vocab_size: int) -> None:
    if not targets.numel():
        return
    low, high = (int(bound) for bound in torch.aminmax(targets))
    if low < 0 or high >= vocab_size:
        raise IndexError(f"targets must be in [0, {vocab_size}), got some in [{low}, {high}]")
