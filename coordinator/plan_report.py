"""The planner's answer for programs. Pure."""

from dataclasses import asdict
from typing import Any

from coordinator.config import DeploymentConfig
from coordinator.planner.plan import PlanResult, RankShare, ReplicaPlan
from coordinator.planner.profiles import Workload


def prediction_basis(config: DeploymentConfig) -> str:
    """What a prediction leaves out of how stages will run; empty where it leaves nothing out."""
    if config.compile:
        return "predicted for stages that are not compiled; compiled ones differ (docs/compile.md)"
    if config.quantize != "none":
        return (
            "predicted from the bytes of weights in few bits at the rate measured of whole ones; "
            "their kernels may be slower (docs/quantization.md)"
        )
    return ""


def plan_report(
    name: str, result: PlanResult, workload: Workload, *, basis: str = ""
) -> dict[str, Any]:
    """The whole answer as JSON values.

    Args:
        name: of the model.
        result: the planner's.
        workload: what was asked.
        basis: see `prediction_basis`.
    """
    plan, expected = result.plan, result.prediction
    return {
        "model": name,
        "num_layers": plan.num_layers,
        "dtype": plan.dtype,
        "objective": workload.objective,
        "max_context_tokens": plan.max_context_tokens,
        "concurrency": workload.concurrency,
        "prompt_tokens": workload.prompt_tokens,
        "replicas": [
            {
                "concurrency": replica.concurrency,
                "micro_steps": expected.micro_steps[index],
                "link_seconds": list(expected.link_seconds[index]),
                "stages": _stages(replica, expected.stage_seconds[index]),
            }
            for index, replica in enumerate(plan.replicas)
        ],
        "prediction": {
            "time_per_token_seconds": expected.time_per_token_seconds,
            "tokens_per_second_one_stream": 1.0 / expected.time_per_token_seconds,
            "tokens_per_second": expected.tokens_per_second,
            "time_to_first_token_seconds": expected.time_to_first_token_seconds,
            "limiting": expected.limiting,
            "limiting_stage": expected.limiting_stage,
            "limiting_link": expected.limiting_link,
            "basis": basis,
        },
        "unused": dict(result.unused),
        "is_exact": result.is_exact,
        "objective_value": result.objective_value,
        "lower_bound": result.lower_bound,
        "gap": result.gap,
    }


def _stages(replica: ReplicaPlan, seconds: tuple[float, ...]) -> list[dict[str, Any]]:
    return [
        {
            "stage": index,
            "start_layer": stage.start_layer,
            "end_layer": stage.end_layer,
            "seconds": seconds[index],
            "ranks": [_rank(rank) for rank in stage.ranks],
        }
        for index, stage in enumerate(replica.stages)
    ]


def _rank(rank: RankShare) -> dict[str, Any]:
    return {
        "node_id": rank.node_id,
        "kv_groups": rank.kv_groups,
        "query_heads": rank.query_heads,
        "mlp_columns": rank.mlp_columns,
        "memory": {**asdict(rank.memory), "total": rank.memory.total},
        "memory_limit_bytes": rank.memory_limit_bytes,
    }
