"""Layers on nodes: even and balanced splits, memory, speeds, tensor ranks, refusals."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagemesh.errors import ConfigError, PlacementError
from stagemesh.placement.layer_partitioner import LayerAssignment, LayerPartitioner


def sizes(assignments: list[LayerAssignment]) -> list[int]:
    """Layers of each stage, which must be contiguous and in order."""
    stages = [a.pipeline_stage for a in assignments if a.tensor_rank == 0]
    assert stages == sorted(stages)
    assert [a.layer_id for a in assignments if a.tensor_rank == 0] == list(range(len(stages)))
    return [stages.count(stage) for stage in range(stages[-1] + 1)]


@pytest.mark.parametrize(
    ("num_layers", "num_nodes", "expected"),
    [(10, 3, [4, 3, 3]), (60, 31, [2] * 29 + [1] * 2), (29, 7, [5] + [4] * 6), (2, 3, [1, 1])],
)
def test_equal_nodes(num_layers, num_nodes, expected) -> None:
    partitioner = LayerPartitioner(num_layers, num_nodes)
    assert sizes(partitioner.partition()) == expected
    assert sizes(partitioner.partition_balanced()) == expected


def test_every_tensor_rank_is_listed() -> None:
    partitioner = LayerPartitioner(4, 6, 3, 2)
    partitioner.set_layer_costs([30, 30, 60, 60])
    assignments = partitioner.partition()
    assert len(assignments) == 4 * 3
    assert [(a.layer_id, a.node_id, a.pipeline_stage, a.tensor_rank) for a in assignments[:4]] == [
        (0, 0, 0, 0),
        (0, 1, 0, 1),
        (0, 2, 0, 2),
        (1, 0, 0, 0),
    ]
    assert partitioner.memory_per_node(assignments) == pytest.approx(
        {0: 20, 1: 20, 2: 20, 3: 40, 4: 40, 5: 40}
    )
    assert partitioner.imbalance_ratio(assignments) == pytest.approx((40 - 20) / 30)
    assert partitioner.imbalance_ratio([]) == 0


def test_no_stage_is_left_empty_by_a_heavy_layer() -> None:
    """Filling stages up to the mean would put all layers into the first three stages."""
    partitioner = LayerPartitioner(6, 4, 1, 4)
    partitioner.set_layer_costs([1, 1, 1, 1, 1, 100])
    assert sizes(partitioner.partition_balanced()) == [2, 2, 1, 1]


def test_balance_follows_costs_and_speeds() -> None:
    partitioner = LayerPartitioner(12, 3, 1, 3)
    partitioner.set_nodes(speeds=[3, 2, 1])
    assert sizes(partitioner.partition_balanced()) == [6, 4, 2]
    partitioner.set_nodes(speeds=[1, 1, 1])
    partitioner.set_layer_costs([6] * 2 + [1] * 10, head_mb=2)
    assert sizes(partitioner.partition_balanced()) == [1, 4, 7]  # 6, 9 and 9


def test_ranks_share_layers_by_speed() -> None:
    partitioner = LayerPartitioner(4, 2, 2, 1)
    partitioner.set_layer_costs([8] * 4)
    partitioner.set_nodes(memory_mb=[30, 10], speeds=[3, 1])
    assert partitioner.memory_per_node(partitioner.partition_balanced()) == {0: 24, 1: 8}


def test_nobody_gets_more_than_its_memory() -> None:
    gib = 1024
    partitioner = LayerPartitioner(24, 3, 1, 3)
    partitioner.set_layer_costs([0.4 * gib] * 24, embedding_mb=0.5 * gib, head_mb=0.5 * gib)
    limits = [6 * gib, 4 * gib, 2 * gib]
    partitioner.set_nodes(memory_mb=limits)
    held = partitioner.memory_per_node(partitioner.partition_balanced())
    assert sorted(held) == [0, 1, 2]
    assert all(held[node] <= limits[node] for node in held)
    # The even split is the one that overflows the smallest node.
    with pytest.raises(PlacementError, match=r"node 2 would hold .* of 2048 MB"):
        partitioner.partition()

    larger = LayerPartitioner(26, 3, 1, 3)
    larger.set_layer_costs([0.45 * gib] * 26, embedding_mb=0.5 * gib, head_mb=0.5 * gib)
    larger.set_nodes(memory_mb=limits)
    with pytest.raises(PlacementError, match=r"require 13004.8 MB, available are 12288 MB"):
        larger.partition_balanced()


def test_nodes_without_memory_or_speed_get_nothing() -> None:
    partitioner = LayerPartitioner(8, 2)
    partitioner.set_nodes(memory_mb=[0, 8], speeds=[0, 1])
    assert partitioner.memory_per_node(partitioner.partition_balanced()) == {1: 8.0}
    with pytest.raises(PlacementError, match="0 of 2 offer memory and speed"):
        partitioner.set_nodes(memory_mb=[0, 0], speeds=[0, 0])
    with pytest.raises(PlacementError, match="need 2 nodes, but 1 of 2"):
        LayerPartitioner(8, 2, 1, 2).set_nodes(speeds=[0, 1])


def test_a_slow_node_is_passed_over_where_stages_are_open() -> None:
    partitioner = LayerPartitioner(4, 3)
    partitioner.set_nodes(speeds=[1, 0.01, 1])
    assert partitioner.memory_per_node(partitioner.partition_balanced()) == {0: 2.0, 2: 2.0}
    # Two stages on three nodes: the two fast ones.
    two = LayerPartitioner(9, 3, 1, 2)
    two.set_nodes(speeds=[1, 2, 1])
    assert len(set(two.memory_per_node(two.partition_balanced()))) == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((2, 3, 1, 3), r"3 stages.*2 layers"),
        ((0, 1), "num_layers"),
        ((4, 0), "num_nodes"),
        ((4, 2, 0), "tensor_parallel"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, text) -> None:
    with pytest.raises(ConfigError, match=text):
        LayerPartitioner(*arguments)


def test_wrong_numbers_are_refused() -> None:
    partitioner = LayerPartitioner(3, 2)
    for costs in ([1, 2], [1, -1, 1], [1, float("nan"), 1]):
        with pytest.raises(ConfigError, match="cost"):
            partitioner.set_layer_costs(costs)
    for memory in ([1], [-1, 1], [float("nan"), 1]):
        with pytest.raises(ConfigError, match="memory_mb"):
            partitioner.set_nodes(memory_mb=memory)


@settings(deadline=None, max_examples=120)
@given(
    costs=st.lists(st.integers(1, 20), min_size=1, max_size=9),
    speeds=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    data=st.data(),
)
def test_the_heaviest_stage_is_as_light_as_it_can_be(costs, speeds, data) -> None:
    """Against all contiguous splits over all choices of nodes in order."""
    num_stages = data.draw(st.none() | st.integers(1, min(len(costs), len(speeds))))
    limits = data.draw(
        st.lists(st.integers(1, sum(costs)), min_size=len(speeds), max_size=len(speeds))
    )
    partitioner = LayerPartitioner(len(costs), len(speeds), 1, num_stages)
    partitioner.set_layer_costs(costs)
    partitioner.set_nodes(memory_mb=limits, speeds=speeds)

    def loads(nodes, borders):
        parts = [sum(costs[a:b]) for a, b in pairwise((0, *borders, len(costs)))]
        return [
            part / speeds[node] if part <= limits[node] else float("inf")
            for node, part in zip(nodes, parts, strict=True)
        ]

    counts = [num_stages] if num_stages else range(1, min(len(costs), len(speeds)) + 1)
    best = min(
        max(loads(nodes, borders))
        for count in counts
        for nodes in combinations(range(len(speeds)), count)
        for borders in combinations(range(1, len(costs)), count - 1)
    )
    if best == float("inf"):
        with pytest.raises(PlacementError, match="does not fit"):
            partitioner.partition_balanced()
        return
    assignments = partitioner.partition_balanced()
    held = partitioner.memory_per_node(assignments)
    assert min(sizes(assignments)) >= 1
    assert sum(held.values()) == sum(costs)
    assert all(held[node] <= limits[node] for node in held)
    assert max(held[node] / speeds[node] for node in held) == pytest.approx(best)
