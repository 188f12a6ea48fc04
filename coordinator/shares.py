"""How many layers each node should have, going by memory alone."""

from collections.abc import Sequence

_EQUAL_PERCENT = 104
"""Memories within this percentage of the smallest count as equal. Free memory of like machines
differs by a few percent from hour to hour; a split that follows such noise gives one stage more
work than the others, and the slowest stage sets the pace of the pipeline."""


def even_out(weights: Sequence[int]) -> list[int]:
    """The weights, or equal ones where they differ by a few percent only."""
    if max(weights) * 100 <= min(weights) * _EQUAL_PERCENT:
        return [1] * len(weights)
    return list(weights)
