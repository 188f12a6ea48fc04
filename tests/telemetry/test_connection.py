"""The connection when the broker is away, restarts, hangs or refuses."""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import aiomqtt
import pytest

from stagemesh.errors import ConfigError
from stagemesh.telemetry.config import MqttLimits
from stagemesh.telemetry.payload import Presence
from stagemesh.telemetry.publisher import MqttTelemetry
from tests.telemetry.broker import MOSQUITTO, Broker, observe, retained, running, until

LIMITS = MqttLimits(min_backoff_seconds=0.05, max_backoff_seconds=0.2)
PLACEMENT = "stagemesh/default/deployments/d1/placement"
EVENTS = "stagemesh/default/requests/r1/events"


def make(url: str, *, limits: MqttLimits = LIMITS, client_id: str = "node") -> MqttTelemetry:
    return MqttTelemetry(url, client_id=client_id, node_id="n1", start_id="s1", limits=limits)


async def test_what_waited_for_a_broker_is_sent_when_it_comes(stopped_broker: Broker) -> None:
    stopped_broker.start()
    stopped_broker.stop()  # keeps the port, where nothing listens now
    telemetry = make(stopped_broker.url)
    async with running(telemetry):
        for number in range(3):
            telemetry.publish(telemetry.topics.request_events("r1"), {"number": number})
        telemetry.publish(telemetry.topics.placement("d1"), {"stages": 1}, retain=True)
        telemetry.publish(telemetry.topics.placement("d1"), {"stages": 2}, retain=True)
        await asyncio.sleep(0.3)
        assert not telemetry.is_connected
        assert telemetry.queued_messages == 5  # status, one placement, three events
        stopped_broker.start()
        async with observe(stopped_broker.port) as observer:
            assert await telemetry.wait_connected(5)
            await until(lambda: observer.payloads(PLACEMENT))
            await until(lambda: telemetry.queued_messages == 0)
        assert await retained(stopped_broker.port, PLACEMENT) == {"stages": 2}
        assert telemetry.dropped_messages == 0


async def test_events_arrive_once_and_in_order(broker: Broker) -> None:
    telemetry = make(broker.url)
    async with observe(broker.port) as observer:
        async with running(telemetry):
            assert await telemetry.wait_connected(5)
            for number in range(200):
                telemetry.publish(EVENTS, {"number": number})
        # The stop sends what waits: nothing is lost, and "offline" is the last word.
        await until(lambda: len(observer.payloads(EVENTS)) == 200)
        assert [p["number"] for p in observer.payloads(EVENTS)] == list(range(200))
        assert observer.messages[-1][1]["state"] == "offline"


async def test_a_cleared_topic_is_empty_and_stays_so(broker: Broker) -> None:
    telemetry = make(broker.url)
    async with running(telemetry):
        telemetry.publish(PLACEMENT, {"stages": 1}, retain=True)
        await until(lambda: telemetry.queued_messages == 0)
        assert await retained(broker.port, PLACEMENT) == {"stages": 1}  # negative control
        telemetry.publish(PLACEMENT, None, retain=True)
        await until(lambda: telemetry.queued_messages == 0)
        assert await retained(broker.port, PLACEMENT) is None
        broker.stop()
        broker.start()
        assert await until_connected_again(telemetry)
        assert await retained(broker.port, PLACEMENT) is None


