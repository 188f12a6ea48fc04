"""A cluster and a real broker: what is published, and that the broker never matters."""

import asyncio
import json
import re
import time
from pathlib import Path
from typing import Any

import aiomqtt
import pytest

from coordinator.registry import Registry
from stagemesh.telemetry.payload import presence_payload
from stagemesh.version import SOFTWARE_VERSION
from tests.cluster.asking import (
    ask,
    assert_answers,
    endless_model,
    expected_text,
    stream_to_end,
    until,
    until_health,
)
from tests.support.cluster import FAST_LIMITS, start_cluster
from tests.telemetry.broker import Broker, Observer, observe, retained

DOCS = Path(__file__).resolve().parents[2] / "docs" / "mqtt.md"
BASE = "stagemesh/default"
NODE_1 = f"{BASE}/nodes/node-1/status"
NODE_2 = f"{BASE}/nodes/node-2/status"
PLACEMENT = f"{BASE}/deployments/model/placement"
METRICS_SECONDS = 0.2


def documented(section: str) -> list[dict[str, Any]]:
    """The example payloads of a section of docs/mqtt.md."""
    text = DOCS.read_text().split(f"### {section}\n", 1)[1].split("\n#", 1)[0]
    blocks = re.findall(r"(?:^    .*\n)+", text, flags=re.MULTILINE)
    decoder, found = json.JSONDecoder(), []
    for block in blocks:
        rest = re.sub(r",\s*\.\.\.", "", block).strip()
        while rest:
            payload, end = decoder.raw_decode(rest)
            found.append(payload)
            rest = rest[end:].strip()
    assert found, section
    return found


def shape(payload: Any) -> Any:
    """Keys and kinds of values, lists by their first item."""
    if isinstance(payload, dict):
        return {key: shape(value) for key, value in payload.items()}
    if isinstance(payload, list):
        return [shape(item) for item in payload[:1]]
    return "number" if isinstance(payload, int | float) else type(payload).__name__


def states(registry: Registry) -> dict[str, str]:
    """State by node; the registry lists them in the order of their joins, which is either."""
    return {member.info.node_id: member.state for member in registry.members}


async def test_payloads_are_the_documented_ones(tmp_path: Path, broker: Broker) -> None:
    settings = {"metrics_seconds": METRICS_SECONDS}
    async with (
        observe(broker.port) as observer,
        start_cluster(
            endless_model(tmp_path), mqtt_url=broker.url, node_settings=settings
        ) as cluster,
        cluster.http() as client,
    ):
        answer = (await ask(client)).json()
        request_topic = f"{BASE}/requests/{answer['id']}/events"
        metrics_topic = f"{BASE}/nodes/node-2/metrics"
        await until(lambda: len(observer.payloads(request_topic)) == 2)
        await until(lambda: any(p["stages"] for p in observer.payloads(metrics_topic)))
        await until(lambda: observer.payloads(NODE_1) and observer.payloads(NODE_2))

        started, finished = observer.payloads(request_topic)
        (example,) = documented("Request events")
        assert shape(started) == shape(finished) == shape(example)
        assert started["event"] == "started"
        assert finished | {"time": 0} == {
            "event": "finished",
            "time": 0,
            "model": "model",
            "prompt_tokens": 1,
            "completion_tokens": 8,
            "detail": "length",
        }

        metrics = [p for p in observer.payloads(metrics_topic) if p["stages"]][-1]
        (example,) = documented("Metrics")
        assert shape(metrics) == shape(example)
        assert metrics["stages"][0]["stage"] == 1
        assert metrics["stages"][0]["weight_bytes"] > 0
        assert metrics["rss_bytes"] > 2**20
        assert time.time() - metrics["time"] < 10

        placement = await retained(broker.port, PLACEMENT)
        (example,) = documented("Placement")
        assert shape(placement) == shape(example)
        assert placement["state"] == "ready"
        plan = cluster.deployment.plan
        assert plan is not None
        assert [
            (s["stage"], s["node_id"], s["start_layer"], s["end_layer"], s["num_ranks"])
            for s in placement["stages"]
        ] == [(s.stage, s.node_id, s.start_layer, s.end_layer, 1) for s in plan.stages]
        states = [p["state"] for p in observer.payloads(PLACEMENT)]
        assert states[-2:] == ["loading", "ready"]

        status = await retained(broker.port, NODE_2)
        registered = {m.info.node_id: m.info for m in cluster.coordinator.cluster.registry.members}
        assert status == {
            "state": "online",
            "start_id": registered["node-2"].start_id,
            "version": SOFTWARE_VERSION,
            "address": registered["node-2"].address,
        }
        head = await retained(broker.port, f"{BASE}/coordinator/status")
        assert head | {"start_id": ""} == {
            "state": "online",
            "start_id": "",
            "version": SOFTWARE_VERSION,
        }
    # Everything was stopped: each has said so itself, and the placement says that nothing runs.
    (online, offline) = documented("Status")
    assert offline["reason"] == "stopped"
    for topic in (NODE_1, NODE_2, f"{BASE}/coordinator/status"):
        last = await retained(broker.port, topic)
        assert shape(last) == shape(offline)
        assert (last["state"], last["reason"]) == ("offline", "stopped")
    assert (await retained(broker.port, PLACEMENT))["state"] == "waiting"
    assert online["state"] == "online"


