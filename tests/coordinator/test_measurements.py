"""What is kept of measurements, what counts as missing, and what the planner gets of them."""

from dataclasses import replace

import pytest

from coordinator import measuring
from coordinator.like_nodes import level_like_nodes
from coordinator.measurements import (
    MAX_PEERS,
    SERVING_BYTES,
    UNKNOWN_LINK,
    MeasuredNode,
    Measurements,
    planner_node,
    typical_link,
)
from coordinator.measuring import Measurer, disjoint
from coordinator.membership import NodeInfo
from coordinator.planner.profiles import COORDINATOR, LinkProfile, NodeProfile
from coordinator.profile_messages import (
    cluster_link,
    cluster_profile,
    link_profile,
    measured_node,
    node_profile,
)
from stagemesh.errors import ProtocolError
from stagemesh.rpc.v1 import node_pb2

FAST = MeasuredNode(
    stream_bytes_per_second={"float32": 10e9, "bfloat16": 12e9},
    flops_per_second={"float32": 100e9, "bfloat16": 200e9},
    layer_overhead_seconds=3e-4,
    step_overhead_seconds=5e-4,
    memory_total_bytes=16 * 2**30,
    memory_free_bytes=8 * 2**30,
    memory_limit_bytes=0,
    process_bytes=500 * 2**20,
    measure_seconds=1.5,
    measured_at=1000.0,
)
SLOW = replace(
    FAST, stream_bytes_per_second={"float32": 4e9}, flops_per_second={"float32": 50e9},
    layer_overhead_seconds=9e-4, process_bytes=600 * 2**20,
)  # fmt: skip
LINK = LinkProfile(latency_seconds=1e-4, bytes_per_second=1e9)


def node(name: str, *, start: str = "1", memory: int = 2**30) -> NodeInfo:
    return NodeInfo(node_id=name, address=f"{name}:1", start_id=start, memory_bytes=memory)


A, B, C = node("a"), node("b"), node("c")


def test_a_profile_belongs_to_one_start() -> None:
    measurements = Measurements()
    assert measurements.put_node("a", start_id="1", measured=FAST)
    assert not measurements.put_node("a", start_id="1", measured=FAST)
    assert measurements.node(A) == FAST
    assert measurements.node(node("a", start="2")) is None
    assert measurements.node(B) is None


def test_a_link_belongs_to_two_starts_and_counts_both_ways() -> None:
    measurements = Measurements()
    measurements.put_link(A, B, LINK)
    measurements.put_link(None, A, LINK)
    assert measurements.link(A, B) == measurements.link(B, A) == LINK
    assert measurements.link(None, A) == LINK
    assert measurements.link(A, node("b", start="2")) is None
    assert measurements.missing_links([A, B]) == [(None, B)]
    measurements.forget_links([B])
    assert measurements.missing_links([A, B]) == [(None, B), (A, B)]


def test_few_links_are_measured_where_there_are_many_nodes() -> None:
    nodes = [node(f"n{i}") for i in range(100)]
    missing = Measurements().missing_links(nodes)
    assert len(missing) < 100 * (MAX_PEERS + 1)
    assert {target.node_id for source, target in missing if source is None} == {
        n.node_id for n in nodes
    }


def test_probes_at_one_time_have_no_node_in_common() -> None:
    pairs = Measurements().missing_links([A, B, C, node("d")])
    seen = []
    while pairs:
        chosen = disjoint(pairs)
        ends = [end.node_id if end else "" for pair in chosen for end in pair]
        assert len(ends) == len(set(ends))
        seen += chosen
        pairs = [pair for pair in pairs if pair not in chosen]
    assert len(seen) == 4 + 6


def test_probes_at_one_time_have_no_machine_in_common() -> None:
    a, b, c, d = (
        replace(each, machine_id=machine)
        for each, machine in zip((A, B, C, node("d")), ("m", "m", "n", ""), strict=True)
    )
    assert disjoint([(a, b), (None, b), (None, c), (c, d)]) == [(a, b), (None, c)]
    assert disjoint([(a, c), (b, d), (None, d)]) == [(a, c), (None, d)]


def test_links_of_a_machine_wait_while_one_of_its_nodes_measures_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b, c = (
        replace(each, machine_id=machine, will_measure=True)
        for each, machine in zip((A, B, C), ("m", "m", "n"), strict=True)
    )
    measurements = Measurements()
    measurer = Measurer(measurements, nodes=lambda: [a, b, c], token=None, on_change=lambda: None)
    assert measurer.pending() == "a, b, c"
    for name in ("a", "c"):
        measurements.put_node(name, start_id="1", measured=FAST)
    # The coordinator's own to the other machine is all that disturbs nobody.
    assert measurer.pending() == "b, 1 link"
    # A node that never tells what it measured does not hold the others up for ever.
    with monkeypatch.context() as patched:
        patched.setattr(measuring, "_NODE_SECONDS", 0.0)
        assert measurer.pending() == "b, 3 links"
    measurements.put_node("b", start_id="1", measured=FAST)
    assert measurer.pending() == "6 links"