@pytest.mark.parametrize("crashes", [False, True])
async def test_a_broker_that_forgot_everything_is_told_again(broker: Broker, crashes: bool) -> None:
    seen: list[Presence] = []
    node = make(broker.url)
    coordinator = MqttTelemetry(broker.url, client_id="coordinator", start_id="c1", limits=LIMITS)
    coordinator.watch_presence(seen.append)
    async with running(coordinator), running(node):
        node.publish(PLACEMENT, {"stages": 1}, retain=True)
        await until(lambda: len(seen) == 1)
        broker.kill() if crashes else broker.stop()
        await until(lambda: not node.is_connected and not coordinator.is_connected)
        broker.start()  # no persistence: it knows neither retained state nor subscriptions
        assert await node.wait_connected(5)
        assert await coordinator.wait_connected(5)
        assert await retained(broker.port, PLACEMENT) == {"stages": 1}
        assert (await retained(broker.port, node.topics.node_status("n1")))["state"] == "online"
        # The subscription lives: a node that joins now is heard.
        status = b'{"state":"online","start_id":"s2"}'
        async with aiomqtt.Client("127.0.0.1", broker.port) as client:
            await client.publish(node.topics.node_status("n2"), status, qos=1)
        await until(lambda: seen[-1].node_id == "n2")
        of_n1 = [(p.state, p.reason) for p in seen[:-1]]
    # mosquitto sends wills when it is told to end; then, and only then, n1 is news again.
    told = [("online", ""), ("offline", "lost"), ("online", "")]
    assert of_n1 == (told[:1] if crashes else told)


async def test_the_queue_is_bounded_while_the_broker_stays_away(stopped_broker: Broker) -> None:
    stopped_broker.start()
    stopped_broker.stop()
    limits = MqttLimits(min_backoff_seconds=0.05, max_backoff_seconds=0.2, max_queued_messages=50)
    telemetry = make(stopped_broker.url, limits=limits)
    async with running(telemetry):
        longest = 0.0
        for number in range(10_000):
            started = time.perf_counter()
            telemetry.publish(EVENTS, {"number": number})
            longest = max(longest, time.perf_counter() - started)
        assert telemetry.queued_messages == 51  # the status too
        assert telemetry.dropped_messages == 9950
        assert longest < 0.2  # a caller is never made to wait
        stopped_broker.start()
        async with observe(stopped_broker.port) as observer:
            await until(lambda: telemetry.queued_messages == 0)
            await until(lambda: observer.payloads(EVENTS))
            assert observer.payloads(EVENTS)[-1] == {"number": 9999}  # the newest were kept


async def test_stop_is_bounded_when_the_broker_hangs(broker: Broker) -> None:
    limits = MqttLimits(stop_grace_seconds=0.5)
    telemetry = make(broker.url, limits=limits)
    assert broker.process is not None
    task = asyncio.create_task(telemetry.run())
    assert await telemetry.wait_connected(5)
    os.kill(broker.process.pid, signal.SIGSTOP)
    try:
        telemetry.publish(EVENTS, {"number": 1})
        await asyncio.sleep(0.1)  # it waits for an acknowledgement that does not come
        started = time.monotonic()
        await telemetry.stop()
        await task
        assert time.monotonic() - started < 1.5
    finally:
        os.kill(broker.process.pid, signal.SIGCONT)
    # What was written before the end still tells the broker, once it reads again.
    status = telemetry.topics.node_status("n1")
    assert (await retained(broker.port, status))["state"] == "offline"


async def test_a_listener_that_never_answers_costs_no_sockets() -> None:
    """pytest turns an unclosed socket into a failure."""
    accepted: list[asyncio.StreamWriter] = []

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(writer)
        await reader.read()  # until the client closes
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    limits = MqttLimits(
        connect_timeout_seconds=0.1, min_backoff_seconds=0.02, max_backoff_seconds=0.05
    )
    telemetry = make(f"mqtt://127.0.0.1:{port}", limits=limits)
    async with running(telemetry):
        await until(lambda: len(accepted) >= 4)
        assert not telemetry.is_connected
        await until(lambda: all(writer.is_closing() for writer in accepted[:3]))
    server.close()
    await asyncio.wait_for(server.wait_closed(), 5)


