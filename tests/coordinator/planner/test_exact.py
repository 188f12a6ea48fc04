"""The planner against every plan there is, on small random clusters."""

import random
from dataclasses import replace
from math import inf

import pytest

from coordinator.planner.planner import plan_placement
from coordinator.planner.profiles import Constraints, Workload
from stagemesh.errors import PlacementError
from tests.coordinator.planner.scalar_model import (
    best_value,
    plan_value,
    random_cluster,
    random_model,
)

NUM_CLUSTERS = 500
NUM_BATCHES = 10


def random_case(seed: int):
    """A cluster of up to 5 nodes; the larger, the fewer other choices, so that all can be tried."""
    rng = random.Random(seed)
    num_nodes = rng.randint(1, 5)
    ranks = {1: 1, 2: 2, 3: 3, 4: 2, 5: 1}[num_nodes] if rng.random() < 0.5 else 1
    replicas = rng.randint(1, 3) if rng.random() < 0.3 and num_nodes < 5 and ranks == 1 else 1
    num_layers = rng.randint(1, 6) if ranks == 1 else rng.randint(1, 3)
    model = random_model(rng, num_layers=num_layers, columns=rng.randint(3, 4))
    cluster = random_cluster(
        rng, num_nodes=num_nodes, total_bytes=model.total_weight_bytes() + 20_000
    )
    workload = Workload(
        prompt_tokens=rng.randint(1, 20),
        max_context_tokens=rng.randint(20, 60),
        concurrency=rng.choice([1, 2, 3, 5, 8]),
        max_step_tokens=rng.choice([1, 16]),
    )
    constraints = Constraints(
        max_tp_degree=ranks,
        max_replicas=replicas,
        max_stages=rng.choice([None, None, None, 2]),
        is_order_fixed=rng.random() < 0.15,
        excluded=frozenset({"n1"}) if num_nodes > 1 and rng.random() < 0.1 else frozenset(),
    )
    return model, cluster, workload, constraints


def check(seed: int, objective: str) -> bool:
    """Whether there was a plan."""
    model, cluster, workload, constraints = random_case(seed)
    workload = replace(workload, objective=objective)
    expected = best_value(model, cluster, workload, constraints)
    try:
        result = plan_placement(model, cluster=cluster, workload=workload, constraints=constraints)
    except PlacementError:
        assert expected == inf, f"seed {seed}, {objective}: a plan exists"
        return False
    assert result.is_exact
    assert result.objective_value == pytest.approx(expected, rel=1e-7), f"seed {seed}, {objective}"
    # The plan is worth what the planner says, by formulas of its own.
    own = plan_value(result.plan, model, cluster, workload)
    assert own == pytest.approx(result.objective_value, rel=1e-9), f"seed {seed}, {objective}"
    ranks = [r for replica in result.plan.replicas for s in replica.stages for r in s.ranks]
    assert all(rank.memory.total <= rank.memory_limit_bytes for rank in ranks)
    return True


@pytest.mark.parametrize("objective", ["latency", "throughput"])
@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_no_plan_is_better(batch, objective):
    each = NUM_CLUSTERS // NUM_BATCHES
    found = [check(seed, objective) for seed in range(batch * each, (batch + 1) * each)]
    # Both outcomes must occur, or one of them is not tested.
    assert 0 < sum(found) < each


@pytest.mark.parametrize(
    "lesser",
    [
        {"is_order_fixed": True},
        {"max_stages": 1},
        {"max_tp_degree": 1},
        {"max_replicas": 1},
    ],
)
def test_a_planner_that_chose_among_fewer_plans_would_be_noticed(lesser):
    """Negative control, for each thing that the planner chooses."""
    for seed in range(120):
        model, cluster, workload, constraints = random_case(seed)
        workload = replace(workload, objective="throughput")
        try:
            best = plan_placement(
                model, cluster=cluster, workload=workload, constraints=constraints
            )
            less = plan_placement(
                model,
                cluster=cluster,
                workload=workload,
                constraints=replace(constraints, **lesser),
            )
        except PlacementError:
            continue
        assert less.objective_value >= best.objective_value * (1 - 1e-9)
        if less.objective_value > best.objective_value * 1.001:
            return
    pytest.fail("no cluster of 120 was worse off")
