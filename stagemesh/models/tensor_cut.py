"""The part of a checkpoint's tensor that a rank reads."""

from dataclasses import dataclass

import torch

Range = tuple[int, int]
"""[start, end)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCut:
    """Some rows, or some columns, of a tensor [rows, columns] or of a vector [rows]."""

    rows: tuple[Range, ...] | None = None
    """Ranges of the first axis, one after the other in the result; None for all."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Once:
    """A vector that is added to partial sums, so that only one rank may add it."""

    is_here: bool
    """Whether this is the rank."""


AnyCut = TensorCut | ExpertCut | Once
