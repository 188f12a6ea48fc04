"""The weighting rule: what parts of unequal size count in a gradient.

A part is one micro-step of one rank. R is the number of ranks, g a part's gradient.

    without weights     sum of g over all parts / R
    with weights w      sum of w g over all parts / sum of w over all parts

So without weights micro-steps add up and ranks are averaged, as in torch's DistributedDataParallel:
with losses that are means over their part, ranks of unequal size count the same (mean of means),
and who wants the mean over micro-steps divides the loss by their number. With w the number of items
(samples, tokens) over which a loss is a mean, the result is the mean over all items, however they
are cut into micro-steps and ranks; a part of weight 0 counts nothing.
"""

import math
from collections.abc import Callable

import torch

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import ConfigError


class WeightSum:
    """The weights of this rank's parts since the last reduction; either all have one or none."""

    def __init__(self) -> None:
        self._total: float | None = None
        self._has_unweighted = False

    def add(self, weight: float | None) -> None:
        """Count a part.

        Raises:
            ConfigError: the weight is no finite number of at least 0, or an earlier part had a
                weight and this one has none, or the other way round.
        """
        if weight is None:
            if self._total is not None:
                raise ConfigError(_MIXED)
            self._has_unweighted = True
            return
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(f"weight must be a finite number of at least 0, got {weight}")
        if self._has_unweighted:
            raise ConfigError(_MIXED)
        self._total = (self._total or 0.0) + weight

    @property
    def is_weighted(self) -> bool:
        """Whether there are parts, with weights."""
        return self._total is not None

    def reset(self) -> None:
        """Forget all parts."""
        self._total = None
        self._has_unweighted = False

    def take(self) -> float | None:
        """The sum, which begins anew; None without weights."""
        total = self._total
        self.reset()
        return total


def start_mean_factor(weight: float, *, process_group: ProcessGroup) -> Callable[[], float]:
    """Begin to find what turns the ranks' average of weighted gradients into their weighted mean.

    A collective. The factor is 0 where no rank has any weight: then there is no gradient.

    Returns:
        A function that waits for it.
    """
    total = torch.tensor([weight], dtype=torch.float64)
    if process_group.size == 1:
        return lambda: 1 / weight if weight else 0.0
    work = process_group.all_reduce(total, async_op=True)

    def wait() -> float:
        work.wait()
        return process_group.size / float(total) if total else 0.0

    return wait


_MIXED = (
    "some parts of a gradient have a weight and others have none, so they cannot be averaged: "
    "give each micro-step a weight, or none"
)
