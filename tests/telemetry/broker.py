"""A real mosquitto for one test, and a plain client that sees what the broker sees."""

import asyncio
import json
import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiomqtt

from stagemesh.telemetry.publisher import MqttTelemetry

MOSQUITTO = shutil.which(
    "mosquitto", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
)


class Broker:
    """One mosquitto process on a free port of the loopback; keeps its port over restarts."""

    def __init__(self, folder: Path, *, extra: str = "", allow_anonymous: bool = True) -> None:
        self.folder = folder
        # As root, mosquitto would become another user, who may not read a test's folder.
        self.settings = (
            f"user {pwd.getpwuid(os.getuid()).pw_name}\npersistence false\n"
            f"allow_anonymous {str(allow_anonymous).lower()}\n{extra}"
        )
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.port}"

    def start(self) -> None:
        # mosquitto cannot bind port 0; between our look and its bind another process may come.
        for _ in range(10):
            self.port = self.port or _free_port()
            if self._try_start():
                return
            self.port = 0
        raise RuntimeError(f"mosquitto did not start:\n{(self.folder / 'log').read_text()[-2000:]}")

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(timeout=10)
            self.process = None

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(timeout=10)
            self.process = None

    def _try_start(self) -> bool:
        config = self.folder / "mosquitto.conf"
        config.write_text(f"listener {self.port} 127.0.0.1\n{self.settings}")
        assert MOSQUITTO is not None
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen([MOSQUITTO, "-c", str(config)], stdout=log, stderr=log)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    self.process = process
                    return True
            time.sleep(0.02)
        process.kill()
        process.wait(timeout=10)
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(slots=True)
class Observer:
    """Everything that arrived on all topics, in order, with the time of arrival."""

    messages: list[tuple[str, Any, bool, float]] = field(default_factory=list)
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    def payloads(self, topic: str, *, is_retained: bool | None = None) -> list[Any]:
        return [
            payload
            for name, payload, retained, _ in self.messages
            if name == topic and is_retained in (None, retained)
        ]

    def states(self, topic: str) -> list[tuple[str, str, str]]:
        """(state, start_id, reason) of each status message."""
        return [(p["state"], p["start_id"], p.get("reason", "")) for p in self.payloads(topic) if p]

    async def _run(self, port: int) -> None:
        async with aiomqtt.Client("127.0.0.1", port) as client:
            await client.subscribe("#", qos=1)
            self.ready.set()
            async for message in client.messages:
                assert isinstance(message.payload, bytes)
                payload = json.loads(message.payload) if message.payload else None
                self.messages.append(
                    (message.topic.value, payload, message.retain, time.monotonic())
                )


@asynccontextmanager
async def observe(port: int) -> AsyncIterator[Observer]:
    """Watch all topics of a broker for the length of the block."""
    observer = Observer()
    task = asyncio.create_task(observer._run(port))
    try:
        await asyncio.wait_for(observer.ready.wait(), 5)
        yield observer
    finally:
        task.cancel()
        await asyncio.wait({task}, timeout=5)


async def retained(port: int, topic: str) -> Any:
    """The retained payload of a topic; None when there is none."""
    async with observe(port) as observer:
        # The broker delivers retained messages right after the subscription; a marker of our own
        # behind them says that they are through.
        async with aiomqtt.Client("127.0.0.1", port) as client:
            await client.publish("marker", b"0", qos=1)
        await until(lambda: observer.payloads("marker"))
        return next(iter(observer.payloads(topic, is_retained=True)), None)


@asynccontextmanager
async def running(telemetry: MqttTelemetry) -> AsyncIterator[asyncio.Task[None]]:
    """Let it run for the length of the block; then it stops, in time and without an error."""
    task = asyncio.create_task(telemetry.run())
    try:
        yield task
    finally:
        await telemetry.stop()
        await asyncio.wait_for(task, 5)


async def until(condition: Callable[[], Any], *, seconds: float = 8.0) -> None:
    """Wait for a condition; the test fails when it does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not true within {seconds} s"
        await asyncio.sleep(0.02)
