"""TensorCut: the part of a checkpoint's tensor that a rank reads."""

from dataclasses import dataclass

Range = tuple[int, int]
"""[start, end)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCut:
    """Some rows, or some columns, of a tensor [rows, columns] or of a vector [rows]."""

    rows: tuple[Range, ...] | None = None
    """Ranges of the first axis, one after the other in the result; None for all."""
    columns: Range | None = None
    """Range of the last axis; None for all."""