def test_the_planner_gets_what_is_known_and_the_worst_for_what_is_not() -> None:
    measurements = Measurements()
    assert measurements.cluster_profile([A, B]) is None
    measurements.put_node("a", start_id="1", measured=FAST)
    measurements.put_node("b", start_id="1", measured=SLOW)
    measurements.put_link(A, B, LINK)
    measurements.put_link(None, B, LinkProfile(latency_seconds=3e-4, bytes_per_second=3e9))
    profile = measurements.cluster_profile([A, B, C])
    assert profile is not None
    fast, slow, unknown = profile.nodes
    assert fast.stream_bytes_per_second["float32"] == 10e9
    assert unknown.stream_bytes_per_second == {"float32": 4e9}
    assert unknown.layer_overhead_seconds == slow.layer_overhead_seconds == 9e-4
    assert profile.link("a", "b") == profile.link("b", "a") == LINK
    assert profile.link(COORDINATOR, "b").latency_seconds == 3e-4
    assert profile.link("a", "c").latency_seconds == pytest.approx(2e-4)
    assert typical_link([]) == UNKNOWN_LINK


def test_sums_that_were_not_measured_count_as_the_typical_ones() -> None:
    summed = replace(LINK, sum_seconds=4e-5, sum_bytes_per_second=2e9)
    slower = replace(LINK, sum_seconds=6e-5, sum_bytes_per_second=4e9)
    typical = typical_link([summed, LINK, slower])
    assert typical.sum_seconds == pytest.approx(5e-5)
    assert typical.sum_bytes_per_second == pytest.approx(3e9)
    assert (summed.sum_latency, summed.sum_rate) == (4e-5, 2e9)
    # Negative control: where nobody has added up, a sum is as slow as its message.
    unknown = typical_link([LINK, LINK])
    assert unknown.sum_seconds is None
    assert (unknown.sum_latency, unknown.sum_rate) == (1e-4, 1e9)


def test_nodes_that_measure_nearly_the_same_count_as_equal() -> None:
    def named(name: str, factor: float, **changes) -> NodeProfile:
        rates = {dtype: rate * factor for dtype, rate in FAST.stream_bytes_per_second.items()}
        measured = replace(FAST, stream_bytes_per_second=rates)
        return replace(planner_node(node(name, memory=2**29), measured), **changes)

    nodes = [
        named("a", 1.0),
        named("b", 1.1),
        named("c", 1.05, num_threads=2),
        named("d", 2.0),
        named("e", 1.04, device="cpu:0", layer_overhead_seconds=3.3e-4),
        named("f", 1.0, layer_overhead_seconds=9e-4),
    ]
    levelled = level_like_nodes(nodes)
    assert [n.node_id for n in levelled] == list("abcdef")
    a, b, c, d, e, f = levelled
    same = a.stream_bytes_per_second
    assert same == b.stream_bytes_per_second == e.stream_bytes_per_second
    assert same["float32"] == pytest.approx(1.04 * 10e9)
    assert a.layer_overhead_seconds == e.layer_overhead_seconds == 3e-4
    # Another number of threads, another speed, another overhead: as they were measured.
    assert (c, d, f) == (nodes[2], nodes[3], nodes[5])
    assert level_like_nodes([]) == ()


def test_the_process_comes_on_top_of_what_a_node_offers() -> None:
    planned = planner_node(A, FAST)
    assert planned.process_overhead_bytes == 500 * 2**20 + SERVING_BYTES
    assert planned.memory_bytes - planned.process_overhead_bytes == A.memory_bytes


def test_profiles_travel_and_come_back() -> None:
    assert measured_node(node_profile(FAST)) == FAST
    status = [
        node_pb2.NodeStatus(
            description=node_pb2.NodeDescription(
                node_id=name, memory_bytes=2**30, machine_id="m", num_cores=4, num_threads=2
            ),
            profile=node_profile(FAST) if name == "a" else None,
        )
        for name in ("a", "b")
    ]
    summed = replace(LINK, sum_seconds=4e-5, sum_bytes_per_second=2e9, sum_slowdown=1.25)
    assert link_profile(cluster_link("a", "b", LINK).link) == LINK
    profile = cluster_profile(status, [cluster_link("a", "b", summed)])
    assert profile is not None
    assert [n.node_id for n in profile.nodes] == ["a", "b"]
    assert profile.link("b", "a") == summed
    assert {(n.machine_id, n.num_cores, n.num_threads) for n in profile.nodes} == {("m", 4, 2)}
    assert cluster_profile(status[1:], []) is None


@pytest.mark.parametrize("figure", [float("nan"), float("inf"), -1.0])
def test_figures_that_are_no_measurements_are_refused(figure: float) -> None:
    message = node_profile(replace(FAST, layer_overhead_seconds=figure))
    with pytest.raises(ProtocolError, match="no measurements"):
        measured_node(message)
