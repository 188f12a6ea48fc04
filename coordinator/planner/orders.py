"""Orders of nodes that the heuristic tries, and the units that it forms along them.

Every order keeps its nodes' mutual order when a node is appended to the cluster, and every unit of
the smaller cluster is one of the larger; so what was found before can be found again, and an added
node never makes the result worse.

- The caller's order: nodes that are near to each other are mostly listed together. It contains the
  even split.
- By speed, slow or fast nodes last: the last stage computes the head.
- By memory, large nodes first: the first stage holds the token table.
- With ranks that share stages, by class of speed: a slow rank keeps fast ones waiting.

Along an order ranks share a stage in blocks of 2, 4, 8, ... neighbours: counted from the start in
the caller's order, and within nodes of one speed, memory or class in the others. Other groups are
not tried.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from coordinator.planner.ordered import Placed
from coordinator.planner.profiles import Constraints, NodeProfile

Order = tuple[Placed, ...]

_SPEED_CLASS_RATIO = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Neighbours in an order among which ranks may share a stage."""

    nodes: tuple[int, ...]
    is_pinned: bool = False
    """Whether they must share one."""


def node_orders(
    nodes: Sequence[NodeProfile],
    members: Sequence[int],
    *,
    dtype: str,
    constraints: Constraints,
    num_layers: int,
    max_ranks: int,
) -> list[Order]:
    """Orders to search along.

    Args:
        nodes: of the cluster.
        members: indices of those that take part, ascending.
        dtype: run dtype.
        constraints: a fixed order leaves one; pinned layers give nodes their place.
        num_layers: of the model.
        max_ranks: ranks that may share a stage.
    """

    def slowness(i: int) -> tuple[float, ...]:
        node = nodes[i]
        return (1.0 / node.stream_bytes_per_second[dtype], node.layer_overhead_seconds)

    keys: list[Callable[[int], tuple[float, ...]]] = [
        lambda i: (),
        slowness,
        lambda i: tuple(-x for x in slowness(i)),
        lambda i: (-float(nodes[i].memory_bytes), *slowness(i)),
    ]
    if max_ranks > 1:
        keys += [
            lambda i: (_speed_class(slowness(i)[0]),),
            lambda i: (-_speed_class(slowness(i)[0]),),
        ]
    if constraints.is_order_fixed:
        del keys[1:]
    free = [i for i in members if nodes[i].node_id not in constraints.pinned]
    orders: dict[Order, None] = {}
    sizes = _block_sizes(constraints, max_ranks)
    for key in keys:
        runs = [_Run(nodes=tuple(run)) for _, run in groupby(sorted(free, key=key), key=key)]
        if not constraints.pinned:
            orders[_placed(runs, sizes)] = None
        elif constraints.is_order_fixed:
            orders[_placed(_runs_in_place(nodes, members, constraints), sizes)] = None
        else:
            pins = _pinned_runs(nodes, members, constraints)
            for way in _around(pins, runs, num_layers=num_layers):
                orders[_placed(way, sizes)] = None
    # Where ranks must share stages, an order without neighbours of one kind has no stage at all.
    return [order for order in orders if order]


def _speed_class(slowness: float) -> float:
    """Equal for nodes of nearly one speed, whatever other nodes there are."""
    return float(math.floor(math.log(slowness) / math.log(_SPEED_CLASS_RATIO)))


def _block_sizes(constraints: Constraints, max_ranks: int) -> list[int]:
    """Nodes of a block: as the user wants, or all powers of two."""
    wanted = sorted(set(constraints.tp_degrees))
    return wanted or [2**k for k in range(max_ranks.bit_length())]


def _placed(runs: Sequence[_Run], block_sizes: Sequence[int]) -> Order:
    """Each node alone, and blocks of neighbours within each run."""
    result: list[Placed] = []
    offset = 0
    for run in runs:
        count = len(run.nodes)
        sizes = [count] if run.is_pinned else block_sizes
        for size in sizes:
            result += [
                Placed(
                    unit=tuple(sorted(run.nodes[at : at + size])),
                    start=offset + at,
                    end=offset + at + size,
                )
                for at in range(0, count - size + 1, size)
            ]
        offset += count
    return tuple(result)


def _pinned_runs(
    nodes: Sequence[NodeProfile], members: Sequence[int], constraints: Constraints
) -> list[tuple[tuple[int, int], _Run]]:
    """Pinned ranges, ascending, and the nodes of each."""
    ranges: dict[tuple[int, int], list[int]] = {}
    for i in members:
        pin = constraints.pinned.get(nodes[i].node_id)
        if pin is not None:
            ranges.setdefault(pin, []).append(i)
    return [(pin, _Run(nodes=tuple(ranges[pin]), is_pinned=True)) for pin in sorted(ranges)]


def _runs_in_place(
    nodes: Sequence[NodeProfile], members: Sequence[int], constraints: Constraints
) -> list[_Run]:
    """The caller's order; pinned neighbours of one range share a stage."""
    pairs = [(constraints.pinned.get(nodes[i].node_id), i) for i in members]
    return [
        _Run(nodes=tuple(i for _, i in run), is_pinned=pin is not None)
        for pin, run in groupby(pairs, key=lambda pair: pair[0])
    ]


def _around(
    pins: Sequence[tuple[tuple[int, int], _Run]], runs: Sequence[_Run], *, num_layers: int
) -> Iterator[list[_Run]]:
    """Ways to lay the other nodes between pinned ones: all into one gap, or dealt by layers."""
    borders = [0, *(border for pin, _ in pins for border in pin), num_layers]
    gaps = [max(0, end - start) for start, end in zip(borders[::2], borders[1::2], strict=True)]
    for only, size in enumerate(gaps):
        if size:
            yield _joined(pins, [list(runs) if k == only else [] for k in range(len(gaps))])
    if not any(gaps):
        yield _joined(pins, [[] for _ in gaps])
        return
    dealt: list[list[_Run]] = [[] for _ in gaps]
    for number, node in enumerate(i for run in runs for i in run.nodes):
        lack = [
            (number + 1) * gap / sum(gaps) - len(had) for gap, had in zip(gaps, dealt, strict=True)
        ]
        dealt[lack.index(max(lack))].append(_Run(nodes=(node,)))
    yield _joined(pins, dealt)


def _joined(
    pins: Sequence[tuple[tuple[int, int], _Run]], between: Sequence[list[_Run]]
) -> list[_Run]:
    result = list(between[0])
    for (_, run), others in zip(pins, between[1:], strict=True):
        result += [run, *others]
    return result
