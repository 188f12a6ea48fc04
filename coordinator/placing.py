"""A deployment's placement: the planner's choice where nodes were measured, by memory elsewhere.

What the user left open shrinks until it fits: first fewer full-length sequences at once, then a
shorter context (`coordinator.memory_fit`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from coordinator.config import DeploymentConfig
from coordinator.memory_fit import fit, fit_plan, run_dtype
from coordinator.model_cost import ModelCost, NodeCapacity, StageCosts, held_model_cost
from coordinator.planner.plan import PlanResult, StagePlan
from coordinator.planner.planner import plan_placement
from coordinator.planner.profiles import ClusterProfile, Constraints, Workload
from coordinator.rank_cost import RankCosts, divided
from stagemesh.errors import PlacementError
from stagemesh.layout import Plan, RankAssignment, StageAssignment
from stagemesh.model_spec import ModelSpec
from stagemesh.placement.tensor_shares import TensorShares


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Who runs what, and what the planner says about it."""

    plan: Plan
    """What is loaded."""
    result: PlanResult | None = None
    """Prediction and reasons; None for a placement by memory alone."""


def place(
    config: DeploymentConfig,
    spec: ModelSpec,
    nodes: Sequence[NodeCapacity],
    *,
    profile: ClusterProfile | None,
) -> Placement:
    """Place a model.

    Args:
        config: what is asked for.
        spec: the model.
        nodes: in the order in which they stand by default.
        profile: the same nodes as measured; None places by memory.

    Raises:
        ConfigError: a wish makes no sense.
        PlacementError: it does not fit with what the user set, or not even at the least.
    """
    if profile is None or not config.is_planned or not is_measured(profile, config, spec):
        return Placement(plan=_by_memory(config, spec, nodes))
    # A node that is away is left alone as it is; the planner would take its name for a mistake.
    present = config.excluded & {node.node_id for node in profile.nodes}
    result, workload = best_plan(replace(config, excluded=present), spec, profile)
    cost = held_model_cost(spec, dtype=result.plan.dtype, quantize=config.quantize)
    plan = to_layout(result, cost, concurrency=workload.concurrency)
    return Placement(plan=plan, result=result)


def is_measured(profile: ClusterProfile, config: DeploymentConfig, spec: ModelSpec) -> bool:
    """Whether all nodes have rates for the run dtype."""
    dtype = run_dtype(config, spec)
    return all(
        dtype in n.stream_bytes_per_second and dtype in n.flops_per_second for n in profile.nodes
    )


def best_plan(
    config: DeploymentConfig,
    spec: ModelSpec,
    profile: ClusterProfile,
    *,
    max_replicas: int = 1,
) -> tuple[PlanResult, Workload]:
    """The planner's choice, and the context and concurrency that it holds.

    Args:
        config: what is asked for.
        spec: the model.
        profile: the nodes; each with rates for the run dtype.
        max_replicas: copies of the model; what runs has one.

    Raises:
        ConfigError: a wish makes no sense.
        PlacementError: it does not fit with what the user set, or not even at the least.
    """
    cost = held_model_cost(spec, dtype=run_dtype(config, spec), quantize=config.quantize)
    wishes = constraints(config, max_replicas=max_replicas)

    refused: list[Workload] = []

    def attempt(context: int, concurrency: int) -> tuple[PlanResult, Workload]:
        asked = workload_of(config, context=context, concurrency=concurrency)
        try:
            result = plan_placement(
                cost,
                cluster=profile,
                workload=asked,
                constraints=wishes,
                advises=not refused,  # what is shown is the first refusal
            )
        except PlacementError:
            refused.append(asked)
            raise
        return result, asked

    return fit(config, spec, attempt)


def workload_of(config: DeploymentConfig, *, context: int, concurrency: int) -> Workload:
    """What the planner is to be good at."""
    return Workload(
        max_context_tokens=context,
        prompt_tokens=min(config.prompt_tokens, context),
        concurrency=concurrency,
        objective=config.objective or "latency",
        max_step_tokens=config.max_step_tokens,
    )


def constraints(config: DeploymentConfig, *, max_replicas: int = 1) -> Constraints:
    """What the user wants of a placement; what runs has one replica."""
    ranks = config.stage_ranks
    return Constraints(
        num_stages=config.num_stages if ranks is None else len(ranks),
        max_stages=config.max_stages,
        pinned=dict(config.pinned),
        excluded=config.excluded,
        max_tp_degree=max(config.tp, default=config.max_tp),
        tp_degrees=ranks or config.tp,
        max_replicas=max_replicas,
    )


def to_layout(result: PlanResult, cost: ModelCost, *, concurrency: int) -> Plan:
    """The planner's plan of one replica as it is loaded."""
    plan = result.plan
    (replica,) = plan.replicas
    costs = StageCosts(cost, kv_tokens=plan.max_context_tokens * concurrency)
    return Plan(
        num_layers=plan.num_layers,
        dtype=plan.dtype,
        max_context_tokens=plan.max_context_tokens,
        stages=tuple(
            StageAssignment(
                stage=index,
                start_layer=stage.start_layer,
                end_layer=stage.end_layer,
                ranks=_ranks(stage, costs),
                shares=_shares(stage, cost),
            )
            for index, stage in enumerate(replica.stages)
        ),
        unused_node_ids=tuple(result.unused),
    )


def _ranks(stage: StagePlan, costs: StageCosts) -> tuple[RankAssignment, ...]:
    held = RankCosts(costs, _shares(stage, costs.model))
    return tuple(
        held.assignment(node_id, stage.start_layer, stage.end_layer, rank=rank)
        for rank, node_id in enumerate(stage.node_ids)
    )


def _shares(stage: StagePlan, cost: ModelCost) -> TensorShares | None:
    """The planner's shares as they are loaded; the vocabulary is divided evenly."""
    if len(stage.ranks) == 1:
        return None
    return TensorShares(
        num_kv_heads=cost.kv_groups,
        query_heads=tuple(rank.query_heads for rank in stage.ranks),
        mlp_columns=tuple(rank.mlp_columns for rank in stage.ranks),
        vocab_rows=divided(cost, len(stage.ranks)).vocab_rows,
    )


def _by_memory(config: DeploymentConfig, spec: ModelSpec, nodes: Sequence[NodeCapacity]) -> Plan:
    if config.pinned:
        raise PlacementError(
            "layers can be pinned only where nodes were measured; start node-daemon without "
            "--no-measure"
        )
    return fit_plan(config, spec, [n for n in nodes if n.node_id not in config.excluded])
