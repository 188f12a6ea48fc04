"""Presence against a real broker: who is seen as there, who as gone, and by whose word."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import aiomqtt
import pytest

from stagemesh.errors import ConfigError
from stagemesh.telemetry.config import MqttLimits
from stagemesh.telemetry.payload import Presence
from stagemesh.telemetry.publisher import MqttTelemetry
from tests.telemetry.broker import Broker, observe, retained, running, until

KEEPALIVE_SECONDS = 3
STATUS = "stagemesh/default/nodes/n1/status"
LIMITS = MqttLimits(
    keepalive_seconds=KEEPALIVE_SECONDS, min_backoff_seconds=0.05, max_backoff_seconds=0.2
)


def make(url: str, *, start_id: str = "s1", limits: MqttLimits = LIMITS) -> MqttTelemetry:
    return MqttTelemetry(
        url,
        client_id="stagemesh-n1",
        node_id="n1",
        start_id=start_id,
        details={"version": "0.1.0"},
        limits=limits,
    )


@contextmanager
def child(url: str, start_id: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.telemetry.child", url, "n1", start_id, str(KEEPALIVE_SECONDS)]
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait(timeout=5)


async def test_online_is_retained_with_its_details(broker: Broker) -> None:
    async with running(make(broker.url)):
        await until_retained(broker, "online", "s1")
        assert (await retained(broker.port, STATUS))["version"] == "0.1.0"


async def test_clean_stop_gives_one_offline_of_our_own_and_no_will(broker: Broker) -> None:
    telemetry = make(broker.url)
    async with observe(broker.port) as observer:
        async with running(telemetry):
            assert await telemetry.wait_connected(5)
        await asyncio.sleep(0.3)  # a will would come now
        assert observer.states(STATUS) == [("online", "s1", ""), ("offline", "s1", "stopped")]
    assert (await retained(broker.port, STATUS))["state"] == "offline"


async def test_cancellation_is_a_clean_stop_too(broker: Broker) -> None:
    telemetry = make(broker.url)
    async with observe(broker.port) as observer:
        task = asyncio.create_task(telemetry.run())
        assert await telemetry.wait_connected(5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: len(observer.states(STATUS)) == 2)
        assert observer.states(STATUS)[1] == ("offline", "s1", "stopped")


async def test_a_client_that_only_disconnects_stays_online(broker: Broker) -> None:
    """Negative control: DISCONNECT alone drops the will, so the offline above is our own doing."""
    async with observe(broker.port) as observer:
        will = aiomqtt.Will(STATUS, b'{"state":"offline","start_id":"s1"}', qos=1, retain=True)
        async with aiomqtt.Client("127.0.0.1", broker.port, will=will) as client:
            await client.publish(STATUS, b'{"state":"online","start_id":"s1"}', qos=1, retain=True)
        await asyncio.sleep(0.3)
        assert observer.states(STATUS) == [("online", "s1", "")]


async def test_killed_restarted_and_killed_again(broker: Broker) -> None:
    async with observe(broker.port) as observer:
        for start_id in ("first", "second"):
            with child(broker.url, start_id) as process:
                await until_retained(broker, "online", start_id)
                killed_at = time.monotonic()
                process.kill()
                await until(
                    lambda wanted=start_id: ("offline", wanted, "lost") in observer.states(STATUS)
                )
                assert time.monotonic() - killed_at < 1.5 * KEEPALIVE_SECONDS
            assert (await retained(broker.port, STATUS))["state"] == "offline"
        assert observer.states(STATUS) == [
            ("online", "first", ""),
            ("offline", "first", "lost"),
            ("online", "second", ""),
            ("offline", "second", "lost"),
        ]


@pytest.mark.slow
async def test_a_hung_process_is_offline_and_comes_back(broker: Broker) -> None:
    """No TCP end is seen here: only the keepalive tells. mosquitto looks once a second or so."""
    async with observe(broker.port) as observer:
        with child(broker.url, "s1") as process:
            await until_retained(broker, "online", "s1")
            stopped_at = time.monotonic()
            os.kill(process.pid, signal.SIGSTOP)
            await until(lambda: ("offline", "s1", "lost") in observer.states(STATUS), seconds=10)
            assert time.monotonic() - stopped_at < 1.5 * KEEPALIVE_SECONDS + 2
            os.kill(process.pid, signal.SIGCONT)
            await until_retained(broker, "online", "s1")


@pytest.mark.slow
async def test_a_restart_before_the_old_end_is_noticed_stays_online(broker: Broker) -> None:
    with child(broker.url, "old") as hung:
        await until_retained(broker, "online", "old")
        os.kill(hung.pid, signal.SIGSTOP)
        async with observe(broker.port) as observer:
            async with running(make(broker.url, start_id="new")):
                await until_retained(broker, "online", "new")
                await asyncio.sleep(1.5 * KEEPALIVE_SECONDS + 1)
                assert (await retained(broker.port, STATUS))["start_id"] == "new"
            # The will of the old process came before the new one's first word, not after it.
            assert observer.states(STATUS)[:3] == [
                ("online", "old", ""),
                ("offline", "old", "lost"),
                ("online", "new", ""),
            ]


async def test_the_coordinator_hears_each_change_once(broker: Broker) -> None:
    seen: list[Presence] = []
    coordinator = MqttTelemetry(
        broker.url, client_id="stagemesh-coordinator", start_id="c1", limits=LIMITS
    )
    coordinator.watch_presence(seen.append)
    async with running(coordinator):
        assert await coordinator.wait_connected(5)
        with child(broker.url, "first"):
            await until(lambda: len(seen) == 1)
        await until(lambda: len(seen) == 2)
        telemetry = make(broker.url, start_id="second")
        async with running(telemetry):
            assert await telemetry.wait_connected(5)
        await until(lambda: len(seen) == 4)
        with pytest.raises(ConfigError, match="before"):
            coordinator.watch_presence(seen.append)
    assert [(p.node_id, p.state, p.start_id, p.reason) for p in seen] == [
        ("n1", "online", "first", ""),
        ("n1", "offline", "first", "lost"),
        ("n1", "online", "second", ""),
        ("n1", "offline", "second", "stopped"),
    ]


async def test_hostile_status_and_a_failing_callback_do_not_end_the_watch(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[str] = []

    def callback(presence: Presence) -> None:
        seen.append(presence.node_id)
        if presence.node_id == "bad":
            raise RuntimeError("the watcher's mistake")

    coordinator = MqttTelemetry(broker.url, client_id="c", start_id="c1", limits=LIMITS)
    coordinator.watch_presence(callback)
    async with running(coordinator):
        assert await coordinator.wait_connected(5)
        async with aiomqtt.Client("127.0.0.1", broker.port) as client:
            base = "stagemesh/default/nodes"
            for payload in (b"", b"{", b"[" * 10_000, b"[1]", b'{"state":"up"}', b"x" * 20_000):
                await client.publish(f"{base}/evil/status", payload, qos=1)
            for node_id in ("bad", "good"):
                status = b'{"state":"online","start_id":"s"}'
                await client.publish(f"{base}/{node_id}/status", status, qos=1)
        await until(lambda: "good" in seen)
        assert coordinator.is_connected
    assert seen == ["bad", "good"]
    assert sum("presence ignored" in r.message for r in caplog.records) == 5
    assert sum("callback failed" in r.message for r in caplog.records) == 1


async def until_retained(broker: Broker, state: str, start_id: str) -> None:
    deadline = time.monotonic() + 8
    while True:
        status = await retained(broker.port, STATUS)
        if status and (status["state"], status["start_id"]) == (state, start_id):
            return
        assert time.monotonic() < deadline, f"retained is {status}"
        await asyncio.sleep(0.05)
