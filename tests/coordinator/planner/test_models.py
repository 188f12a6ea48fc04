"""What the planner computes from: costs against what a node holds, and the formulas by hand."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from coordinator.model_cost import ModelCost, held_model_cost, model_cost
from coordinator.planner.memory_model import rank_memory
from coordinator.planner.paper_models import PAPER_MODELS
from coordinator.planner.planner import plan_placement
from coordinator.planner.profiles import (
    COORDINATOR,
    ClusterProfile,
    Constraints,
    Workload,
)
from coordinator.planner.spans import ModelSpans, expert_share
from coordinator.planner.time_model import step_sizes
from coordinator.planner.units import Ways
from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import ConfigError
from stagemesh.inference import attention
from stagemesh.model_spec import load_model_spec
from stagemesh.models.builder import build_stage
from stagemesh.placement.tensor_shares import TensorShares
from tests.coordinator.planner.clusters import paper_cluster
from tests.coordinator.planner.scalar_model import random_cluster, random_model, stage_memory
from tests.support.checkpoints import write_tiny_checkpoint
from tests.support.ranks import run_ranks
from tests.support.tensor_stages import load_rank
from tools.families.tiny_configs import tiny_model as sparse_model

SAMPLE = "smollm2-135m-instruct"


def predicted_weights(cost: ModelCost, start: int, end: int) -> int:
    """As the planner counts them, on a node alone."""
    node = paper_cluster(1, seed=0).nodes[0]
    memory = rank_memory(
        cost,
        spans=ModelSpans(cost).one(start, end),
        workload=Workload(max_context_tokens=1, prompt_tokens=1),
        node=node,
        kv_groups=cost.kv_groups,
        mlp_columns=np.array([cost.mlp_columns]),
        num_ranks=1,
        streams=1,
    ).by_kind(0)
    return memory.weights + memory.embedding_head


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {"num_key_value_heads": 1}),
        ("qwen3", {}),
    ],
)
@pytest.mark.parametrize("span", [(0, 4), (0, 1), (1, 3), (2, 4)])
def test_a_tiny_stage_holds_what_was_predicted(tmp_path, family, config, span):
    spec = load_model_spec(write_tiny_checkpoint(tmp_path / "m", family, **config))
    cost = held_model_cost(spec, dtype="float32")
    attention.register()
    held = build_stage(
        spec,
        start_layer=span[0],
        end_layer=span[1],
        dtype="float32",
        device=torch.device("cpu"),
        attention=attention.ATTENTION_NAME,
    ).weight_bytes
    assert predicted_weights(cost, *span) == pytest.approx(held, rel=0.02)


@pytest.mark.parametrize("latent", [4, 64])
def test_ranks_of_latent_attention_hold_what_was_predicted(tmp_path: Path, latent: int) -> None:
    """The wider the vectors that all heads share, the more of its weights each rank holds."""
    sizes = {"q_lora_rank": latent, "kv_lora_rank": latent, "qk_nope_head_dim": 8, "v_head_dim": 8}
    model = sparse_model(
        "deepseek_v3", {"first_k_dense_replace": 4, "qk_rope_head_dim": 8, **sizes}
    )
    model.save_pretrained(tmp_path / "m")
    spec = load_model_spec(tmp_path / "m")
    cost = held_model_cost(spec, dtype="float32")
    shares = TensorShares.divide(
        num_ranks=2,
        num_heads=4,
        num_kv_heads=4,
        mlp_columns=cost.mlp_columns,
        vocab_size=spec.vocab_size,
    )
    node = paper_cluster(1, seed=0).nodes[0]

    def held(group: ProcessGroup) -> int:
        return load_rank(spec, group, shares).stage.weight_bytes

    predicted = rank_memory(
        cost,
        spans=ModelSpans(cost).one(0, spec.num_layers),
        workload=Workload(max_context_tokens=1, prompt_tokens=1),
        node=node,
        kv_groups=2,
        mlp_columns=np.array([cost.mlp_columns // 2]),
        num_ranks=2,
        streams=1,
    ).by_kind(0)
    for weight_bytes in run_ranks(2, held, backend="local", timeout_seconds=20.0):
        assert predicted.weights + predicted.embedding_head == pytest.approx(weight_bytes, rel=0.02)


@pytest.mark.parametrize(("span", "dtype"), [((0, 3), "float32"), ((27, 30), "bfloat16")])
def test_a_stage_of_the_sample_model_holds_what_was_predicted(span, dtype):
    spec = load_model_spec(SAMPLE)
    cost = held_model_cost(spec, dtype=dtype)
    attention.register()
    held = build_stage(
        spec,
        start_layer=span[0],
        end_layer=span[1],
        dtype=dtype,
        device=torch.device("cpu"),
        attention=attention.ATTENTION_NAME,
    ).weight_bytes
    assert predicted_weights(cost, *span) == pytest.approx(held, rel=0.02)
    # Negative control: the file's own types would be far off.
    in_file = sum(cost.file_layer_bytes[slice(*span)])
    assert in_file != pytest.approx(held, rel=0.02)


def test_the_sample_model_from_its_headers():
    cost = model_cost(load_model_spec(SAMPLE), dtype="float32")
    assert (cost.num_heads, cost.kv_groups, cost.head_dim) == (9, 3, 64)
    assert (cost.hidden_size, cost.mlp_columns, cost.vocab_size) == (576, 1536, 49152)
    # q and o are 576 x 576, k and v 192 x 576; gate, up and down 1536 x 576.
    assert set(cost.attention_bytes) == {4 * 576 * (2 * 576 + 2 * 192)}
    assert set(cost.mlp_bytes) == {4 * 3 * 1536 * 576}
    assert cost.layer_bytes[0] - cost.attention_bytes[0] - cost.mlp_bytes[0] == 4 * 2 * 576
    # Two FLOPs a weight, and scores over the context.
    dense = 2 * (134_515_008 - 61 * 576)
    assert cost.token_flops(context_tokens=0) == dense
    assert cost.token_flops(context_tokens=100) == dense + 30 * 4 * 9 * 64 * 100
    assert sum(cost.file_layer_bytes) < sum(cost.layer_bytes) / 4
    for size in (len(cost.attention_bytes), len(cost.mlp_bytes), len(cost.file_layer_bytes)):
        assert size == 30


def test_paper_models_have_the_sizes_that_they_are_named_for():
    for name, expected in (("7b", 7e9), ("70b", 70e9), ("405b", 405e9), ("1t", 1e12)):
        cost = PAPER_MODELS[name].cost(dtype="bfloat16")
        assert cost.total_weight_bytes() / 2 == pytest.approx(expected, rel=0.05)


def test_costs_that_make_no_sense_are_refused():
    good = PAPER_MODELS["7b"].cost(dtype="bfloat16")
    with pytest.raises(ConfigError, match="mlp_bytes has 1 entries for 32"):
        replace(good, mlp_bytes=(1,))
    with pytest.raises(ConfigError, match="at least 1"):
        replace(good, kv_groups=0)
    with pytest.raises(ConfigError, match="experts"):
        replace(good, experts_per_token=2)


def test_experts_read_by_a_step():
    cost = PAPER_MODELS["1t"].cost(dtype="bfloat16")
    assert expert_share(cost, rows=1) == pytest.approx(8 / 384)
    assert expert_share(cost, rows=2) == pytest.approx(1 - (1 - 8 / 384) ** 2)
    assert expert_share(PAPER_MODELS["7b"].cost(dtype="bfloat16"), rows=1) == 1.0


@pytest.mark.parametrize(
    ("streams", "stages", "expected"),
    [(1, 1, (1, 1)), (8, 1, (8, 1)), (8, 3, (3, 3)), (8, 5, (2, 4)), (2, 5, (1, 2))],
)
def test_steps_are_sized_as_the_scheduler_sizes_them(streams, stages, expected):
    assert step_sizes(streams, num_stages=stages) == expected


def test_memory_by_kind_against_the_formula_in_words():
    for seed in range(100):
        rng = random.Random(seed)
        model = random_model(rng, num_layers=4)
        cluster = random_cluster(rng, num_nodes=2, total_bytes=500_000)
        workload = Workload(
            max_context_tokens=30, prompt_tokens=5, concurrency=3, max_step_tokens=16
        )
        a, b = cluster.nodes
        groups = rng.randint(1, model.kv_groups - 1)
        columns = rng.randint(1, model.mlp_columns - 1)
        start = rng.randint(0, 3)
        end = rng.randint(start + 1, 4)
        stage = (
            start,
            end,
            (
                (a, groups, columns),
                (b, model.kv_groups - groups, model.mlp_columns - columns),
            ),
        )
        for rank, (node, g, c) in enumerate(stage[2]):
            memory = rank_memory(
                model,
                spans=ModelSpans(model).one(start, end),
                workload=workload,
                node=node,
                kv_groups=g,
                mlp_columns=np.array([c]),
                num_ranks=2,
                streams=3,
            ).by_kind(0)
            assert memory.total == stage_memory(model, stage, rank, workload, 3)


def test_kinds_of_memory_add_up_and_follow_what_is_asked():
    model = PAPER_MODELS["7b"].cost(dtype="bfloat16")
    cluster = paper_cluster(1, seed=1, memory_gib=(150, 160))

    def memory(**options):
        workload = Workload(prompt_tokens=16, **options)
        result = plan_placement(model, cluster=cluster, workload=workload)
        return result.plan.replicas[0].stages[0].ranks[0].memory

    one = memory(max_context_tokens=1024)
    assert one.weights + one.embedding_head == model.total_weight_bytes()
    assert one.kv == 32 * model.kv_bytes_per_token_layer * 1024
    assert one.overhead == cluster.nodes[0].process_overhead_bytes
    assert one.activations > 0
    assert memory(max_context_tokens=2048).kv == 2 * one.kv
    assert memory(max_context_tokens=1024, concurrency=3).kv == 3 * one.kv


def test_ways_between_nodes_are_those_of_the_links():
    for seed in range(20):
        cluster = random_cluster(random.Random(seed), num_nodes=5, total_bytes=1)
        # One more that no link names.
        cluster = replace(cluster, nodes=(*cluster.nodes, replace(cluster.nodes[0], node_id="x")))
        names = [node.node_id for node in cluster.nodes]
        ways, units = Ways(cluster), [(i,) for i in range(6)]
        hops, _ = ways.between(units, num_bytes=1000)
        for i, a in enumerate(names):
            assert ways.entry((i,)) == cluster.link(COORDINATOR, a).latency_seconds
            assert ways.exit((i,)) == cluster.link(a, COORDINATOR).latency_seconds
            for j, b in enumerate(names):
                link = cluster.link(a, b)
                if i != j:
                    way = link.latency_seconds + 1000 / link.bytes_per_second
                    assert hops[i, j] == pytest.approx(way)


def test_nodes_of_a_rack_are_one_site():
    cluster = paper_cluster(12, seed=0, num_racks=3)
    assert list(Ways(cluster).sites()) == [0, 1, 2] * 4
    assert set(
        Ways(ClusterProfile(nodes=cluster.nodes, default_link=cluster.default_link)).sites()
    ) == {0}


def test_racks_keep_ranks_of_a_stage_together():
    model = PAPER_MODELS["7b"].cost(dtype="bfloat16")
    cluster = paper_cluster(4, seed=3, num_racks=2, num_kinds=1, memory_gib=(10, 11))
    result = plan_placement(
        model,
        cluster=cluster,
        workload=Workload(max_context_tokens=1024),
        constraints=Constraints(max_tp_degree=2),
    )
    groups = [s.node_ids for s in result.plan.replicas[0].stages]
    assert any(len(group) == 2 for group in groups)
    for group in groups:
        # Even and odd nodes are in different racks.
        assert len({int(name[1:]) % 2 for name in group}) == 1
