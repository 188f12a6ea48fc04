"""Why a node that could take part does not."""

from coordinator.planner.plan import PlacementPlan, ReplicaPlan, StagePlan
from coordinator.planner.profiles import ClusterProfile, Workload
from coordinator.planner.replicas import ReplicaSearch
from coordinator.planner.step_times import decode_shape
from coordinator.planner.time_model import TimeModel, objective_value

_MAX_PRICED = 8
"""Nodes for which it is computed what they would cost; the reason of further ones is the same."""


def explain_unused(
    plan: PlacementPlan,
    *,
    search: ReplicaSearch,
    timer: TimeModel,
    workload: Workload,
    cluster: ClusterProfile,
) -> dict[str, str]:
    """A reason for each node of the cluster that has no part in the plan."""
    used = set(plan.node_ids)
    unused = [i for i, node in enumerate(cluster.nodes) if node.node_id not in used]
    value = objective_value(plan.replicas, timer=timer, workload=workload)
    reasons: dict[str, str] = {}
    for number, i in enumerate(unused):
        node_id = cluster.nodes[i].node_id
        if number < _MAX_PRICED:
            reasons[node_id] = _reason(
                i, plan, search=search, timer=timer, workload=workload, value=value
            )
        else:
            reasons[node_id] = "would not make it faster"
    return reasons


def _reason(
    index: int,
    plan: PlacementPlan,
    *,
    search: ReplicaSearch,
    timer: TimeModel,
    workload: Workload,
    value: float,
) -> str:
    replica = max(plan.replicas, key=lambda r: r.concurrency)
    if replica.num_stages >= plan.num_layers:
        return f"the model has no more than {plan.num_layers} layers to give"
    highest = search.allowed.highest
    if highest is not None and replica.num_stages >= highest:
        return f"no more than {highest} stage(s) are allowed, and others make better ones"
    values = []
    for position in range(replica.num_stages):
        for other in _with_stage(index, position, replica, search=search, workload=workload):
            changed = [other if r is replica else r for r in plan.replicas]
            values.append(objective_value(changed, timer=timer, workload=workload))
    if not values:
        return "its memory does not hold a layer of this model with the cache that is asked for"
    if min(values) < value:
        return "would not make it faster in its place in the order"
    what = "a token" if workload.objective == "latency" else "a token of all streams"
    return (
        f"would make it slower: with one layer on it {what} would take "
        f"{1e3 * min(values):.4g} ms instead of {1e3 * value:.4g} ms"
    )


def _with_stage(
    index: int, position: int, replica: ReplicaPlan, *, search: ReplicaSearch, workload: Workload
) -> list[ReplicaPlan]:
    """The replica with one layer of a stage on the node: its first or its last layer."""
    stage = replica.stages[position]
    if stage.num_layers < 2:
        return []
    costs = search.costs(replica.concurrency)
    shape = decode_shape(workload, rows=1)
    matrix = costs.matrix((index,), shape)
    result = []
    for is_first in (True, False):
        start = stage.start_layer if is_first else stage.end_layer - 1
        if not matrix[start, start + 1] < float("inf"):
            continue
        own = costs.stage((index,), start, start + 1, shape)
        rest = StagePlan(
            start_layer=stage.start_layer + is_first,
            end_layer=stage.end_layer - (not is_first),
            ranks=stage.ranks,
        )
        pair = (own, rest) if is_first else (rest, own)
        stages = (*replica.stages[:position], *pair, *replica.stages[position + 1 :])
        result.append(ReplicaPlan(stages=stages, concurrency=replica.concurrency))
    return result
