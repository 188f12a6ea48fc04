"""Placement of layers on nodes: shares, limits of memory, and what is refused with which words."""

import re
from itertools import combinations, pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from coordinator.kv_budget import kv_capacity_tokens
from coordinator.model_cost import ModelCost, NodeCapacity, StageCosts, model_cost
from coordinator.partitioner import partition
from coordinator.shares import even_out
from stagemesh.errors import ConfigError, PlacementError
from stagemesh.layout import Plan
from stagemesh.model_spec import load_model_spec
from stagemesh.placement.counts import proportional_counts

GIB = 2**30


def make_model(
    layers: int | list[int],
    *,
    embedding: int = 0,
    head: int = 0,
    norm: int = 0,
    kv: int = 0,
    tied: bool = False,
    dtype: str = "float32",
) -> ModelCost:
    layer_bytes = tuple([1] * layers if isinstance(layers, int) else layers)
    return ModelCost(
        num_layers=len(layer_bytes),
        layer_bytes=layer_bytes,
        embedding_bytes=embedding,
        head_bytes=head,
        norm_bytes=norm,
        tied=tied,
        kv_bytes_per_token_layer=kv,
        dtype=dtype,
    )


def make_nodes(memories: list[int]) -> list[NodeCapacity]:
    return [NodeCapacity(node_id=f"n{i}", memory_bytes=m) for i, m in enumerate(memories)]


def place(model: ModelCost, memories: list[int], *, context: int = 1, **options: int) -> Plan:
    return partition(model=model, nodes=make_nodes(memories), max_context_tokens=context, **options)


def sizes(plan: Plan) -> list[int]:
    return [stage.num_layers for stage in plan.stages]


def needs(model: ModelCost, plan: Plan, *, tokens: int) -> list[int]:
    """Bytes per stage, summed here layer by layer, independent of the code under test."""
    result = []
    for stage in plan.stages:
        own = range(stage.start_layer, stage.end_layer)
        need = sum(model.layer_bytes[i] + model.kv_bytes_per_token_layer * tokens for i in own)
        need += model.embedding_bytes if stage.start_layer == 0 else 0
        if stage.end_layer == model.num_layers:
            need += model.norm_bytes
            need += 0 if model.tied and stage.start_layer == 0 else model.head_bytes
        result.append(need)
    return result


@pytest.mark.parametrize(
    ("num_layers", "memories", "expected"),
    [
        (10, [100] * 3, [4, 3, 3]),
        (30, [100] * 4, [8, 8, 7, 7]),
        (29, [100] * 7, [5, 4, 4, 4, 4, 4, 4]),
        (60, [100] * 31, [2] * 29 + [1] * 2),
        (31, [100] * 3, [11, 10, 10]),
        (100, [490, 510], [49, 51]),
        (10, [100, 200, 700], [1, 2, 7]),
        (30, [16_000, 16_200, 15_900, 16_100], [8, 8, 7, 7]),
        (30, [16_300, 15_900], [15, 15]),
        (24, [600, 400, 200], [12, 8, 4]),
        (10, [1_000, 30, 30], [8, 1, 1]),
        (3, [10**6, 10**3, 10**2], [1, 1, 1]),
        (1, [100], [1]),
    ],
)
def test_shares_follow_memory(num_layers, memories, expected):
    assert sizes(place(make_model(num_layers), memories)) == expected


def test_unequal_memory_is_not_evened_out():
    # Negative control of the rule that a few percent do not matter.
    assert even_out([1000, 1030]) == [1, 1]
    assert even_out([1000, 1060]) == [1000, 1060]
    assert sizes(place(make_model(100), [1000, 1060])) == [49, 51]


def test_every_count_of_layers_and_equal_nodes():
    for num_layers in range(1, 81):
        model = make_model(num_layers)
        for num_nodes in range(1, num_layers + 1):
            plan = place(model, [1000] * num_nodes)
            # Cover exactly once and contiguous: spelled out here, not left to Plan's own check.
            covered = [i for s in plan.stages for i in range(s.start_layer, s.end_layer)]
            assert covered == list(range(num_layers))
            assert len(plan.stages) == num_nodes
            assert max(sizes(plan)) - min(sizes(plan)) <= 1
            assert sizes(plan) == sorted(sizes(plan), reverse=True)


