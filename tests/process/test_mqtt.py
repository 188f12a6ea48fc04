"""`coordinator up --mqtt` and a broker, with a node that is killed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.asking import endless_model, until
from tests.process.children import Children, descendants
from tests.telemetry.broker import MOSQUITTO, Broker, observe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

BASE = "stagemesh/default"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    if MOSQUITTO is None:
        pytest.skip("mosquitto is not installed (Debian: apt-get install mosquitto)")
    (tmp_path / "broker").mkdir()
    started = Broker(tmp_path / "broker")
    started.start()
    yield started
    started.stop()


async def test_the_broker_hears_of_a_killed_node(
    tmp_path: Path, broker: Broker, processes: Children
) -> None:
    async with observe(broker.port) as observer:

        def last(topic: str) -> dict[str, Any]:
            return (observer.payloads(f"{BASE}/{topic}") or [{}])[-1]

        up = processes.start(
            "coordinator",
            *("up", "--nodes", "2", "--model", str(endless_model(tmp_path)), "--json"),
            *("--threads", "1", "--memory", "1GiB", "--device", "cpu"),
            *("--port", "0", "--rpc-bind", "127.0.0.1:0"),
            *("--mqtt", broker.url.replace("mqtt://", "mqtt://user:a-secret@")),
        )
        await up.next_event("listening")
        for topic in ("nodes/node-1/status", "nodes/node-2/status", "coordinator/status"):
            await until(lambda topic=topic: last(topic).get("state") == "online")  # type: ignore[misc]
        await until(lambda: last("deployments/model/placement").get("state") == "ready")

        nodes = {p.cmdline()[p.cmdline().index("--node-id") + 1]: p for p in descendants(up.pid)}
        # What every user of the host may read.
        assert not any("a-secret" in word for p in nodes.values() for word in p.cmdline())
        start_id = last("nodes/node-2/status")["start_id"]
        nodes["node-2"].kill()
        await until(lambda: last("nodes/node-2/status").get("state") == "offline")
        assert last("nodes/node-2/status") == {
            "state": "offline",
            "start_id": start_id,
            "reason": "lost",
        }
        await until(lambda: len(last("deployments/model/placement").get("stages", [])) == 1)
