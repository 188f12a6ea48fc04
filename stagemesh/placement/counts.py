"""Whole numbers in given proportions: the sum is exact and nobody is forgotten."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from math import lcm

from stagemesh.errors import ConfigError


def proportional_counts(total: int, weights: Sequence[int | float]) -> list[int]:
    """Split `total` in proportion to the weights; each part of a positive weight is at least 1.

    Largest remainder in exact numbers: the sum is exact, no part is further than one from its quota
    unless the floor of 1 asks for it, and equal remainders go to the first. What the floor adds is
    taken from the parts that lie most above their quota. A weight of 0 gets 0.

    Raises:
        ConfigError: a weight is negative or not finite, all are 0, or there are more parts than
            `total`.
    """
    scaled = _whole_numbers(weights)
    whole, num_parts = sum(scaled), sum(weight > 0 for weight in scaled)
    if num_parts == 0:
        raise ConfigError(f"no weight is positive: {list(weights)}")
    if total < num_parts:
        raise ConfigError(f"{total} cannot be split in {num_parts} parts of at least 1")
    counts = [total * weight // whole for weight in scaled]
    # Quota minus count, times `whole`: exact where floats would tie or drift.
    shortfall = [
        total * weight - count * whole for weight, count in zip(scaled, counts, strict=True)
    ]
    by_need = sorted(range(len(scaled)), key=lambda i: -shortfall[i])
    for i in by_need[: total - sum(counts)]:
        counts[i] += 1
    for i, weight in enumerate(scaled):
        if weight > 0 and counts[i] == 0:
            donors = [j for j, other in enumerate(counts) if other > 1]
            donor = max(donors, key=lambda j: counts[j] * whole - total * scaled[j])
            counts[donor] -= 1
            counts[i] = 1
    return counts


def _whole_numbers(weights: Sequence[int | float]) -> list[int]:
    """Whole numbers in exactly the same proportions."""
    if any(not 0 <= weight < float("inf") for weight in weights):
        raise ConfigError(f"weights must be finite and not negative, got {list(weights)}")
    if all(isinstance(weight, int) for weight in weights):
        return [int(weight) for weight in weights]
    exact = [Fraction(weight) for weight in weights]
    factor = lcm(*(weight.denominator for weight in exact))
    return [int(weight * factor) for weight in exact]


def range_of(index: int, counts: Sequence[int]) -> tuple[int, int]:
    """[start, end) of a part when the parts follow each other."""
    borders = list(accumulate(counts, initial=0))
    return borders[index], borders[index + 1]
