"""The decision table of a deployment."""

from dataclasses import replace

import pytest

from coordinator.membership import NodeInfo
from coordinator.reconcile import Abandon, Action, DeploymentView, Keep, Phase, Place, Wait, decide


def node(name: str, start: str = "") -> NodeInfo:
    return NodeInfo(node_id=name, address=f"127.0.0.1:{ord(name)}", start_id=start or f"{name}1")


A, B, C = node("a"), node("b"), node("c")
B_AGAIN = node("b", start="b2")

VIEW = DeploymentView(
    phase="waiting",
    nodes=(),
    used={},
    min_nodes=None,
    was_ready=False,
    seconds_since_join=100.0,
    settle_seconds=1.0,
    failed_with=frozenset(),
)
USED = {"a": "a1", "b": "b1"}

CASES = {
    "nobody": (
        {},
        Wait("no node is registered; start node-daemon --coordinator HOST:PORT on a host"),
    ),
    "nobody, although it was ready": (
        {"was_ready": True},
        Wait("no node is registered; start node-daemon --coordinator HOST:PORT on a host"),
    ),
    "too few": ({"nodes": (A,), "min_nodes": 2}, Wait("1 of 2 nodes are registered")),
    "enough": ({"nodes": (A, B), "min_nodes": 2}, Place((A, B))),
    "enough do not wait for more": (
        {"nodes": (A, B), "min_nodes": 2, "seconds_since_join": 0.0},
        Place((A, B)),
    ),
    "more than enough": ({"nodes": (A, B, C), "min_nodes": 2}, Place((A, B, C))),
    "the order is that of the names": ({"nodes": (C, A, B)}, Place((A, B, C))),
    "just joined": (
        {"nodes": (A,), "seconds_since_join": 0.25},
        Wait("1 nodes are registered; waiting a moment for more", seconds=0.75),
    ),
    "settled": ({"nodes": (A,), "seconds_since_join": 1.0}, Place((A,))),
    "profiles are still to come": (
        {
            "nodes": (A, B),
            "min_nodes": 2,
            "seconds_since_join": 1.5,
            "measuring": "b, 2 links",
            "measure_seconds": 10.0,
        },
        Wait("waiting for 10 s at most until these are measured: b, 2 links", seconds=8.5),
    ),
    "profiles did not come in time": (
        {"nodes": (A, B), "measuring": "b, 2 links", "measure_seconds": 10.0},
        Place((A, B)),
    ),
    "a lost node's stages do not wait for profiles": (
        {
            "nodes": (A,),
            "seconds_since_join": 0.0,
            "was_ready": True,
            "measuring": "b, 2 links",
            "measure_seconds": 10.0,
        },
        Place((A,)),
    ),
    "too few after it was ready": (
        {"nodes": (A,), "min_nodes": 2, "was_ready": True},
        Place((A,)),
    ),
    "no pause after it was ready": (
        {"nodes": (A,), "seconds_since_join": 0.0, "was_ready": True},
        Place((A,)),
    ),
    "loading": ({"phase": "loading", "nodes": (A, B), "used": USED}, Keep()),
    "ready": ({"phase": "ready", "nodes": (A, B), "used": USED}, Keep()),
    "ready, and one more joins": ({"phase": "ready", "nodes": (A, B, C), "used": USED}, Keep()),
    "ready, and an unused one leaves": (
        {"phase": "ready", "nodes": (A, B), "used": {"a": "a1"}},
        Keep(),
    ),
    "lost while loading": (
        {"phase": "loading", "nodes": (A,), "used": USED},
        Abandon("node b is gone"),
    ),
    "lost while ready": (
        {"phase": "ready", "nodes": (A, C), "used": USED},
        Abandon("node b is gone"),
    ),
    "both lost": ({"phase": "ready", "used": USED}, Abandon("node a, b is gone")),
    "came back as another start": (
        {"phase": "ready", "nodes": (A, B_AGAIN), "used": USED},
        Abandon("node b is gone"),
    ),
    "failed with the same nodes": (
        {"phase": "failed", "nodes": (A, B), "failed_with": frozenset({"a1", "b1"})},
        Keep(),
    ),
    "failed, and one more joins": (
        {"phase": "failed", "nodes": (A, B, C), "failed_with": frozenset({"a1", "b1"})},
        Place((A, B, C)),
    ),
    "failed, and one leaves": (
        {"phase": "failed", "nodes": (A,), "failed_with": frozenset({"a1", "b1"})},
        Place((A,)),
    ),
    "failed, and one starts anew": (
        {"phase": "failed", "nodes": (A, B_AGAIN), "failed_with": frozenset({"a1", "b1"})},
        Place((A, B_AGAIN)),
    ),
    "failed, and all leave": (
        {"phase": "failed", "failed_with": frozenset({"a1"})},
        Wait("no node is registered; start node-daemon --coordinator HOST:PORT on a host"),
    ),
}


@pytest.mark.parametrize(("changes", "action"), CASES.values(), ids=CASES)
def test_decision(changes: dict, action: Action) -> None:
    assert decide(replace(VIEW, **changes)) == action


@pytest.mark.parametrize("phase", ["waiting", "loading", "ready", "failed"])
def test_a_lost_node_of_the_plan_outweighs_everything(phase: Phase) -> None:
    view = replace(VIEW, phase=phase, nodes=(A,), used=USED, failed_with=frozenset({"a1"}))
    assert decide(view) == Abandon("node b is gone")
    # And with the node there, none of the phases abandons.
    assert not isinstance(decide(replace(view, nodes=(A, B))), Abandon)
