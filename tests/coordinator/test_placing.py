"""What a deployment gets: the planner's choice where nodes were measured, memory elsewhere."""

from pathlib import Path

import pytest

from coordinator.config import DeploymentConfig
from coordinator.model_cost import NodeCapacity, StageCosts, held_model_cost
from coordinator.placing import best_plan, place
from coordinator.planner.profiles import ClusterProfile, LinkProfile, NodeProfile
from stagemesh.errors import ConfigError, PlacementError
from stagemesh.model_spec import ModelSpec, load_model_spec
from tests.support.checkpoints import write_tiny_checkpoint

MIB = 2**20
PROCESS = 100 * MIB


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    folder: Path = tmp_path_factory.mktemp("placing")
    return load_model_spec(
        write_tiny_checkpoint(folder / "m", num_layers=6, hidden_size=64, intermediate_size=256)
    )


def profile(*rates: float, memory: int = 64 * MIB, dtype: str = "float32") -> ClusterProfile:
    return ClusterProfile(
        nodes=tuple(
            NodeProfile(
                node_id=f"n{i}",
                memory_bytes=memory + PROCESS,
                process_overhead_bytes=PROCESS,
                stream_bytes_per_second={dtype: rate},
                flops_per_second={dtype: 10 * rate},
                layer_overhead_seconds=1e-5,
            )
            for i, rate in enumerate(rates)
        ),
        default_link=LinkProfile(latency_seconds=1e-4, bytes_per_second=1e9),
    )


def capacities(cluster: ClusterProfile) -> list[NodeCapacity]:
    return [
        NodeCapacity(node_id=n.node_id, memory_bytes=n.memory_bytes - n.process_overhead_bytes)
        for n in cluster.nodes
    ]


def config(**changes) -> DeploymentConfig:
    wanted = {"model": "m", "dtype": "float32", "max_context_tokens": 64, "concurrency": 2}
    return DeploymentConfig(**{**wanted, "objective": "latency", **changes})


def placed(spec: ModelSpec, wishes: DeploymentConfig, cluster: ClusterProfile | None, nodes=None):
    return place(wishes, spec, nodes or capacities(cluster), profile=cluster)


def sizes(plan) -> dict[str, int]:
    return {stage.node_id: stage.num_layers for stage in plan.stages}


def test_the_fastest_node_gets_all_and_the_others_hear_why(spec: ModelSpec) -> None:
    placement = placed(spec, config(), profile(1e9, 5e9, 1e9))
    assert sizes(placement.plan) == {"n1": 6}
    assert placement.result is not None
    assert set(placement.plan.unused_node_ids) == set(placement.result.unused) == {"n0", "n2"}
    assert all("slower" in reason for reason in placement.result.unused.values())


def test_without_an_objective_every_node_gets_layers_by_memory(spec: ModelSpec) -> None:
    placement = placed(spec, config(objective=None), profile(1e9, 5e9, 1e9))
    assert sizes(placement.plan) == {"n0": 2, "n1": 2, "n2": 2}
    assert placement.result is None
    # Whether a stage is shared only the planner can tell.
    assert placed(spec, config(objective=None, max_tp=2), profile(1e9, 5e9)).result is not None


def test_without_profiles_memory_decides(spec: ModelSpec) -> None:
    nodes = capacities(profile(1e9, 5e9, 1e9))
    placement = placed(spec, config(excluded=frozenset({"n2"})), None, nodes)
    assert sizes(placement.plan) == {"n0": 3, "n1": 3}
    assert placement.result is None
    # Likewise when a dtype was not measured.
    other = profile(1e9, 5e9, dtype="bfloat16")
    assert placed(spec, config(), other).result is None
    with pytest.raises(PlacementError, match="pinned only where nodes were measured"):
        placed(spec, config(pinned={"n0": (0, 2)}), None, nodes)


def test_wishes_are_kept(spec: ModelSpec) -> None:
    cluster = profile(1e9, 5e9, 1e9)
    assert len(sizes(placed(spec, config(num_stages=3), cluster).plan)) == 3
    assert sizes(placed(spec, config(excluded=frozenset({"n1", "away"})), cluster).plan) in (
        {"n0": 6},
        {"n2": 6},
    )
    pinned = placed(spec, config(pinned={"n0": (0, 2), "n2": (2, 6)}), cluster)
    assert sizes(pinned.plan) == {"n0": 2, "n2": 4}
    with pytest.raises(ConfigError, match="7 stages"):
        placed(spec, config(num_stages=7), cluster)


def test_stages_get_the_bytes_that_the_planner_counted(spec: ModelSpec) -> None:
    placement = placed(spec, config(num_stages=2), profile(1e9, 1e9))
    cost = held_model_cost(spec, dtype="float32")
    costs = StageCosts(cost, kv_tokens=2 * 64)
    assert placement.result is not None
    stages = placement.result.plan.replicas[0].stages
    for assignment, stage in zip(placement.plan.stages, stages, strict=True):
        memory = stage.ranks[0].memory
        assert assignment.weight_bytes == memory.weights + memory.embedding_head
        assert assignment.kv_cache_bytes == memory.kv == costs.kv_bytes(assignment.num_layers)
        assert memory.overhead == PROCESS


def test_what_the_user_left_open_shrinks_until_it_fits(spec: ModelSpec) -> None:
    cost = held_model_cost(spec, dtype="float32")
    one = cost.total_weight_bytes() + 128 * 6 * cost.kv_bytes_per_token_layer
    tight = profile(1e9, memory=one + 1_850_000)
    open_wishes = config(max_context_tokens=None, concurrency=None)
    placement = placed(spec, open_wishes, tight)
    assert placement.plan.max_context_tokens == 128
    assert placement.plan.stages[0].kv_cache_bytes < 4 * 128 * 6 * cost.kv_bytes_per_token_layer
    with pytest.raises(PlacementError, match=r"lacks .* \(\d+ bytes\)[\s\S]*would fit: "):
        placed(spec, config(concurrency=4096), tight)