async def test_an_id_in_use_twice_does_not_become_a_storm(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    """Each connection ends the other's; the pauses must grow, not start over each time."""
    limits = MqttLimits(min_backoff_seconds=0.05, max_backoff_seconds=30)
    one, two = make(broker.url, limits=limits), make(broker.url, limits=limits)
    async with observe(broker.port) as observer, running(one), running(two):
        await asyncio.sleep(2)
        online = [s for s in observer.states(one.topics.node_status("n1")) if s[0] == "online"]
        assert 2 <= len(online) <= 14  # 2 s of doubling pauses are about 5 for each
    assert any("connection lost" in r.message for r in caplog.records)


async def test_an_outage_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: every connect is refused
        telemetry = make(f"mqtt://user:hunter2@127.0.0.1:{closed.getsockname()[1]}")
        async with running(telemetry):
            await asyncio.sleep(0.5)
    warnings = [r for r in caplog.records if r.levelname == "WARNING"]
    assert [r.message for r in warnings] == ["mqtt connection failed"]
    assert "hunter2" not in str([r.__dict__ for r in caplog.records])


async def test_stop_without_run_and_twice() -> None:
    telemetry = make("mqtt://127.0.0.1:1")
    await telemetry.stop()
    await telemetry.stop()
    await asyncio.wait_for(telemetry.run(), 2)  # told to stop before it began


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"client_id": ""}, "client_id"),
        ({"start_id": ""}, "start_id"),
        ({"node_id": ""}, "node_id"),
        ({"cluster": "a/b"}, "cluster"),
        ({"prefix": "#"}, "prefix"),
        ({"details": {"text": "x" * 20_000}}, "details"),
    ],
)
async def test_wrong_settings_are_refused_before_anything_runs(
    fields: dict[str, object], message: str
) -> None:
    good = {"client_id": "c", "start_id": "s", "node_id": "n"}
    MqttTelemetry("mqtt://h", **good)  # negative control
    with pytest.raises(ConfigError, match=message):
        MqttTelemetry("mqtt://h", **{**good, **fields})


# paho leaves the socket of a failed handshake to the garbage collector, which says so.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("is_trusted", [True, False])
async def test_tls_needs_a_trusted_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_trusted: bool
) -> None:
    if MOSQUITTO is None:
        pytest.skip("mosquitto is not installed (Debian: apt-get install mosquitto)")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make_certificate(key, certificate)
    broker = Broker(tmp_path, extra=f"certfile {certificate}\nkeyfile {key}\n")
    if is_trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    broker.start()
    try:
        telemetry = make(f"mqtts://localhost:{broker.port}")
        async with running(telemetry):
            assert await telemetry.wait_connected(5 if is_trusted else 0.5) is is_trusted
    finally:
        broker.stop()


@pytest.mark.parametrize(("password", "is_let_in"), [("s%40cret", True), ("wrong", False)])
async def test_user_and_password_reach_the_broker(
    tmp_path: Path, password: str, is_let_in: bool
) -> None:
    if MOSQUITTO is None:
        pytest.skip("mosquitto is not installed (Debian: apt-get install mosquitto)")
    passwords = tmp_path / "passwords"
    make_password_file(passwords)
    broker = Broker(tmp_path, extra=f"password_file {passwords}\n", allow_anonymous=False)
    broker.start()
    try:
        telemetry = make(f"mqtt://node:{password}@127.0.0.1:{broker.port}")
        async with running(telemetry):
            assert await telemetry.wait_connected(5 if is_let_in else 0.5) is is_let_in
    finally:
        broker.stop()


def make_certificate(key: Path, certificate: Path) -> None:
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost"
    extension = ["-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *extension, *files], check=True, capture_output=True)


def make_password_file(passwords: Path) -> None:
    tool = shutil.which("mosquitto_passwd")
    if tool is None:
        pytest.skip("mosquitto_passwd is not installed")
    passwords.touch(mode=0o600)
    subprocess.run([tool, "-b", str(passwords), "node", "s@cret"], check=True, timeout=10)


async def until_connected_again(telemetry: MqttTelemetry) -> bool:
    await until(lambda: not telemetry.is_connected)
    return await telemetry.wait_connected(5)
