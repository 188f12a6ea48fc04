"""Cutting a batch into micro-batches, and how much each of them counts.

The loss of a batch is the mean over its samples, so a micro-batch's mean counts by its samples:

    loss = sum_i w_i loss_i / sum_i w_i        8 samples in 3 micro-batches: w = 3, 3, 2

Equal means over unequal micro-batches would be another number. A `weight_fn` gives other weights,
such as the number of tokens that are not padding; it reads the targets alone, because the sum must
be known before the first backward, when most micro-batches have not been computed yet.
"""

from collections.abc import Callable, Sequence

import torch

from stagemesh.errors import ConfigError

Tensors = tuple[torch.Tensor, ...]
BatchLike = torch.Tensor | tuple[torch.Tensor, ...] | Sequence[torch.Tensor | Tensors]
WeightFn = Callable[..., float]


def split_batch(batch: BatchLike, *, num_microbatches: int, name: str) -> list[Tensors]:
    """The micro-batches of a batch.

    Args:
        batch: a tensor or a tuple of tensors to be cut along dim 0, the larger parts first (8 in 3:
            3, 3, 2; 2 in 4: 1, 1, 0, 0); or a list of micro-batches, which may differ in all dims.
        num_microbatches: how many.
        name: of the batch in errors.

    Raises:
        ConfigError: it cannot be cut, or is a list of another number.
    """
    if isinstance(batch, list):
        if len(batch) != num_microbatches:
            raise ConfigError(
                f"{name}: got a list of {len(batch)} micro-batches, the schedule has "
                f"{num_microbatches}"
            )
        return [_as_tensors(item, name=name) for item in batch]
    tensors = _as_tensors(batch, name=name)
    sizes = {tensor.shape[0] for tensor in tensors}
    if len(sizes) != 1:
        raise ConfigError(f"{name}: tensors must have the same number of rows, got {sorted(sizes)}")
    parts = [tensor.tensor_split(num_microbatches) for tensor in tensors]
    return list(zip(*parts, strict=True))


def num_samples(microbatch: Tensors) -> int:
    """Rows of a micro-batch."""
    return microbatch[0].shape[0]


def weights_of(targets: Sequence[Tensors], *, weight_fn: WeightFn | None) -> list[float]:
    """How much each micro-batch counts, 0 for one without samples; the sum is 1.

    Raises:
        ConfigError: a weight is negative, or all are 0.
    """
    weights = [
        0.0
        if num_samples(target) == 0
        else float(num_samples(target) if weight_fn is None else weight_fn(*target))
        for target in targets
    ]
    if any(not weight >= 0 for weight in weights) or not sum(weights) > 0:
        raise ConfigError(
            f"weights of the micro-batches must not be negative, nor all 0, got {weights}"
        )
    total = sum(weights)
    return [weight / total for weight in weights]


def join_batch(parts: Sequence[Tensors]) -> torch.Tensor | Tensors:
    """Micro-batches as one batch.

    Raises:
        ConfigError: they differ in more than their samples.
    """
    joined = []
    for tensors in zip(*parts, strict=True):
        shapes = {tuple(tensor.shape[1:]) for tensor in tensors}
        if len(shapes) > 1:
            raise ConfigError(
                f"micro-batches of different shapes {sorted(shapes)} cannot be joined; "
                "step() needs no joining"
            )
        joined.append(torch.cat(tensors))
    return joined[0] if len(joined) == 1 else tuple(joined)


def _as_tensors(value: object, *, name: str) -> Tensors:
    tensors = value if isinstance(value, tuple) else (value,)
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"{name}: want tensors, got {type(tensor).__name__}")
        if not tensor.dim():
            raise ConfigError(f"{name}: a 0-d tensor has no samples to be cut by")
    if not tensors:
        raise ConfigError(f"{name}: got an empty tuple")
    return tensors