@given(
    st.integers(1, 80).flatmap(
        lambda n: st.tuples(st.just(n), st.lists(st.integers(1, 10**13), min_size=1, max_size=n))
    )
)
def test_proportional_counts_sum_up_and_stay_near_the_quota(case):
    total, weights = case
    counts = proportional_counts(total, weights)
    assert sum(counts) == total
    assert min(counts) >= 1
    whole = sum(weights)
    if all(total * weight >= whole for weight in weights):
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count * whole - total * weight) < whole


def test_more_stages_than_layers():
    with pytest.raises(ValueError, match=r"3 stages .* 2 layers") as caught:
        place(make_model(2), [100] * 3, num_stages=3)
    assert isinstance(caught.value, ConfigError)
    plan = place(make_model(2), [100] * 3)
    assert [s.node_id for s in plan.stages] == ["n0", "n1"]
    assert plan.unused_node_ids == ("n2",)


@pytest.mark.parametrize(
    ("options", "used", "unused"),
    [
        ({}, ["n0", "n1", "n2", "n3"], ()),
        ({"num_stages": 2}, ["n1", "n3"], ("n0", "n2")),
        ({"num_stages": 1}, ["n3"], ("n0", "n1", "n2")),
        ({"max_stages": 3}, ["n1", "n2", "n3"], ("n0",)),
    ],
)
def test_the_largest_nodes_are_used_in_the_callers_order(options, used, unused):
    plan = place(make_model(8), [10, 30, 20, 40], **options)
    assert [s.node_id for s in plan.stages] == used
    assert plan.unused_node_ids == unused


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"num_stages": 0}, ConfigError, "num_stages must be at least 1, got 0"),
        ({"max_stages": -1}, ConfigError, "max_stages must be at least 1, got -1"),
        ({"context": 0}, ConfigError, "max_context_tokens"),
        ({"concurrency": 0}, ConfigError, "concurrency"),
        ({"num_stages": 3}, PlacementError, "3 stages were asked for, but only 2 of 2 nodes"),
    ],
)
def test_wrong_numbers_are_named(options, error, text):
    with pytest.raises(error, match=text):
        place(make_model(8), [100, 100], **options)


def test_a_node_offered_twice_is_refused():
    node = NodeCapacity(node_id="same", memory_bytes=100)
    with pytest.raises(ConfigError, match="same"):
        partition(model=make_model(2), nodes=[node, node], max_context_tokens=1)


def test_negative_memory_is_refused():
    with pytest.raises(ConfigError, match="-1"):
        NodeCapacity(node_id="a", memory_bytes=-1)


# Nodes of 6, 4 and 2 GiB.
UNEVEN = [6 * GIB, 4 * GIB, 2 * GIB]


