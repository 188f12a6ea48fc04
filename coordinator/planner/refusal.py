"""What to tell a person when nothing fits: who lacks how many bytes, and what would fit."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from coordinator.model_cost import ModelCost, NodeCapacity
from coordinator.placement_advice import Demand, explain_misfit
from coordinator.planner.memory_model import rank_memory
from coordinator.planner.profiles import ClusterProfile, Constraints, NodeProfile, Workload
from coordinator.planner.replicas import EXACT_SHARED_NODES, ReplicaSearch
from coordinator.planner.spans import ModelSpans
from coordinator.shares import even_out
from stagemesh.placement.counts import proportional_counts


def explain_refusal(
    model: ModelCost,
    *,
    cluster: ClusterProfile,
    workload: Workload,
    constraints: Constraints,
    set_aside: Mapping[str, str],
) -> str:
    """The message of a refused placement; each piece of advice was tried and fits."""
    demand = Demand(
        model=model,
        max_context_tokens=workload.max_context_tokens,
        concurrency=workload.concurrency,
    )
    most = constraints.num_stages or constraints.max_stages or len(cluster.nodes)
    by_memory = sorted(range(len(cluster.nodes)), key=lambda i: -cluster.nodes[i].memory_bytes)[
        : min(most, model.num_layers)
    ]
    nodes = [_capacity(model, cluster, i, workload) for i in sorted(by_memory)]
    wanted = proportional_counts(
        model.num_layers, even_out([max(1, node.memory_bytes) for node in nodes])
    )

    def would_fit(other: Demand) -> bool:
        asked = replace(
            workload,
            objective="latency",
            max_context_tokens=other.max_context_tokens,
            prompt_tokens=min(workload.prompt_tokens, other.max_context_tokens),
            concurrency=other.concurrency,
        )
        return _fits(other.model, cluster=cluster, workload=asked, constraints=constraints)

    is_large = len(cluster.nodes) > EXACT_SHARED_NODES
    is_simple = constraints.max_tp_degree == 1 and not constraints.pinned
    lines = [
        explain_misfit(
            demand,
            nodes=nodes,
            wanted=wanted,
            would_fit=would_fit,
            # Elsewhere memory alone tells it, or a search of a few nodes.
            is_slow=is_large and not is_simple,
        )
    ]
    lines += [f"  not used: {name}: {reason}" for name, reason in sorted(set_aside.items())[:16]]
    if constraints.pinned or constraints.num_stages or constraints.is_order_fixed:
        lines.append("constraints (stages, pinned layers, order) were kept; fewer may fit")
    return "\n".join(lines)


def _fits(
    model: ModelCost, *, cluster: ClusterProfile, workload: Workload, constraints: Constraints
) -> bool:
    """Whether any plan fits, however slow, that the planner would find if it were asked for."""
    if lacks_room(model, nodes=cluster.nodes, workload=workload, constraints=constraints):
        return False
    rates = [
        node_rates.get(model.dtype, 0.0)
        for node in cluster.nodes
        for node_rates in (node.stream_bytes_per_second, node.flops_per_second)
    ]
    if min(rates) <= 0:  # in another dtype a node may not have been measured
        return False
    search = ReplicaSearch(
        model,
        cluster=cluster,
        workload=workload,
        constraints=replace(constraints, max_replicas=1),
    )
    return search.fits(range(len(cluster.nodes)), streams=workload.concurrency)


def lacks_room(
    model: ModelCost,
    *,
    nodes: Sequence[NodeProfile],
    workload: Workload,
    constraints: Constraints,
) -> bool:
    """Whether no plan can fit, by a bound that needs no search: it is true only where it must be.

    Each layer's weights and cache lie somewhere, whole on a node where no ranks share stages.
    """
    tokens = workload.max_context_tokens * workload.concurrency
    kv = model.kv_bytes_per_token_layer * tokens
    rooms = [max(0, node.memory_bytes - node.process_overhead_bytes) for node in nodes]
    if constraints.max_tp_degree > 1:
        return sum(rooms) < sum(model.layer_bytes) + model.num_layers * kv
    smallest = max(1, min(model.layer_bytes) + kv)
    return sum(room // smallest for room in rooms) < model.num_layers


def _capacity(
    model: ModelCost, cluster: ClusterProfile, index: int, workload: Workload
) -> NodeCapacity:
    """What a node has for weights and KV cache once the rest is taken off."""
    node = cluster.nodes[index]
    memory = rank_memory(
        model,
        spans=ModelSpans(model).one(0, model.num_layers),
        workload=workload,
        node=node,
        kv_groups=model.kv_groups,
        mlp_columns=np.array([model.mlp_columns]),
        num_ranks=1,
        streams=workload.concurrency,
    )
    rest = int(memory.activations[0]) + memory.overhead
    return NodeCapacity(node_id=node.node_id, memory_bytes=max(0, node.memory_bytes - rest))
