"""What stages that nodes share are priced by: their sums, copied KV heads, cores they share."""

from dataclasses import replace

import numpy as np
import pytest

from coordinator.model_cost import StageCosts
from coordinator.planner.planner import plan_placement
from coordinator.planner.profiles import (
    ClusterProfile,
    Constraints,
    LinkProfile,
    NodeProfile,
    Workload,
)
from coordinator.planner.rank_shares import query_heads
from coordinator.planner.spans import ModelSpans
from coordinator.planner.step_times import (
    all_reduce_seconds,
    attention_seconds,
    attention_shares,
    decode_shape,
    stage_work,
    together,
)
from coordinator.rank_cost import RankCosts
from stagemesh.errors import ConfigError
from stagemesh.placement.tensor_shares import TensorShares
from tests.coordinator.planner.test_cases import GIB, make_model

MESSAGES = LinkProfile(latency_seconds=1e-3, bytes_per_second=1e8)
SUMS = replace(MESSAGES, sum_seconds=2e-5, sum_bytes_per_second=1e9)
WORK = Workload(max_context_tokens=100, prompt_tokens=10)


def node(name: str, **fields) -> NodeProfile:
    return NodeProfile(
        node_id=name,
        memory_bytes=GIB,
        stream_bytes_per_second={"float32": 1e9},
        flops_per_second={"float32": 1e12},
        **fields,
    )


def cluster(link: LinkProfile, **fields) -> ClusterProfile:
    nodes = (node("a", **fields), node("b", **fields))
    return ClusterProfile(nodes=nodes, default_link=MESSAGES, links={("a", "b"): link})


def ranks_of(found) -> list[int]:
    return [len(stage.ranks) for stage in found.plan.replicas[0].stages]


def plan(cluster: ClusterProfile, **wishes):
    model = replace(make_model(10, layer=1_000_000, heads=4, groups=4, columns=64), hidden_size=8)
    return plan_placement(
        model, cluster=cluster, workload=WORK, constraints=Constraints(max_tp_degree=2, **wishes)
    )


def test_sums_are_priced_as_measured_and_not_as_messages() -> None:
    # A layer takes 1 ms alone; half of it, and two sums, take more by messages and less by sums.
    assert ranks_of(plan(cluster(MESSAGES))) == [1]
    quick = plan(cluster(SUMS))
    assert ranks_of(quick) == [2]
    alone = plan(cluster(SUMS), max_stages=1, tp_degrees=(1,)).objective_value
    # Both ways are through the coordinator, a message each.
    one_sum = 2e-5 + 8 * 4 / 1e9
    # Two in each layer, one of the first rows, and the draw.
    shared = 2e-3 + 10 * 0.5e-3 + (2 * 10 + 2) * one_sum
    assert quick.objective_value == pytest.approx(shared, rel=1e-3)
    assert alone == pytest.approx(2e-3 + 10e-3, rel=1e-3)


def test_many_bytes_are_summed_in_pieces() -> None:
    link = replace(SUMS, sum_seconds=1e-4, sum_bytes_per_second=1e6)
    # 2 ranks: whole. 4 ranks: whole up to 256 KiB that each sends, in pieces beyond.
    assert all_reduce_seconds(link, 1e6, num_ranks=2) == pytest.approx(1e-4 + 1.0)
    assert all_reduce_seconds(link, 8e4, num_ranks=4) == pytest.approx(1e-4 + 0.24)
    assert all_reduce_seconds(link, 1e6, num_ranks=4) == pytest.approx(2 * (1e-4 + 0.75))
    unmeasured = all_reduce_seconds(MESSAGES, 1e6, num_ranks=2)
    assert unmeasured == pytest.approx(1e-3 + 1e-2)


def test_values_of_sums_that_make_no_sense_are_refused() -> None:
    for fields in ({"sum_seconds": -1.0}, {"sum_bytes_per_second": 0.0}):
        with pytest.raises(ConfigError, match="sum_seconds of 0 or more"):
            replace(MESSAGES, **fields)
    for slowdown in (0.9, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="sum_slowdown is 1 or more"):
            replace(MESSAGES, sum_slowdown=slowdown)


