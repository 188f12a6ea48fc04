"""Whether stages fit at all, told without times: as the search for the least time finds it."""

import random
import re
from dataclasses import replace

import pytest

from coordinator.planner.chain import StageCounts
from coordinator.planner.ordered import OrderedSearch
from coordinator.planner.planner import plan_placement
from coordinator.planner.profiles import Constraints, Workload
from coordinator.planner.replicas import ReplicaSearch
from coordinator.planner.room import chain_fits, furthest_ends
from coordinator.planner.step_times import decode_shape
from stagemesh.errors import PlacementError
from tests.coordinator.planner.scalar_model import random_cluster, random_model

WORK = Workload(max_context_tokens=40, prompt_tokens=10, concurrency=3, max_step_tokens=1)


def random_case(seed: int):
    rng = random.Random(seed)
    model = random_model(rng, num_layers=rng.randint(1, 7))
    spread = rng.choice([0.3, 0.5, 0.7, 1.0])
    total = int((model.total_weight_bytes() + 20_000) * spread)
    return model, random_cluster(rng, num_nodes=rng.randint(1, 8), total_bytes=total)


@pytest.mark.parametrize("counts", [{}, {"highest": 3}, {"lowest": 2, "highest": 2}, {"lowest": 3}])
def test_a_chain_fits_where_the_search_finds_one(counts: dict[str, int]) -> None:
    allowed = StageCounts(**counts)
    seen = []
    for seed in range(60):
        model, cluster = random_case(seed)
        search = ReplicaSearch(model, cluster=cluster, workload=WORK, constraints=Constraints())
        ends = furthest_ends(model, cluster.nodes, workload=WORK, streams=3)
        shape = decode_shape(WORK, rows=1)
        for order in search.orders(range(len(cluster.nodes))):
            chain = OrderedSearch(search.costs(3), search.ways, order).best(
                shape, counts=allowed, limit_seconds=float("inf")
            )
            nodes = [placed.unit[0] for placed in order]
            fits = chain_fits(nodes, ends, counts=allowed)
            assert fits == (chain is not None), (seed, order)
            seen.append(fits)
    # Negative control: both answers come up often.
    assert len(seen) / 10 < sum(seen) < len(seen) * 9 / 10


def refused(model, cluster, workload, constraints) -> str:
    with pytest.raises(PlacementError) as caught:
        plan_placement(model, cluster=cluster, workload=workload, constraints=constraints)
    return str(caught.value)


def advised(text: str) -> tuple[int, int]:
    """Streams, and context for all streams, that would fit; 0 for none."""
    streams = re.search(r"would fit: (\d+) stream\(s\) of", text)
    context = re.search(r"would fit: a context of (\d+) tokens for \d\d", text)
    return int(streams[1]) if streams else 0, int(context[1]) if context else 0


@pytest.mark.parametrize("wishes", [{}, {"max_stages": 12}, {"num_stages": 12}])
def test_many_nodes_are_refused_without_a_search_for_times(
    monkeypatch: pytest.MonkeyPatch, wishes: dict[str, int]
) -> None:
    rng = random.Random(4)
    model = random_model(rng, num_layers=24)
    cluster = random_cluster(rng, num_nodes=30, total_bytes=model.total_weight_bytes() // 4)
    constraints = Constraints(**wishes)
    asked = replace(WORK, max_context_tokens=1000, concurrency=50)
    times: list[int] = []
    search = OrderedSearch.best
    monkeypatch.setattr(
        OrderedSearch, "best", lambda self, *a, **k: times.append(1) or search(self, *a, **k)
    )
    streams, context = advised(refused(model, cluster, asked, constraints))
    assert not times
    assert 0 < streams < 50
    assert 0 < context < 1000
    plan_placement(
        model,
        cluster=cluster,
        workload=replace(asked, concurrency=streams),
        constraints=constraints,
    )
    assert times  # Negative control: what fits is searched for.
    fitting = replace(asked, max_context_tokens=context)
    plan_placement(model, cluster=cluster, workload=fitting, constraints=constraints)
    refused(model, cluster, replace(asked, concurrency=streams + 1), constraints)
    refused(model, cluster, replace(asked, max_context_tokens=context + 1), constraints)


@pytest.mark.parametrize(
    "wishes",
    [
        {"pinned": {"n3": (2, 4)}},
        {"max_tp_degree": 2},
        {"max_tp_degree": 2, "tp_degrees": (2,)},
    ],
)
def test_where_times_must_be_searched_the_advice_is_coarse_and_true(wishes) -> None:
    rng = random.Random(4)
    model = random_model(rng, num_layers=8)
    cluster = random_cluster(rng, num_nodes=10, total_bytes=model.total_weight_bytes() // 2)
    constraints = Constraints(**wishes)
    asked = replace(WORK, max_context_tokens=1024, concurrency=64)
    streams, context = advised(refused(model, cluster, asked, constraints))
    assert 0 < streams < 64
    assert 0 < context < 1024
    for less in (
        replace(asked, concurrency=streams),
        replace(asked, max_context_tokens=context),
    ):
        plan_placement(model, cluster=cluster, workload=less, constraints=constraints)
