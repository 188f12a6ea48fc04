"""Membership: every sign of life or death, and the events that follow."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.membership import (
    MembershipEvent,
    NodeInfo,
    NodeJoined,
    NodeLeft,
    NodeLost,
    fold,
)
from coordinator.registry import Registry
from stagemesh.errors import ConfigError, NotReady

LIMIT = 10.0


def make_info(node_id: str = "a", *, start_id: str = "s1", address: str = "") -> NodeInfo:
    return NodeInfo(
        node_id=node_id,
        address=address or f"10.0.0.1:{ord(node_id[0])}",
        start_id=start_id,
        memory_bytes=2**30,
    )


def names(events: list[MembershipEvent]) -> list[str]:
    """Events as short text: what, who and why."""
    texts = []
    for event in events:
        match event:
            case NodeJoined(info=info):
                texts.append(f"joined {info.node_id} {info.start_id}")
            case NodeLost(node_id=node_id, start_id=start_id, reason=reason):
                texts.append(f"lost {node_id} {start_id}: {reason}")
            case NodeLeft(node_id=node_id, start_id=start_id):
                texts.append(f"left {node_id} {start_id}")
    return texts


def ready_ids(registry: Registry) -> list[str]:
    return [info.node_id for info in registry.ready_nodes()]


def test_join_leave_and_join_again():
    registry = Registry()
    assert names(registry.join(make_info(), now=0)) == ["joined a s1"]
    assert names(registry.join(make_info("b"), now=1)) == ["joined b s1"]
    assert names(registry.leave("a", start_id="s1", now=2)) == ["left a s1"]
    assert registry.stream_closed("s1x", now=3) == []
    assert ready_ids(registry) == ["b"]
    assert names(registry.join(make_info(start_id="s2"), now=4)) == ["joined a s2"]
    assert ready_ids(registry) == ["a", "b"], "a node that comes back keeps its place"


def test_new_start_replaces_the_old_one_and_reports_it_lost():
    registry = Registry()
    registry.join(make_info(), now=0)
    events = registry.join(make_info(start_id="s2"), now=1)
    assert names(events) == ["lost a s1: replaced", "joined a s2"]
    # Late signs of the old start do not touch the new one.
    assert registry.stream_closed("s1", now=2) == []
    assert registry.leave("a", start_id="s1", now=2) == []
    registry.presence_offline("a", start_id="s1", now=2)
    assert registry.expire(now=LIMIT, limit_seconds=LIMIT) == []
    with pytest.raises(NotReady, match="s1"):
        registry.beat("a", start_id="s1", now=2)
    assert ready_ids(registry) == ["a"]


def test_same_start_reconnects_without_an_event_whatever_stream_ends_first():
    registry = Registry()
    registry.join(make_info(), now=0)
    assert registry.join(make_info(), now=5) == []
    assert registry.stream_closed("s1", now=6) == [], "the old stream's end, noticed late"
    assert ready_ids(registry) == ["a"]
    assert names(registry.stream_closed("s1", now=7)) == ["lost a s1: stream closed"]
    assert registry.stream_closed("s1", now=8) == []
    assert names(registry.join(make_info(), now=9)) == ["joined a s1"]


def test_a_reconnect_with_other_facts_is_an_event():
    registry = Registry()
    registry.join(make_info(), now=0)
    changed = replace(make_info(), memory_bytes=2**31)
    assert registry.join(changed, now=1) == [NodeJoined(info=changed, at_seconds=1)]
    assert registry.ready_nodes() == (changed,)


@pytest.mark.parametrize("start_id", ["s1", "s2"])
def test_name_on_two_addresses_is_refused_naming_both(start_id):
    registry = Registry()
    registry.join(make_info(address="10.0.0.1:1"), now=0)
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1:1 .* 10\.0\.0\.2:1"):
        registry.join(make_info(address="10.0.0.2:1", start_id=start_id), now=1)
    assert [info.address for info in registry.ready_nodes()] == ["10.0.0.1:1"]
    # Once the first is gone the name is free: a daemon restarted on another port.
    registry.stream_closed("s1", now=2)
    assert names(registry.join(make_info(address="10.0.0.2:1", start_id="s2"), now=3)) == [
        "joined a s2"
    ]


@pytest.mark.parametrize("field", ["node_id", "start_id", "address"])
def test_join_without_identity_is_refused(field):
    with pytest.raises(ConfigError):
        Registry().join(replace(make_info(), **{field: ""}), now=0)


def test_silence_beyond_the_limit_and_not_at_it():
    registry = Registry()
    registry.join(make_info(), now=0)
    registry.join(make_info("b", start_id="t1"), now=0)
    registry.beat("b", start_id="t1", now=5)
    assert registry.expire(now=LIMIT, limit_seconds=LIMIT) == []
    events = registry.expire(now=LIMIT + 0.1, limit_seconds=LIMIT)
    assert names(events) == ["lost a s1: silence"]
    assert "10.1 s (limit 10 s)" in events[0].detail
    assert registry.expire(now=LIMIT + 0.2, limit_seconds=LIMIT) == [], "reported once"
    assert ready_ids(registry) == ["b"]
    with pytest.raises(NotReady, match="lost"):
        registry.beat("a", start_id="s1", now=11)


def test_a_slow_but_beating_node_never_leaves():
    registry = Registry()
    registry.join(make_info(), now=0)
    for beat in range(1, 200):
        now = beat * LIMIT
        assert registry.expire(now=now, limit_seconds=LIMIT) == []
        registry.beat("a", start_id="s1", now=now)
    assert names(list(registry.history)) == ["joined a s1"]


def test_a_will_counts_unless_a_beat_contradicts_it():
    registry = Registry()
    registry.join(make_info(), now=0)
    registry.join(make_info("b", start_id="t1"), now=0)
    for node_id, start_id in (("a", "s1"), ("b", "t1")):
        registry.beat(node_id, start_id=start_id, now=2)
        registry.presence_offline(node_id, start_id=start_id, now=3)
    assert registry.expire(now=3.5, limit_seconds=LIMIT) == [], "a will alone ends nothing at once"
    registry.beat("b", start_id="t1", now=4)
    events = registry.expire(now=8.5, limit_seconds=LIMIT)
    assert names(events) == ["lost a s1: presence"], "sooner than silence alone would tell"
    assert ready_ids(registry) == ["b"]


def test_last_beat_is_known_while_ready():
    registry = Registry()
    registry.join(make_info(), now=1)
    registry.beat("a", start_id="s1", now=4)
    assert registry.last_beat("a") == 4
    registry.leave("a", start_id="s1", now=5)
    assert registry.last_beat("a") is None


def test_beat_of_a_stranger_asks_it_to_join():
    with pytest.raises(NotReady, match="never joined"):
        Registry().beat("x", start_id="s", now=0)


def test_history_and_departed_nodes_are_bounded():
    registry = Registry(max_history=5, max_departed=3)
    for i in range(20):
        registry.join(NodeInfo(node_id=f"n{i}", address=f"h:{i}", start_id=f"s{i}"), now=i)
        registry.leave(f"n{i}", start_id=f"s{i}", now=i + 0.5)
    assert [event.at_seconds for event in registry.history] == [17.5, 18, 18.5, 19, 19.5]
    assert [member.info.node_id for member in registry.members] == ["n17", "n18", "n19"]


calls = st.tuples(
    st.sampled_from(["join", "beat", "leave", "close", "will", "expire"]),
    st.sampled_from(["a", "b"]),
    st.sampled_from(["1", "2"]),
    st.floats(0, 6),
)


def run_calls(registry: Registry, sequence: list[tuple[str, str, str, float]]) -> list:
    """Make the calls; returns all events that they returned."""
    now, events = 0.0, []
    for call, node_id, start, pause in sequence:
        now += pause
        start_id = node_id + start
        match call:
            case "join":
                events += registry.join(make_info(node_id, start_id=start_id), now=now)
            case "beat":
                try:
                    registry.beat(node_id, start_id=start_id, now=now)
                except NotReady:
                    assert registry.last_beat(node_id) is None or start_id not in {
                        info.start_id for info in registry.ready_nodes()
                    }
            case "leave":
                events += registry.leave(node_id, start_id=start_id, now=now)
            case "close":
                events += registry.stream_closed(start_id, now=now)
            case "will":
                registry.presence_offline(node_id, start_id=start_id, now=now)
            case "expire":
                events += registry.expire(now=now, limit_seconds=LIMIT)
    return events


@given(st.lists(calls, max_size=40))
def test_the_table_is_the_fold_of_the_events(sequence):
    registry = Registry()
    events = run_calls(registry, sequence)
    assert list(registry.history) == events
    assert registry.members == tuple(fold(events).values())
    # Per node: joined and gone alternate, so a controller never sees a second death of one start.
    for node_id in ("a", "b"):
        own = [e for e in events if e.node_id == node_id]
        assert [isinstance(e, NodeJoined) for e in own] == [i % 2 == 0 for i in range(len(own))]


def test_negative_control_a_fold_that_misses_an_event_differs():
    registry = Registry()
    events = run_calls(registry, [("join", "a", "1", 0.0), ("leave", "a", "1", 1.0)])
    assert registry.members != tuple(fold(events[:-1]).values())
