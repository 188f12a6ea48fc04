"""Which nodes can take part at all, and whether the user's wishes make sense."""

from dataclasses import dataclass, replace

from coordinator.model_cost import ModelCost
from coordinator.planner.profiles import ClusterProfile, Constraints, NodeProfile, Workload
from stagemesh.errors import ConfigError, PlacementError


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Nodes that can take part, and why the others cannot."""

    cluster: ClusterProfile
    """With the usable nodes only, in the caller's order."""
    reasons: dict[str, str]
    """By node_id."""


def select_nodes(
    model: ModelCost, *, cluster: ClusterProfile, workload: Workload, constraints: Constraints
) -> Selection:
    """Set aside what cannot take part.

    Raises:
        ConfigError: a wish makes no sense, or a node has no rate for the run dtype.
        PlacementError: no node is left, or fewer than the stages that are asked for.
    """
    _check_wishes(model, cluster=cluster, workload=workload, constraints=constraints)
    reasons: dict[str, str] = {}
    for node in cluster.nodes:
        reason = _reason_against(node, dtype=model.dtype, constraints=constraints)
        if reason is not None:
            reasons[node.node_id] = reason
    nodes = tuple(node for node in cluster.nodes if node.node_id not in reasons)
    if not nodes:
        listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise PlacementError(f"no node offers memory and speed: {listed or 'there are no nodes'}")
    pinned = sorted(set(constraints.pinned) & set(reasons))
    if pinned:
        raise PlacementError(
            f"layers are pinned to {pinned[0]}, which cannot take part: {reasons[pinned[0]]}"
        )
    if constraints.num_stages is not None and constraints.num_stages > len(nodes):
        raise PlacementError(
            f"{constraints.num_stages} stages were asked for, but only {len(nodes)} of "
            f"{len(cluster.nodes)} nodes can take part; start more nodes or ask for fewer stages"
        )
    degrees = constraints.tp_degrees
    if len(degrees) == 1:
        degrees *= constraints.num_stages or 1
    if sum(degrees) > len(nodes):
        raise PlacementError(
            f"{len(degrees)} stage(s) of tp {', '.join(map(str, degrees))} need {sum(degrees)} "
            f"nodes, but only {len(nodes)} of {len(cluster.nodes)} can take part; start more nodes "
            "or ask for less"
        )
    return Selection(cluster=replace(cluster, nodes=nodes), reasons=reasons)


def _check_wishes(
    model: ModelCost, *, cluster: ClusterProfile, workload: Workload, constraints: Constraints
) -> None:
    known = {node.node_id for node in cluster.nodes}
    unknown = sorted((set(constraints.pinned) | constraints.excluded) - known)
    if unknown:
        raise ConfigError(
            f"constraints name nodes that are not in the cluster: {', '.join(unknown)}; "
            f"it has {', '.join(sorted(known)[:16]) or 'none'}"
        )
    for node_id, (start, end) in constraints.pinned.items():
        if end > model.num_layers:
            raise ConfigError(
                f"layers [{start}, {end}) are pinned to {node_id!r}, but the model has "
                f"{model.num_layers}"
            )
    asked, most = constraints.num_stages, constraints.max_stages
    if asked is not None and asked > model.num_layers:
        raise ConfigError(
            f"{asked} stages were asked for, but the model has {model.num_layers} layers: "
            f"each stage needs at least one"
        )
    if asked is not None and most is not None and asked > most:
        raise ConfigError(f"num_stages is {asked} and max_stages {most}: they contradict")


def _reason_against(node: NodeProfile, *, dtype: str, constraints: Constraints) -> str | None:
    if node.node_id in constraints.excluded:
        return "excluded by the user"
    if node.memory_bytes <= node.process_overhead_bytes:
        return (
            f"offers no memory for weights ({node.memory_bytes} bytes, of which the process "
            f"takes {node.process_overhead_bytes})"
        )
    for what, rates in (
        ("stream_bytes_per_second", node.stream_bytes_per_second),
        ("flops_per_second", node.flops_per_second),
    ):
        if dtype not in rates:
            known = ", ".join(sorted(rates)) or "none"
            raise ConfigError(
                f"node {node.node_id!r} has no {what} for {dtype}; measured are: {known}"
            )
        if rates[dtype] <= 0:
            return f"was measured with no speed in {dtype} ({what} is 0)"
    return None
