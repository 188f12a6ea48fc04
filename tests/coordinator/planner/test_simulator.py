"""Plans run on paper: what the formulas predict is what queues and links make of them."""

from dataclasses import replace

import pytest

from coordinator.planner.paper_models import PAPER_MODELS
from coordinator.planner.planner import plan_placement
from coordinator.planner.profiles import Constraints, Workload
from coordinator.planner.simulator import simulate
from stagemesh.errors import ConfigError
from tests.coordinator.planner.clusters import paper_cluster


@pytest.mark.parametrize(
    ("name", "num_nodes", "options", "concurrency"),
    [
        ("7b", 2, {}, 1),
        ("7b", 2, {"max_tp_degree": 2}, 8),
        ("70b", 5, {"num_stages": 4}, 8),
        ("70b", 12, {"num_stages": 3}, 7),
        ("70b", 16, {"max_replicas": 3}, 12),
        ("405b", 40, {}, 8),
        ("1t", 64, {}, 16),
    ],
)
@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_prediction_and_simulation_agree(name, num_nodes, options, concurrency, objective):
    model = PAPER_MODELS[name].cost(dtype="bfloat16")
    cluster = paper_cluster(num_nodes, seed=7)
    workload = Workload(max_context_tokens=4096, concurrency=concurrency, objective=objective)
    result = plan_placement(
        model, cluster=cluster, workload=workload, constraints=Constraints(**options)
    )
    run = simulate(result.plan, model=model, cluster=cluster, workload=workload)
    assert run.tokens_per_second == pytest.approx(result.prediction.tokens_per_second, rel=0.05)
    alone = replace(
        result.plan,
        replicas=tuple(replace(r, concurrency=1) for r in result.plan.replicas),
    )
    single = simulate(alone, model=model, cluster=cluster, workload=workload)
    assert single.time_per_token_seconds == pytest.approx(
        result.prediction.time_per_token_seconds, rel=1e-6
    )
    for replica in run.replicas:
        assert all(0 <= u <= 1 + 1e-9 for u in replica.stage_utilisation)
        assert -1e-9 <= replica.bubble < 1


def test_bubbles_shrink_with_streams_and_the_slowest_stage_is_always_busy():
    model = PAPER_MODELS["70b"].cost(dtype="bfloat16")
    cluster = paper_cluster(4, seed=1)
    busy = Workload(max_context_tokens=2048, concurrency=16, objective="throughput")
    plan = plan_placement(
        model, cluster=cluster, workload=busy, constraints=Constraints(num_stages=4)
    ).plan
    bubbles = []
    for concurrency in (1, 2, 3, 4, 16):
        fewer = replace(plan, replicas=(replace(plan.replicas[0], concurrency=concurrency),))
        run = simulate(
            fewer, model=model, cluster=cluster, workload=replace(busy, concurrency=concurrency)
        )
        bubbles.append(run.replicas[0].bubble)
    # One stream keeps one of four stages busy at a time.
    assert bubbles[0] > 0.7
    assert bubbles[:4] == sorted(bubbles[:4], reverse=True)
    assert bubbles[-1] < 0.3
    assert max(run.replicas[0].stage_utilisation) > 0.95


def test_queueing_costs_throughput():
    """Negative control: with uneven times the simulation parts from the formula, and downwards."""
    model = PAPER_MODELS["70b"].cost(dtype="bfloat16")
    cluster = paper_cluster(6, seed=2)
    workload = Workload(max_context_tokens=2048, concurrency=6, objective="throughput")
    plan = plan_placement(
        model, cluster=cluster, workload=workload, constraints=Constraints(num_stages=6)
    ).plan
    smooth, rough = (
        simulate(
            plan,
            model=model,
            cluster=cluster,
            workload=workload,
            tokens_per_stream=200,
            jitter=jitter,
        ).tokens_per_second
        for jitter in (0.0, 0.9)
    )
    assert rough < 0.98 * smooth
    again = simulate(
        plan, model=model, cluster=cluster, workload=workload, tokens_per_stream=200, jitter=0.9
    )
    assert again.tokens_per_second == rough
    with pytest.raises(ConfigError, match="jitter"):
        simulate(plan, model=model, cluster=cluster, workload=workload, jitter=1.0)


@pytest.mark.parametrize(
    ("name", "num_nodes", "kinds", "objective"),
    [
        ("7b", 2, None, "throughput"),
        ("7b", 10_000, 5, "latency"),
        ("405b", 200, None, "latency"),
        ("1t", 1000, 6, "throughput"),
        ("1t", 10_000, 6, "latency"),
    ],
)
def test_from_two_to_ten_thousand_nodes(name, num_nodes, kinds, objective):
    model = PAPER_MODELS[name].cost(dtype="bfloat16")
    cluster = paper_cluster(num_nodes, seed=11, num_kinds=kinds)
    workload = Workload(max_context_tokens=4096, concurrency=4, objective=objective)
    result = plan_placement(model, cluster=cluster, workload=workload)
    assert set(result.plan.node_ids) | set(result.unused) == {n.node_id for n in cluster.nodes}
    ranks = [r for s in result.plan.replicas[0].stages for r in s.ranks]
    assert all(rank.memory.total <= rank.memory_limit_bytes for rank in ranks)
    run = simulate(
        result.plan, model=model, cluster=cluster, workload=workload, tokens_per_stream=16
    )
    assert run.tokens_per_second == pytest.approx(result.prediction.tokens_per_second, rel=0.1)
    assert result.gap < 0.5
