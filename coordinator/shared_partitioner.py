"""Stages that several nodes share, by memory alone: model, nodes and degrees in, `Plan` out. Pure.

1. Of more nodes than ranks those of most memory take part; neighbours in the caller's order share
   a stage.
2. The ranks of a stage get KV groups and MLP columns in proportion to their memory, the stages get
   layers in proportion to the memory of their ranks.
3. What does not fit so is repaired by moving layers, as for stages of one node
   (`coordinator.feasibility`), then with shares as equal as can be.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from coordinator.feasibility import CutSearch
from coordinator.model_cost import ModelCost, NodeCapacity, StageCosts
from coordinator.rank_cost import RankCosts, divided
from coordinator.shares import even_out
from stagemesh.errors import PlacementError
from stagemesh.layout import Plan, StageAssignment
from stagemesh.placement.counts import proportional_counts

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """The nodes of a stage, and what each would hold."""

    nodes: tuple[NodeCapacity, ...]
    costs: RankCosts


def partition_shared(
    *,
    model: ModelCost,
    nodes: Sequence[NodeCapacity],
    degrees: Sequence[int],
    max_context_tokens: int,
    concurrency: int,
) -> Plan:
    """Place a model's layers on stages of so many nodes each.

    Args:
        model: what the layers cost.
        nodes: in pipeline order.
        degrees: ranks of each stage.
        max_context_tokens: longest session.
        concurrency: sessions of that length that must fit at once.

    Raises:
        PlacementError: there are too few nodes, heads or layers, or it does not fit.
    """
    used = _chosen(model, nodes, degrees)
    costs = StageCosts(model, kv_tokens=max_context_tokens * concurrency)
    memories = even_out([node.memory_bytes for node in used])
    borders = list(accumulate(degrees, initial=0))
    spans = [slice(start, start + count) for start, count in zip(borders, degrees, strict=False)]
    wanted = proportional_counts(model.num_layers, [sum(memories[span]) for span in spans])
    ways = [memories, [1] * len(used)]
    for weights in ways:
        units = [
            _Unit(nodes=tuple(used[span]), costs=_unit_costs(costs, weights[span]))
            for span in spans
        ]
        counts = CutSearch(_Units(units), num_layers=model.num_layers).best_counts(wanted)
        if counts is not None:
            used_ids = {node.node_id for node in used}
            return Plan(
                num_layers=model.num_layers,
                dtype=model.dtype,
                max_context_tokens=max_context_tokens,
                stages=_stages(units, counts),
                unused_node_ids=tuple(n.node_id for n in nodes if n.node_id not in used_ids),
            )
    raise PlacementError(
        _explain(
            model,
            [_Unit(nodes=tuple(used[s]), costs=_unit_costs(costs, memories[s])) for s in spans],
            wanted,
            demand=f"{concurrency} x {max_context_tokens} tokens",
        )
    )


def _chosen(
    model: ModelCost, nodes: Sequence[NodeCapacity], degrees: Sequence[int]
) -> list[NodeCapacity]:
    """The nodes that take part, in the caller's order."""
    shown = ", ".join(map(str, degrees))
    if len(degrees) > model.num_layers:
        raise PlacementError(
            f"{len(degrees)} stages were asked for (tp {shown}), but the model has "
            f"{model.num_layers} layers: each stage needs at least one"
        )
    usable = [i for i, node in enumerate(nodes) if node.memory_bytes > 0]
    if len(usable) < sum(degrees):
        raise PlacementError(
            f"{len(degrees)} stage(s) of tp {shown} need {sum(degrees)} nodes, but "
            f"{len(usable)} of {len(nodes)} nodes offer memory; start more nodes or ask for less"
        )
    # First of all: a degree by which no layer can be divided is refused by its name.
    for degree in sorted(set(degrees)):
        divided(model, degree)
    largest = sorted(usable, key=lambda i: -nodes[i].memory_bytes)[: sum(degrees)]
    return [nodes[i] for i in sorted(largest)]


def _unit_costs(costs: StageCosts, weights: Sequence[int]) -> RankCosts:
    if len(weights) == 1:
        return RankCosts(costs, None)
    return RankCosts(costs, divided(costs.model, len(weights), weights=list(weights)))


@dataclass(frozen=True, slots=True)
class _Units:
    """What holds a span of layers when each rank holds its part."""

    units: Sequence[_Unit]

    def __len__(self) -> int:
        return len(self.units)

    def fits(self, index: int, start: int, end: int) -> bool:
        """Whether each rank can hold its part of layers [start, end)."""
        unit = self.units[index]
        return all(
            unit.costs.rank_bytes(start, end, rank=rank) <= node.memory_bytes
            for rank, node in enumerate(unit.nodes)
        )

    def fullness(self, index: int, start: int, end: int) -> float:
        """What part of its memory they take of the fullest rank."""
        unit = self.units[index]
        return max(
            unit.costs.rank_bytes(start, end, rank=rank) / node.memory_bytes
            for rank, node in enumerate(unit.nodes)
        )


def _stages(units: Sequence[_Unit], counts: Sequence[int]) -> tuple[StageAssignment, ...]:
    stages = []
    start = 0
    for stage, (unit, count) in enumerate(zip(units, counts, strict=True)):
        end = start + count
        ranks = tuple(
            unit.costs.assignment(node.node_id, start, end, rank=rank)
            for rank, node in enumerate(unit.nodes)
        )
        stages.append(
            StageAssignment(
                stage=stage,
                start_layer=start,
                end_layer=end,
                ranks=ranks,
                shares=unit.costs.shares,
            )
        )
        start = end
    return tuple(stages)


def _explain(model: ModelCost, units: Sequence[_Unit], wanted: Sequence[int], demand: str) -> str:
    lines = [
        f"the model does not fit: {model.num_layers} layers in {model.dtype} with a KV cache for "
        f"{demand} on stages of {', '.join(str(len(unit.nodes)) for unit in units)} ranks"
    ]
    start = 0
    for unit, count in zip(units, wanted, strict=True):
        for rank, node in enumerate(unit.nodes):
            need = unit.costs.rank_bytes(start, start + count, rank=rank)
            lack = need - node.memory_bytes
            lines.append(
                f"  {node.node_id}: rank {rank} of layers [{start}, {start + count}) requires "
                f"{need / _GIB:.2f} GiB, available {node.memory_bytes / _GIB:.2f} GiB"
                + (f": lacks {lack / _GIB:.2f} GiB ({lack} bytes)" if lack > 0 else "")
            )
        start += count
    return "\n".join([*lines, "take a shorter --context, less --concurrency, or more nodes"])
