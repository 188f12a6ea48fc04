"""The part of a checkpoint's tensor that a rank reads."""

import math
from dataclasses import dataclass

import torch

Range = tuple[int, int]
"""[start, end)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCut:
    """Some rows, or some columns, of a tensor [..., columns] or of a vector [rows].

    The rows of a tensor of more axes are counted through.
    """

    rows: tuple[Range, ...] | None = None
    """Ranges of the rows, one after the other in the result; None for all."""
    columns: Range | None = None
    """Range of the last axis; None for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCut:
    """Some MLP columns of all experts: ranges of one axis of a tensor [experts, ...]."""

    axis: int
    """Counted from the front."""
    ranges: tuple[Range, ...]
    """One after the other in the result."""

    def apply(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part, in memory of its own."""
        parts = [tensor.narrow(self.axis, start, end - start) for start, end in self.ranges]
        return torch.cat(parts, dim=self.axis)

    def of_rows(self, shape: tuple[int, ...]) -> tuple[TensorCut, ...]:
        """The same of a tensor of this shape that is read row by row.

        Returns:
            Cuts whose results, as [..., rows, columns], are joined along the axis.
        """
        if self.axis == len(shape) - 1:
            return tuple(TensorCut(columns=columns) for columns in self.ranges)
        height = shape[self.axis]
        rows = tuple(
            (first + start, first + end)
            for first in range(0, math.prod(shape[: self.axis + 1]), height)
            for start, end in self.ranges
        )
        return (TensorCut(rows=rows),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Once:
    """A vector that is added to partial sums, so that only one rank may add it."""

    is_here: bool
    """Whether this is the rank."""


AnyCut = TensorCut | ExpertCut | Once
