"""Topics, payloads, the outbox and the watch: no broker needed."""

import asyncio
import json
import math

import pytest

from stagemesh.errors import ConfigError, ProtocolError
from stagemesh.telemetry import presence as presence_module
from stagemesh.telemetry.outbox import Outbox, Outgoing
from stagemesh.telemetry.payload import (
    Presence,
    encode_payload,
    parse_presence,
    presence_payload,
)
from stagemesh.telemetry.presence import PresenceWatch
from stagemesh.telemetry.topics import Topics

TOPICS = Topics(cluster="home")


def test_topics_are_those_of_the_documentation() -> None:
    assert TOPICS.node_status("n1") == "stagemesh/home/nodes/n1/status"
    assert TOPICS.node_metrics("n1") == "stagemesh/home/nodes/n1/metrics"
    assert TOPICS.coordinator_status == "stagemesh/home/coordinator/status"
    assert TOPICS.placement("d1") == "stagemesh/home/deployments/d1/placement"
    assert TOPICS.request_events("r1") == "stagemesh/home/requests/r1/events"


@pytest.mark.parametrize("node_id", ["n1", "a b", "../x", "#", "+", "a/status", "n\0", "ü", "%2F"])
def test_any_id_is_one_level_and_comes_back(node_id: str) -> None:
    topic = TOPICS.node_status(node_id)
    assert topic.count("/") == 4
    assert not set("+#\0") & set(topic)
    assert TOPICS.node_id_of(topic) == node_id


@pytest.mark.parametrize(
    "topic",
    [
        "stagemesh/other/nodes/n1/status",
        "stagemesh/home/nodes/n1/metrics",
        "stagemesh/home/nodes//status",
        "stagemesh/home/nodes/a/b/status",
        "stagemesh/home/nodes/status",
    ],
)
def test_other_topics_are_nobodys_status(topic: str) -> None:
    assert TOPICS.node_id_of(topic) is None


@pytest.mark.parametrize("node_id", ["", "x" * 201])
def test_empty_and_endless_ids_are_refused(node_id: str) -> None:
    with pytest.raises(ConfigError, match="node_id"):
        TOPICS.node_status(node_id)


def test_numbers_that_json_lacks_become_null() -> None:
    payload = {"a": math.nan, "b": [math.inf, 1.5], "c": {"d": -math.inf}}
    assert json.loads(encode_payload(payload)) == {"a": None, "b": [None, 1.5], "c": {"d": None}}
    assert encode_payload(None) == b""
    with pytest.raises(TypeError):
        encode_payload({"a": object()})


def test_presence_comes_back_and_details_cannot_forge_it() -> None:
    sent = presence_payload(
        "offline", start_id="s", reason="lost", details={"state": "online", "start_id": "x"}
    )
    assert parse_presence("n1", sent) == Presence(
        node_id="n1", state="offline", start_id="s", reason="lost"
    )


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 9000, "not JSON"),
        (b"[]", "not a JSON object"),
        (b"{}", "state"),
        (b'{"state":["online"]}', "state"),
        (b'{"state":"online","start_id":1}', "start_id"),
        (b'{"state":"online","reason":"' + b"x" * 600 + b'"}', "reason"),
        (b" " * 17_000, "17000 bytes"),
    ],
)
def test_a_wrong_presence_is_refused(payload: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        parse_presence("n1", payload)


def event(number: int) -> Outgoing:
    return Outgoing(topic="t", payload=b"%03d" % number, retain=False)


def state(topic: str, payload: bytes) -> Outgoing:
    return Outgoing(topic=topic, payload=payload, retain=True)


def drain(outbox: Outbox) -> list[bytes]:
    taken = []
    while message := outbox.take():
        taken.append(message.payload)
        outbox.sent(message)
    return taken


def test_the_outbox_drops_the_oldest_by_count_and_by_bytes() -> None:
    by_count = Outbox(max_messages=3, max_bytes=10_000)
    by_bytes = Outbox(max_messages=100, max_bytes=12)  # an event has 4
    for outbox in (by_count, by_bytes):
        for number in range(5):
            outbox.put(event(number))
        assert outbox.dropped_messages == 2
        assert outbox.queued_bytes == 12
        assert drain(outbox) == [b"002", b"003", b"004"]
        assert outbox.queued_bytes == 0
    by_bytes.put(Outgoing(topic="t", payload=b"x" * 50, retain=False))  # can never fit
    assert (len(by_bytes), by_bytes.dropped_messages) == (0, 3)


def test_only_the_latest_state_of_a_topic_is_sent_and_again_when_asked() -> None:
    outbox = Outbox(max_messages=10, max_bytes=10_000)
    outbox.put(event(1))
    for payload in (b"a1", b"a2"):
        outbox.put(state("a", payload))
    outbox.put(state("b", b"b1"))
    assert drain(outbox) == [b"a2", b"b1", b"001"]
    assert drain(outbox) == []
    outbox.resend_retained()
    assert drain(outbox) == [b"a2", b"b1"]  # events are not sent twice


def test_retained_state_has_a_bound_too() -> None:
    outbox = Outbox(max_messages=2, max_bytes=10)
    for topic, payload in (("a", b"1"), ("b", b"1"), ("c", b"1"), ("a", b"x" * 20), ("a", b"22")):
        outbox.put(state(topic, payload))
    assert outbox.dropped_messages == 2  # the third topic, and the state that is too long
    assert drain(outbox) == [b"22", b"1"]


def test_a_cleared_topic_is_forgotten_once_the_broker_knows() -> None:
    outbox = Outbox(max_messages=2, max_bytes=1000)
    outbox.put(state("a", b"1"))
    outbox.put(state("a", b""))
    message = outbox.take()
    assert message is not None
    outbox.give_back(message)  # the connection broke: the topic must still be cleared
    outbox.resend_retained()
    assert drain(outbox) == [b""]
    outbox.resend_retained()
    assert drain(outbox) == []


def test_what_could_not_be_sent_comes_first_again() -> None:
    outbox = Outbox(max_messages=2, max_bytes=1000)
    outbox.put(event(1))
    outbox.put(event(2))
    message = outbox.take()
    assert message is not None
    outbox.give_back(message)
    assert drain(outbox) == [b"001", b"002"]
    outbox.put(state("a", b"old"))
    taken = outbox.take()
    assert taken is not None
    outbox.put(state("a", b"new"))
    outbox.give_back(taken)
    assert drain(outbox) == [b"new"]


async def test_a_waiting_sender_wakes_for_news_and_for_nothing_else() -> None:
    outbox = Outbox(max_messages=2, max_bytes=1000)
    assert outbox.take() is None
    waiting = asyncio.ensure_future(outbox.wait())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    outbox.put(event(1))
    await asyncio.wait_for(waiting, 1)


def test_the_watch_remembers_a_limited_number_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence_module, "MAX_WATCHED_NODES", 2)
    seen: list[str] = []
    watch = PresenceWatch(lambda presence: seen.append(presence.node_id), topics=TOPICS)
    for node_id in ("a", "b", "c", "a"):
        watch.accept(TOPICS.node_status(node_id), presence_payload("online", start_id="s"))
    watch.accept(TOPICS.node_status("a"), presence_payload("online", start_id="t"))
    assert seen == ["a", "b", "a"]
