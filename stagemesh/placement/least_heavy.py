"""The contiguous split whose heaviest stage is lightest, by dynamic programs over (group, border).

Two passes, both exact. The first minimises the largest load; the second, among the splits that keep
to it, the sum of squares, so that stages below the heaviest one are evened out too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
_ROUNDING = 1 + 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class StageKind:
    """A group of nodes that may run a stage together."""

    nodes: tuple[int, ...]
    """By tensor rank."""
    shares: tuple[float, ...]
    """Part of each layer that each has; they sum to 1."""
    speed: float
    """Of all together."""
    limit: float
    """Cost that all together hold."""


def least_heavy_split(
    costs: Sequence[float], kinds: Sequence[StageKind], *, num_stages: int | None
) -> list[tuple[int, int]] | None:
    """Pairs of (index into `kinds`, number of layers) in order; None when nothing fits.

    Args:
        costs: of each layer.
        kinds: groups in order; some may be passed over.
        num_stages: how many are to be used; None leaves it open.
    """
    loads = [_loads(costs, kind) for kind in kinds]
    highest = min(len(kinds), len(costs))
    wanted = range(1, highest + 1) if num_stages is None else range(num_stages, num_stages + 1)
    if num_stages is not None and num_stages > highest:
        return None
    worst = _search(loads, wanted, join=np.maximum)
    if worst is None:
        return None
    limit = worst[0] * _ROUNDING
    squares = [np.where(load <= limit, load * load, np.inf) for load in loads]
    evened = _search(squares, wanted, join=np.add)
    assert evened is not None, "the first pass found a split within the limit"
    return evened[1]


def _loads(costs: Sequence[float], kind: StageKind) -> Floats:
    """Load by [start, end]; infinite for no layer and for more than the group holds."""
    prefix = np.concatenate(([0.0], np.cumsum(np.asarray(costs, dtype=np.float64))))
    sums = prefix[None, :] - prefix[:, None]
    borders = np.arange(len(prefix))
    is_wrong = (borders[:, None] >= borders[None, :]) | (sums > kind.limit * _ROUNDING)
    return np.where(is_wrong, np.inf, sums / kind.speed)


def _search(
    loads: Sequence[Floats],
    wanted: range,
    *,
    join: Callable[[Floats, Floats], Floats],
) -> tuple[float, list[tuple[int, int]]] | None:
    """Best value and split; `join` folds a stage's load into the value of those before it."""
    num_borders = len(loads[0])
    most = wanted[-1]
    # best[g][k, end]: the first g groups, k of them used, layers [0, end) covered.
    best = [np.full((most + 1, num_borders), np.inf)]
    best[0][0, 0] = 0.0
    starts = []
    for load in loads:
        # [k, start, end]: what comes before ends where the stage starts. Of equals the latest start
        # wins, so that later stages are the smaller ones.
        joined = join(best[-1][:-1, :, None], load[None])[:, ::-1, :]
        chosen = joined.argmin(axis=1)
        values = np.take_along_axis(joined, chosen[:, None, :], axis=1)[:, 0, :]
        row = best[-1].copy()
        is_better = values < row[1:]
        row[1:][is_better] = values[is_better]
        starts.append(np.where(is_better, num_borders - 1 - chosen, -1))
        best.append(row)
    ends = best[-1][wanted[0] : wanted[-1] + 1, -1]
    count = wanted[int(ends.argmin())]
    value = float(best[-1][count, -1])
    if value == np.inf:
        return None
    split: list[tuple[int, int]] = []
    border = num_borders - 1
    for group in range(len(loads) - 1, -1, -1):
        start = int(starts[group][count - 1, border]) if count else -1
        if start >= 0:
            split.append((group, border - start))
            border, count = start, count - 1
    return value, split[::-1]