def test_the_planners_shares_are_what_is_loaded(spec: ModelSpec) -> None:
    cluster = profile(1e9, 3e9, 1e9)
    fast_links = ClusterProfile(
        nodes=cluster.nodes, default_link=LinkProfile(latency_seconds=0, bytes_per_second=1e12)
    )
    wishes = config(max_tp=2, max_stages=1)
    result, _ = best_plan(wishes, spec, fast_links)
    (planned,) = result.plan.replicas[0].stages
    (stage,) = placed(spec, wishes, fast_links).plan.stages
    assert stage.node_ids == planned.node_ids
    assert stage.num_ranks == 2
    assert stage.shares is not None
    assert stage.shares.mlp_columns == tuple(rank.mlp_columns for rank in planned.ranks)
    assert stage.shares.query_heads == tuple(rank.query_heads for rank in planned.ranks)
    assert len(set(stage.shares.mlp_columns)) == 2
    # Negative control: without the wish nobody shares.
    assert placed(spec, config(), fast_links).plan.stages[0].shares is None


@pytest.mark.parametrize("is_measured", [True, False])
@pytest.mark.parametrize(
    ("wishes", "degrees"),
    [
        ({"tp": (2, 1)}, [2, 1]),
        ({"tp": (1, 2), "num_stages": 2}, [1, 2]),
        ({"tp": (2,)}, None),
        ({"tp": (2,), "num_stages": 2}, [2, 2]),
        ({"tp": (4,), "num_stages": 1}, [4]),
        ({"tp": (1,), "num_stages": 3}, [1, 1, 1]),
    ],
)
def test_stages_have_the_ranks_that_are_asked_for(
    spec: ModelSpec, wishes, degrees, is_measured: bool
) -> None:
    cluster = profile(1e9, 1e9, 1e9, 1e9)
    changes = wishes if is_measured else {**wishes, "objective": None}
    plan = placed(spec, config(**changes), cluster).plan
    found = [stage.num_ranks for stage in plan.stages]
    assert found == degrees if degrees else set(found) == {2}
    cost = held_model_cost(spec, dtype="float32")
    for stage in plan.stages:
        whole = StageCosts(cost, kv_tokens=128)
        weights = whole.weight_bytes(stage.start_layer, stage.end_layer)
        assert weights <= stage.weight_bytes
        if stage.num_ranks <= cost.kv_groups:  # beyond, ranks hold copies
            norms = 2 * 6 * cost.hidden_size * 4 * stage.num_ranks
            assert stage.weight_bytes <= weights + norms
            assert stage.kv_cache_bytes == whole.kv_bytes(stage.num_layers)


def test_shares_and_layers_follow_memory(spec: ModelSpec) -> None:
    memories = [8 * MIB, 4 * MIB, 4 * MIB, 2 * MIB]
    nodes = [NodeCapacity(node_id=f"n{i}", memory_bytes=m) for i, m in enumerate(memories)]
    plan = placed(spec, config(objective=None, tp=(2, 1)), None, nodes).plan
    assert [stage.node_ids for stage in plan.stages] == [("n0", "n1"), ("n2",)]
    assert plan.unused_node_ids == ("n3",)
    assert plan.stages[0].shares is not None
    assert plan.stages[0].shares.mlp_columns == (171, 85)
    assert [stage.num_layers for stage in plan.stages] == [5, 1]
    # Memories that differ by a few percent count as equal.
    even = [NodeCapacity(node_id=f"n{i}", memory_bytes=8 * MIB + i * 2**16) for i in range(3)]
    plan = placed(spec, config(objective=None, tp=(2, 1)), None, even).plan
    assert plan.stages[0].shares is not None
    assert plan.stages[0].shares.mlp_columns == (128, 128)


@pytest.mark.parametrize("is_measured", [True, False])
@pytest.mark.parametrize(
    ("wishes", "text"),
    [
        ({"tp": (5,), "num_stages": 1}, r"tp 5\D.*4 heads"),
        ({"tp": (4, 2)}, "tp 4, 2 need 6 nodes"),
        ({"tp": (1,) * 7, "num_stages": 7}, "7 stages.*6 layers"),
    ],
)
def test_what_no_rank_could_load_is_refused(
    spec: ModelSpec, wishes, text: str, is_measured: bool
) -> None:
    cluster = profile(*[1e9] * 5)
    changes = wishes if is_measured or max(wishes["tp"]) == 1 else {**wishes, "objective": None}
    with pytest.raises((PlacementError, ConfigError), match=text):
        placed(spec, config(**changes), cluster)


def test_a_stage_that_no_rank_has_room_for_is_refused_with_numbers(spec: ModelSpec) -> None:
    nodes = [NodeCapacity(node_id=f"n{i}", memory_bytes=MIB // 4) for i in range(2)]
    wishes = config(objective=None, tp=(2,), concurrency=64)
    with pytest.raises(PlacementError, match=r"n1: rank 1 of layers \[0, 6\).*lacks"):
        placed(spec, wishes, None, nodes)
    # Negative control: with room it fits.
    more = [NodeCapacity(node_id=f"n{i}", memory_bytes=16 * MIB) for i in range(2)]
    assert placed(spec, wishes, None, more).plan.num_stages == 1


@pytest.mark.parametrize("wishes", [{"tp": (0,)}, {"tp": (2, 1), "num_stages": 3}, {"max_tp": 0}])
def test_degrees_that_make_no_sense_are_refused_at_once(wishes) -> None:
    with pytest.raises(ConfigError, match="tp"):
        config(**wishes)