def statuses(observer: Observer, topic: str) -> list[tuple[str, str]]:
    return [(p["state"], p.get("reason", "")) for p in observer.payloads(topic)]


def last_status(observer: Observer, topic: str) -> tuple[str, str]:
    return (statuses(observer, topic) or [("", "")])[-1]


async def test_a_node_that_fails_leaves_its_will_and_one_that_stops_its_word(
    tmp_path: Path, broker: Broker
) -> None:
    model = endless_model(tmp_path)
    async with (
        observe(broker.port) as observer,
        start_cluster(model, mqtt_url=broker.url) as cluster,
        cluster.http() as client,
    ):
        await until(lambda: observer.payloads(NODE_1) and observer.payloads(NODE_2))
        await cluster.nodes["node-1"].stop()
        await until(lambda: last_status(observer, NODE_1) == ("offline", "stopped"))
        await until_health(client, 200)

        # The broker ends the session of a client whose id connects again.
        async with aiomqtt.Client("127.0.0.1", broker.port, identifier="stagemesh-default-node-2"):
            pass
        await until(lambda: ("offline", "lost") in statuses(observer, NODE_2))
        # It was only the connection to the broker: the node connects anew and goes on.
        await until(lambda: last_status(observer, NODE_2) == ("online", ""))
        await asyncio.sleep(FAST_LIMITS.silence_seconds * 0.75)
        registry = cluster.coordinator.cluster.registry
        assert states(registry) == {"node-1": "left", "node-2": "ready"}
        await assert_answers(client)


async def test_a_will_shortens_the_wait_for_a_silent_node(tmp_path: Path, broker: Broker) -> None:
    """The node falls silent and its will says why: it is lost before the limit of silence."""
    async with start_cluster(endless_model(tmp_path), mqtt_url=broker.url) as cluster:
        registry = cluster.coordinator.cluster.registry
        start_id = {m.info.node_id: m.info.start_id for m in registry.members}["node-2"]
        beat = registry.beat
        registry.beat = (  # type: ignore[method-assign]
            lambda node_id, **sign: None if node_id == "node-2" else beat(node_id, **sign)
        )
        silent_since = time.monotonic()
        async with aiomqtt.Client("127.0.0.1", broker.port) as client:
            for known in ("of-an-earlier-start", start_id):
                will = presence_payload("offline", start_id=known, reason="lost")
                await client.publish(NODE_2, will, qos=1, retain=True)
        await until(lambda: states(registry) == {"node-1": "ready", "node-2": "lost"})
        assert time.monotonic() - silent_since < FAST_LIMITS.silence_seconds
        (lost,) = [e for e in registry.history if type(e).__name__ == "NodeLost"]
        assert lost.reason == "presence"
        registry.beat = beat  # type: ignore[method-assign]


async def test_no_broker_at_the_start_disturbs_nothing(
    tmp_path: Path, stopped_broker: Broker
) -> None:
    stopped_broker.start()
    stopped_broker.stop()
    model = endless_model(tmp_path)
    async with (
        start_cluster(model, mqtt_url=stopped_broker.url) as cluster,
        cluster.http() as client,
    ):
        await assert_answers(client)
        stopped_broker.start()
        async with observe(stopped_broker.port) as observer:
            await until(lambda: observer.payloads(NODE_1) and observer.payloads(NODE_2))
            # The latest state, though it was published while there was no broker.
            await until(lambda: [p["state"] for p in observer.payloads(PLACEMENT)] == ["ready"])
        await assert_answers(client)


@pytest.mark.parametrize("how", ["kill", pytest.param("stop", marks=pytest.mark.slow)])
async def test_a_broker_that_goes_and_comes_back_disturbs_no_answer(
    tmp_path: Path, broker: Broker, how: str
) -> None:
    async with (
        start_cluster(endless_model(tmp_path), mqtt_url=broker.url) as cluster,
        cluster.http() as client,
    ):
        bus = cluster.coordinator.telemetry.bus
        assert bus is not None
        assert await bus.wait_connected(5)
        runtime = cluster.deployment.runtime
        assert runtime is not None
        answer = asyncio.create_task(stream_to_end(client, 400))
        await until(lambda: runtime.stats.num_tokens > 50)
        getattr(broker, how)()
        await until(lambda: not bus.is_connected)
        broker.start()
        assert not answer.done()
        text, error = await answer
        assert error is None
        assert text == expected_text(400)
        registry = cluster.coordinator.cluster.registry
        assert [m.state for m in registry.members] == ["ready", "ready"]
        assert await bus.wait_connected(10)
        async with observe(broker.port) as observer:
            await until(
                lambda: (
                    last_status(observer, NODE_1) == ("online", "")
                    and last_status(observer, NODE_2) == ("online", "")
                    and observer.payloads(PLACEMENT)
                )
            )
        await assert_answers(client)
