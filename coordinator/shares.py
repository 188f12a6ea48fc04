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


def proportional_counts(total: int, weights: Sequence[int]) -> list[int]:
    """Split `total` in proportion to the weights, each part at least 1.

    Largest remainder in whole numbers: the sum is exact, no part is further than one from its quota
    unless the floor of 1 asks for it, and equal remainders go to the first. What the floor adds is
    taken from the parts that lie most above their quota.

    Args:
        total: what to split, at least the number of weights.
        weights: positive.
    """
    assert total >= len(weights) >= 1, f"{total} over {len(weights)} parts"
    assert min(weights) > 0, f"weights {list(weights)}"
    whole = sum(weights)
    counts = [total * weight // whole for weight in weights]
    # Quota minus count, times `whole`: exact where floats would tie or drift.
    shortfall = [
        total * weight - count * whole for weight, count in zip(weights, counts, strict=True)
    ]
    by_need = sorted(range(len(weights)), key=lambda i: -shortfall[i])
    for i in by_need[: total - sum(counts)]:
        counts[i] += 1
    for i, count in enumerate(counts):
        if count == 0:
            donors = [j for j, other in enumerate(counts) if other > 1]
            donor = max(donors, key=lambda j: counts[j] * whole - total * weights[j])
            counts[donor] -= 1
            counts[i] = 1
    return counts
