"""Nodes that measure nearly the same count as equal. Pure.

Two measurements of one machine differ by some percent, so a plan that follows such differences
follows noise: it gives like nodes unlike parts, and moves layers whenever it is made anew.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from coordinator.planner.profiles import NodeProfile

LIKE_RATIO = 1.2
"""Weights read and overhead per layer within this ratio are the same."""

_LIKE_FLOPS_RATIO = 1.5


def level_like_nodes(nodes: Sequence[NodeProfile]) -> tuple[NodeProfile, ...]:
    """The nodes, in their order; those that are alike get the medians of their figures.

    Each node joins the first group whose first node has the same kind of device, as many threads
    and figures within `LIKE_RATIO`.
    """
    groups: list[list[NodeProfile]] = []
    group_of: list[int] = []
    for node in nodes:
        found = next(
            (i for i, group in enumerate(groups) if _are_like(group[0], node)), len(groups)
        )
        if found == len(groups):
            groups.append([])
        groups[found].append(node)
        group_of.append(found)
    typical = [_typical(group) for group in groups]
    return tuple(
        replace(
            node,
            stream_bytes_per_second=typical[i].stream_bytes_per_second,
            flops_per_second=typical[i].flops_per_second,
            layer_overhead_seconds=typical[i].layer_overhead_seconds,
            step_overhead_seconds=typical[i].step_overhead_seconds,
        )
        for node, i in zip(nodes, group_of, strict=True)
    )


def _are_like(a: NodeProfile, b: NodeProfile) -> bool:
    return (
        (a.device.split(":")[0], a.num_threads) == (b.device.split(":")[0], b.num_threads)
        and _are_near(a.stream_bytes_per_second, b.stream_bytes_per_second, LIKE_RATIO)
        and _are_near(a.flops_per_second, b.flops_per_second, _LIKE_FLOPS_RATIO)
        and _is_near(a.layer_overhead_seconds, b.layer_overhead_seconds, LIKE_RATIO)
    )


def _are_near(a: Mapping[str, float], b: Mapping[str, float], ratio: float) -> bool:
    return a.keys() == b.keys() and all(_is_near(a[key], b[key], ratio) for key in a)


def _is_near(a: float, b: float, ratio: float) -> bool:
    return max(a, b) <= ratio * min(a, b)


def _typical(group: Sequence[NodeProfile]) -> NodeProfile:
    first = group[0]
    return replace(
        first,
        stream_bytes_per_second={
            d: median(n.stream_bytes_per_second[d] for n in group)
            for d in first.stream_bytes_per_second
        },
        flops_per_second={
            d: median(n.flops_per_second[d] for n in group) for d in first.flops_per_second
        },
        layer_overhead_seconds=median(n.layer_overhead_seconds for n in group),
        step_overhead_seconds=median(n.step_overhead_seconds for n in group),
    )
