"""Which node runs which layers: memory and model in, `Plan` out. Pure.

How a plan is found:

1. Nodes without memory are left out. Without a wish for a number of stages, as many nodes as can
   take part do, at most one per layer; the rest is reported unused. Nodes of more memory go first
   when some must be left out, but the order of the caller is the order of the pipeline.
2. Each node's wanted layers follow its memory (`coordinator.shares`).
3. A split that fits as wanted is taken. Otherwise the fitting split nearest to it is
   (`coordinator.feasibility`): exact, so whenever some contiguous split fits, one is found.

A node's need is its weights (embedding on the first stage, norm and head on the last, a tied table
at both ends) plus the KV cache for `max_context_tokens` x `concurrency` tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.feasibility import CutSearch, SingleNodes
from coordinator.model_cost import ModelCost, NodeCapacity, StageCosts
from coordinator.placement_advice import Demand, explain_misfit
from coordinator.shares import even_out
from stagemesh.errors import ConfigError, PlacementError
from stagemesh.layout import Plan, RankAssignment, StageAssignment
from stagemesh.placement.counts import proportional_counts


@dataclass(frozen=True, slots=True, kw_only=True)
class _StageLimits:
    """Numbers of stages that are allowed."""

    lowest: int
    highest: int


def partition(
    *,
    model: ModelCost,
    nodes: Sequence[NodeCapacity],
    max_context_tokens: int,
    concurrency: int = 1,
    num_stages: int | None = None,
    max_stages: int | None = None,
) -> Plan:
    """Place a model's layers on nodes.

    Args:
        model: what the layers cost.
        nodes: in pipeline order.
        max_context_tokens: longest session.
        concurrency: sessions of that length that must fit at once, at least 1.
        num_stages: exactly so many stages; None uses what the nodes allow.
        max_stages: with `num_stages` None, no more than these.

    Returns:
        A plan in which each stage is granted exactly the KV cache that was asked for.

    Raises:
        ConfigError: a number is out of range, or more stages than layers are asked for.
        PlacementError: no node has memory, or no split fits; the text says what would.
    """
    demand = Demand(model=model, max_context_tokens=max_context_tokens, concurrency=concurrency)
    usable = _usable_nodes(nodes)
    limits = _stage_limits(model, usable, num_stages=num_stages, max_stages=max_stages)
    if not usable:
        names = ", ".join(node.node_id for node in nodes) or "there are no nodes"
        raise PlacementError(f"no node offers memory for model weights: {names} (0 bytes each)")
    if limits.highest < limits.lowest:
        raise PlacementError(
            f"{limits.lowest} stages were asked for, but only {len(usable)} of {len(nodes)} nodes "
            f"offer memory; start more nodes or ask for fewer stages"
        )
    costs = StageCosts(model, kv_tokens=demand.kv_tokens)
    chosen = _choose_nodes(costs, usable, limits)
    if chosen is None:
        shown = sorted(_largest(usable, limits.highest))
        raise PlacementError(
            explain_misfit(
                demand,
                nodes=[usable[i] for i in shown],
                wanted=_wanted_counts(model, [usable[i] for i in shown]),
                would_fit=lambda other: (
                    _choose_nodes(
                        StageCosts(other.model, kv_tokens=other.kv_tokens), usable, limits
                    )
                    is not None
                ),
            )
        )
    return _build_plan(costs, demand=demand, offered=nodes, used=chosen)


def _usable_nodes(nodes: Sequence[NodeCapacity]) -> list[NodeCapacity]:
    ids = [node.node_id for node in nodes]
    twice = sorted({node_id for node_id in ids if ids.count(node_id) > 1})
    if twice:
        raise ConfigError(f"nodes are offered more than once: {', '.join(twice)}")
    return [node for node in nodes if node.memory_bytes > 0]


def _stage_limits(
    model: ModelCost,
    usable: Sequence[NodeCapacity],
    *,
    num_stages: int | None,
    max_stages: int | None,
) -> _StageLimits:
    for name, value in (("num_stages", num_stages), ("max_stages", max_stages)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    highest = min(len(usable), model.num_layers)
    if num_stages is None:
        return _StageLimits(lowest=1, highest=min(highest, max_stages or highest))
    if num_stages > model.num_layers:
        raise ConfigError(
            f"{num_stages} stages were asked for, but the model has {model.num_layers} layers: "
            f"each stage needs at least one"
        )
    return _StageLimits(lowest=num_stages, highest=min(highest, num_stages))


def _choose_nodes(
    costs: StageCosts, nodes: Sequence[NodeCapacity], limits: _StageLimits
) -> list[NodeCapacity] | None:
    """The nodes to use, as many as the limits allow: those of most memory if they fit, else any."""
    most = sorted(_largest(nodes, limits.highest))
    if _can_hold(costs, [nodes[i] for i in most]):
        return [nodes[i] for i in most]
    search = _search(costs, nodes)
    for count in search.feasible_counts(limits.highest):
        if count < limits.lowest:
            break
        largest = [nodes[i] for i in sorted(_largest(nodes, count))]
        if _can_hold(costs, largest):
            return largest
        return [nodes[i] for i in search.choose_nodes(count)]
    return None


def _can_hold(costs: StageCosts, nodes: Sequence[NodeCapacity]) -> bool:
    """Whether some split uses each node and fits; the wanted one mostly does."""
    return _fits(costs, nodes, _wanted_counts(costs.model, nodes)) or (
        _search(costs, nodes).fits_all()
    )


def _search(costs: StageCosts, nodes: Sequence[NodeCapacity]) -> CutSearch:
    return CutSearch(SingleNodes(costs, nodes), num_layers=costs.model.num_layers)


def _largest(nodes: Sequence[NodeCapacity], count: int) -> list[int]:
    """Indices of the nodes of most memory; of equals the first."""
    return sorted(range(len(nodes)), key=lambda i: -nodes[i].memory_bytes)[:count]


def _wanted_counts(model: ModelCost, nodes: Sequence[NodeCapacity]) -> list[int]:
    return proportional_counts(model.num_layers, even_out([node.memory_bytes for node in nodes]))


def _build_plan(
    costs: StageCosts,
    *,
    demand: Demand,
    offered: Sequence[NodeCapacity],
    used: Sequence[NodeCapacity],
) -> Plan:
    model = costs.model
    counts = _wanted_counts(model, used)
    if not _fits(costs, used, counts):
        repaired = _search(costs, used).best_counts(counts)
        assert repaired is not None, "the chosen nodes were found to fit"
        counts = repaired
    stages: list[StageAssignment] = []
    start = 0
    for stage, (node, count) in enumerate(zip(used, counts, strict=True)):
        stages.append(
            StageAssignment(
                stage=stage,
                start_layer=start,
                end_layer=start + count,
                ranks=(
                    RankAssignment(
                        node_id=node.node_id,
                        weight_bytes=costs.weight_bytes(start, start + count),
                        kv_bytes_per_token=count * model.kv_bytes_per_token_layer,
                        kv_cache_bytes=costs.kv_bytes(count),
                    ),
                ),
            )
        )
        start += count
    used_ids = {node.node_id for node in used}
    return Plan(
        num_layers=model.num_layers,
        dtype=model.dtype,
        max_context_tokens=demand.max_context_tokens,
        stages=tuple(stages),
        unused_node_ids=tuple(n.node_id for n in offered if n.node_id not in used_ids),
    )


def _fits(costs: StageCosts, nodes: Sequence[NodeCapacity], counts: Sequence[int]) -> bool:
    start = 0
    for node, count in zip(nodes, counts, strict=True):
        if costs.stage_bytes(start, start + count) > node.memory_bytes:
            return False
        start += count
    return True