def test_ranks_that_share_memory_read_as_slowly_as_they_did_together() -> None:
    """Then a stage is not shared that would be, were each rank as fast as alone."""
    slow = replace(SUMS, sum_slowdown=1.5)
    shared = plan(cluster(slow), max_stages=1, tp_degrees=(2,))
    one_sum = 2e-5 + 8 * 4 / 1e9
    expected = 2e-3 + 10 * 1.5 * 0.5e-3 + (2 * 10 + 2) * one_sum
    assert shared.objective_value == pytest.approx(expected, rel=1e-3)
    assert ranks_of(plan(cluster(slow))) == [2]
    assert ranks_of(plan(cluster(replace(SUMS, sum_slowdown=2.0)))) == [1]
    # It is of reading weights: what is computed, and what a step takes besides, stay as they are.
    a, b = cluster(slow).nodes
    for before, after in zip((a, b), together((a, b), slow), strict=True):
        assert after.stream_bytes_per_second == {"float32": 1e9 / 1.5}
        assert replace(after, stream_bytes_per_second=before.stream_bytes_per_second) == before


@pytest.mark.parametrize(("heads", "groups", "ranks"), [(8, 2, 4), (64, 8, 16), (9, 3, 4)])
def test_copies_of_kv_heads_are_counted_as_they_are_loaded(
    heads: int, groups: int, ranks: int
) -> None:
    model = replace(
        make_model(4, layer=4_000_000, heads=heads, groups=groups, columns=128, kv=groups * 16),
        head_dim=1,
        vocab_size=ranks,
    )
    counts = query_heads(model, (1,) * ranks)
    shares = attention_shares(model, (1,) * ranks, counts)
    loaded = TensorShares(
        num_kv_heads=groups,
        query_heads=counts,
        mlp_columns=(128 // ranks,) * ranks,
        vocab_rows=(1,) * ranks,
    )
    costs = RankCosts(StageCosts(model), loaded)
    for rank, share in enumerate(shares):
        mlp = 4 * 3_000_000 // ranks
        attention = costs.weight_bytes(0, 4, rank=rank) - mlp
        assert attention == pytest.approx(share.weights * 4 * 1_000_000, rel=1e-3)
        assert share.cache == 1 / groups
        assert share.scores == counts[rank] / heads
    # The weights of all ranks together are more than one copy, by those of the copied heads.
    assert sum(s.weights for s in shares) == pytest.approx((heads + ranks) / (heads + groups))
    # The slowest rank sets the time.
    work = stage_work(model, ModelSpans(model).one(0, 4), decode_shape(WORK, rows=1))
    nodes = [node(f"n{r}") for r in range(ranks)]
    seconds = attention_seconds(work, nodes, shares, dtype="float32")
    most = max(counts)
    expected = 4e6 * (most + 1) / (heads + groups) + 4 * groups * 16 * 55 / groups
    assert np.allclose(seconds, expected / 1e9)


def test_nodes_of_one_machine_that_compute_at_once_share_its_cores() -> None:
    own = {"layer_overhead_seconds": 1e-4, "step_overhead_seconds": 1e-3, "num_cores": 2}
    both = [
        node("a", machine_id="m", num_threads=2, **own),
        node("b", machine_id="m", num_threads=2, **own),
    ]
    for before, after in zip(both, together(both, None), strict=True):
        assert after.stream_bytes_per_second["float32"] == 0.5e9
        assert after.flops_per_second["float32"] == 0.5e12
        assert after.layer_overhead_seconds == 2 * before.layer_overhead_seconds
        assert after.step_overhead_seconds == 2 * before.step_overhead_seconds
        assert after.memory_bytes == before.memory_bytes
    # Negative control: on two machines, on one that is not known, or with cores for all.
    for nodes in (
        [both[0], replace(both[1], machine_id="other")],
        [replace(n, machine_id="") for n in both],
        [replace(n, num_threads=1) for n in both],
        [replace(n, num_cores=0) for n in both],
        [replace(n, device="cuda:0") for n in both],
    ):
        assert list(together(nodes, MESSAGES)) == nodes


def test_a_stage_is_not_shared_by_nodes_that_only_share_cores() -> None:
    machine = {"machine_id": "m", "num_cores": 2, "num_threads": 2}
    assert ranks_of(plan(cluster(SUMS, **machine))) == [1]
    assert ranks_of(plan(cluster(SUMS, **(machine | {"num_threads": 1})))) == [2]
