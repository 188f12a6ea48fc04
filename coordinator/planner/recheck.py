"""Whether a plan made for other times still holds: nodes, memory and wishes as they are now."""

from dataclasses import replace

import numpy as np

from coordinator.model_cost import ModelCost
from coordinator.planner.memory_model import rank_memory
from coordinator.planner.plan import PlacementPlan, ReplicaPlan, StagePlan
from coordinator.planner.profiles import ClusterProfile, Constraints, NodeProfile, Workload
from coordinator.planner.replicas import divided_streams
from coordinator.planner.spans import ModelSpans


def still_fits(
    plan: PlacementPlan,
    model: ModelCost,
    *,
    cluster: ClusterProfile,
    workload: Workload,
    constraints: Constraints,
) -> PlacementPlan | None:
    """The plan with today's streams and memory; None when it is not possible any more."""
    nodes = {node.node_id: node for node in cluster.nodes}
    count = len(plan.replicas)
    if (plan.dtype, plan.num_layers) != (model.dtype, model.num_layers):
        return None
    if not set(plan.node_ids) <= set(nodes) or count > min(
        constraints.max_replicas, workload.concurrency
    ):
        return None
    if not all(_is_wanted(replica, plan, cluster, constraints) for replica in plan.replicas):
        return None
    replicas = []
    for replica, streams in zip(
        plan.replicas, divided_streams(workload.concurrency, count), strict=True
    ):
        stages = tuple(
            _stage(stage, model, nodes=nodes, workload=workload, streams=streams)
            for stage in replica.stages
        )
        replicas.append(ReplicaPlan(stages=stages, concurrency=streams))
    ranks = [rank for r in replicas for stage in r.stages for rank in stage.ranks]
    if any(rank.memory.total > rank.memory_limit_bytes for rank in ranks):
        return None
    return PlacementPlan(
        num_layers=model.num_layers,
        dtype=model.dtype,
        max_context_tokens=workload.max_context_tokens,
        replicas=tuple(replicas),
    )


def _is_wanted(
    replica: ReplicaPlan, plan: PlacementPlan, cluster: ClusterProfile, constraints: Constraints
) -> bool:
    """Whether the user's wishes allow it."""
    exactly, most = constraints.num_stages, constraints.max_stages
    if exactly is not None and replica.num_stages != exactly:
        return False
    if most is not None and replica.num_stages > most:
        return False
    if any(len(stage.ranks) > constraints.max_tp_degree for stage in replica.stages):
        return False
    degrees = constraints.tp_degrees
    if len(degrees) == 1:
        degrees *= replica.num_stages
    if degrees and tuple(len(stage.ranks) for stage in replica.stages) != degrees:
        return False
    spans = {n: (s.start_layer, s.end_layer) for s in replica.stages for n in s.node_ids}
    if any(spans.get(name) != span for name, span in constraints.pinned.items()):
        return False
    order = [node.node_id for node in cluster.nodes]
    positions = [order.index(name) for stage in replica.stages for name in stage.node_ids]
    return not constraints.is_order_fixed or positions == sorted(positions)


def _stage(
    stage: StagePlan,
    model: ModelCost,
    *,
    nodes: dict[str, NodeProfile],
    workload: Workload,
    streams: int,
) -> StagePlan:
    spans = ModelSpans(model).one(stage.start_layer, stage.end_layer)
    ranks = []
    for rank in stage.ranks:
        node = nodes[rank.node_id]
        memory = rank_memory(
            model,
            spans=spans,
            workload=workload,
            node=node,
            kv_groups=rank.kv_groups,
            mlp_columns=np.array([rank.mlp_columns]),
            num_ranks=len(stage.ranks),
            streams=streams,
            query_heads=rank.query_heads if len(stage.ranks) > model.kv_groups else None,
        )
        ranks.append(replace(rank, memory=memory.by_kind(0), memory_limit_bytes=node.memory_bytes))
    return replace(stage, ranks=tuple(ranks))