def test_uneven_memory_with_embedding_and_head_fits_every_node():
    model = make_model([GIB * 2 // 5] * 24, embedding=GIB // 2, head=GIB // 2)
    plan = place(model, UNEVEN)
    # The share of the last node (4 layers, 2.1 GiB) is more than it has: it gets 3.
    assert sizes(plan) == [12, 9, 3]
    for need, memory in zip(needs(model, plan, tokens=1), UNEVEN, strict=True):
        assert 0 < need <= memory


@pytest.mark.parametrize(
    ("num_layers", "memories", "ends", "expected"),
    [
        # The embedding takes two layers' room: one more for each of the others, not two for one.
        (12, [60, 60, 60], {"embedding": 40}, [2, 5, 5]),
        # The head takes one layer's room: of two equal repairs the one that fills no node up.
        (16, [100, 60, 40], {"head": 15}, [9, 5, 2]),
    ],
)
def test_how_a_split_is_repaired(num_layers, memories, ends, expected):
    assert sizes(place(make_model([10] * num_layers, **ends), memories)) == expected


def test_what_does_not_fit_is_refused_with_both_numbers():
    model = make_model([GIB * 9 // 20] * 26, embedding=GIB // 2, head=GIB // 2)
    with pytest.raises(PlacementError) as caught:
        place(model, UNEVEN)
    text = str(caught.value)
    assert "require 12.70 GiB" in text
    assert "available are 12.00 GiB on 3 node(s)" in text
    assert re.search(r"n2: layers \[22, 26\) .* require 2\.30 GiB, available 2\.00 GiB", text)
    assert "would fit: dtype bfloat16" in text


def test_nodes_without_memory():
    with pytest.raises(PlacementError, match=r"no node offers memory .* n0, n1"):
        place(make_model(4), [0, 0])
    with pytest.raises(PlacementError, match="there are no nodes"):
        place(make_model(4), [])
    plan = place(make_model(4), [0, 8])
    assert [s.node_id for s in plan.stages] == ["n1"]
    assert sizes(plan) == [4]
    assert plan.unused_node_ids == ("n0",)


def test_a_node_too_small_for_a_layer_is_left_out_unless_its_use_is_demanded():
    model = make_model([10] * 4)
    plan = place(model, [100, 5, 100])
    assert [s.node_id for s in plan.stages] == ["n0", "n2"]
    assert plan.unused_node_ids == ("n1",)
    with pytest.raises(PlacementError, match="does not fit"):
        place(model, [100, 5, 100], num_stages=3)


def test_when_the_largest_nodes_do_not_fit_others_are_tried():
    # The two largest are n1 and n2, but only n0 can hold the embedding besides a layer.
    model = make_model([10, 10], embedding=50)
    plan = place(model, [60, 59, 10], num_stages=2)
    assert [s.node_id for s in plan.stages] == ["n0", "n1"]
    model = make_model([10, 10], head=50)
    plan = place(model, [59, 59, 60], num_stages=2)
    assert plan.stages[-1].node_id == "n2"
    # Largest are n1 (70) and n2 (65); as the first stage neither holds the embedding.
    model = make_model([10, 10, 10], embedding=45, head=55)
    plan = place(model, [60, 66, 70, 64], num_stages=2)
    assert needs(model, plan, tokens=1)[0] <= 70


def test_tied_table_counts_at_both_ends_and_once_on_a_single_stage():
    model = make_model([10] * 2, embedding=50, head=50, tied=True)
    assert place(model, [70]).stages[0].weight_bytes == 70
    assert [s.weight_bytes for s in place(model, [60, 60]).stages] == [60, 60]
    with pytest.raises(PlacementError):
        place(make_model([10] * 2, embedding=50, head=50, tied=False), [70])


def test_kv_cache_is_granted_as_asked():
    model = make_model([100] * 6, kv=4)
    plan = place(model, [3000, 2000], context=20, concurrency=3)
    assert sizes(plan) == [4, 2]
    assert [s.kv_bytes_per_token for s in plan.stages] == [16, 8]
    assert [s.kv_cache_bytes for s in plan.stages] == [16 * 60, 8 * 60]
    assert kv_capacity_tokens(plan) == 60
    with pytest.raises(ConfigError, match="no stage"):
        kv_capacity_tokens(place(make_model(2), [10]))


def advice(text: str) -> list[str]:
    return re.findall(r"would fit: (.*)", text)


def test_the_advice_is_right_to_the_token():
    # Weights 600, KV 4 bytes per token and layer: 24 per token; 1000 bytes leave 16 tokens.
    model = make_model([100] * 6, kv=4, dtype="float32")
    with pytest.raises(PlacementError) as caught:
        place(model, [1000], context=8, concurrency=5)
    assert advice(str(caught.value)) == [
        "2 stream(s) of 8 tokens",
        "a context of 3 tokens for 5 stream(s)",
        "dtype bfloat16 with the same context and streams",
    ]
    assert place(model, [1000], context=8, concurrency=2)
    assert place(model, [1000], context=3, concurrency=5)
    assert place(model.with_dtype("bfloat16"), [1000], context=8, concurrency=5)
    # Negative control: one more of each is refused.
    for context, concurrency in ((8, 3), (4, 5)):
        with pytest.raises(PlacementError):
            place(model, [1000], context=context, concurrency=concurrency)


@pytest.mark.parametrize(
    ("memory", "kv", "context", "concurrency", "expected"),
    [
        (590, 0, 8, 50, ["dtype bfloat16"]),
        (700, 4, 50, 50, ["a context of 4 tokens for 1 stream"]),
        (200, 4, 8, 1, ["nothing on these nodes"]),
    ],
)
def test_advice_when_little_or_nothing_helps(memory, kv, context, concurrency, expected):
    with pytest.raises(PlacementError) as caught:
        place(make_model([100] * 6, kv=kv), [memory], context=context, concurrency=concurrency)
    lines = advice(str(caught.value))
    assert len(lines) == len(expected)
    for line, start in zip(lines, expected, strict=True):
        assert line.startswith(start)


def fits_by_brute_force(model: ModelCost, memories: list[int], *, tokens: int, num_used: int):
    """Whether any choice of nodes in order and any cut fits."""
    costs = StageCosts(model, kv_tokens=tokens)
    inner = range(1, model.num_layers)
    for used in combinations(memories, num_used):
        for cut in combinations(inner, num_used - 1):
            borders = [0, *cut, model.num_layers]
            needed = [costs.stage_bytes(start, end) for start, end in pairwise(borders)]
            if all(need <= memory for need, memory in zip(needed, used, strict=True)):
                return True
    return False


cases = st.fixed_dictionaries(
    {
        "layers": st.lists(st.integers(1, 9), min_size=1, max_size=7),
        "memories": st.lists(st.integers(0, 30), min_size=1, max_size=5),
        "embedding": st.integers(0, 12),
        "head": st.integers(0, 12),
        "kv": st.integers(0, 2),
        "tied": st.booleans(),
        "context": st.integers(1, 2),
        "num_stages": st.none() | st.integers(1, 5),
    }
)


@settings(max_examples=600)
@given(cases)
def test_whenever_a_contiguous_split_fits_one_is_found(case):
    head = case["embedding"] if case["tied"] else case["head"]
    model = make_model(
        case["layers"],
        embedding=case["embedding"],
        head=head,
        kv=case["kv"],
        tied=case["tied"],
    )
    memories = [m for m in case["memories"] if m]
    asked = case["num_stages"]
    assume(memories)
    assume(asked is None or asked <= min(len(memories), model.num_layers))
    counts = [asked] if asked else range(min(len(memories), model.num_layers), 0, -1)
    possible = [
        n
        for n in counts
        if fits_by_brute_force(model, memories, tokens=case["context"], num_used=n)
    ]
    try:
        plan = place(model, case["memories"], context=case["context"], num_stages=asked)
    except PlacementError:
        assert not possible
        return
    assert len(plan.stages) == possible[0], "as many nodes as can take part"
    by_id = {node.node_id: node.memory_bytes for node in make_nodes(case["memories"])}
    for stage, need in zip(plan.stages, needs(model, plan, tokens=case["context"]), strict=True):
        assert need <= by_id[stage.node_id]
        assert need == stage.weight_bytes + stage.kv_cache_bytes
    order = list(by_id)
    used = [s.node_id for s in plan.stages]
    assert used == sorted(used, key=order.index)
    assert set(used) | set(plan.unused_node_ids) == set(order)


@given(
    st.lists(st.integers(5, 60), min_size=1, max_size=5),
    st.lists(st.integers(1, 9), min_size=5, max_size=8),
)
def test_a_repaired_split_is_the_nearest_that_fits(memories, layers):
    model = make_model(layers, embedding=7, head=7)
    assume(fits_by_brute_force(model, memories, tokens=0, num_used=len(memories)))
    wanted = proportional_counts(len(layers), even_out(memories))
    costs = StageCosts(model)
    distances = []
    for cut in combinations(range(1, len(layers)), len(memories) - 1):
        borders = [0, *cut, len(layers)]
        spans = list(pairwise(borders))
        if all(
            costs.stage_bytes(a, b) <= memory
            for (a, b), memory in zip(spans, memories, strict=True)
        ):
            pairs = zip(spans, wanted, strict=True)
            distances.append(sum((b - a - count) ** 2 for (a, b), count in pairs))
    found = sizes(place(model, memories))
    assert sum((a - b) ** 2 for a, b in zip(found, wanted, strict=True)) == min(distances)


def test_a_real_model_costs_what_its_tensors_say():
    spec = load_model_spec("smollm2-135m-instruct")
    for dtype, item_bytes in (("float32", 4), ("bfloat16", 2)):
        cost = model_cost(spec, dtype=dtype)
        assert cost.num_layers == 30
        assert cost.tied
        assert cost.total_weight_bytes() == 134_515_008 * item_bytes
        assert cost.kv_bytes_per_token_layer == 2 * 3 * 64 * item_bytes
        for span in ((0, 30), (0, 15), (15, 30), (3, 4)):
            assert StageCosts(cost).weight_bytes(*span) == spec.stage_weight_bytes(*span, dtype)
    assert model_cost(spec, dtype="float32").with_dtype("bfloat16") == model_cost(
        spec, dtype="bfloat16"
    )
    with pytest.raises(ConfigError, match="int8"):
        model_cost(spec, dtype="int8")
