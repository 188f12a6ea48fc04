"""Node daemons and coordinators as real processes; each is ended by its own pid."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import psutil

START_SECONDS = 40.0


class Child:
    """A process of ours whose output goes to a file."""

    def __init__(self, folder: Path, module: str, *arguments: str, env: Any = None) -> None:
        self.log = folder / f"{module}-{time.monotonic_ns()}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def output(self) -> str:
        """What it has logged, for the message of a failed assertion."""
        return self.log.read_text()[-4000:]

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=10)

    async def wait(self, *, seconds: float = 15.0) -> int:
        """Its exit status; fails when it does not end in time."""
        deadline = time.monotonic() + seconds
        while (status := self.process.poll()) is None:
            assert time.monotonic() < deadline, f"still runs after {seconds} s: {self.output()}"
            await asyncio.sleep(0.02)
        return status

    async def next_event(self, name: str) -> dict[str, Any]:
        """The next line of JSON on its standard output with this event."""
        deadline = time.monotonic() + START_SECONDS
        assert self.process.stdout is not None
        while True:
            line = await read_line(self.process.stdout.fileno(), deadline=deadline)
            assert line, f"ended before it said {name!r}: {self.output()}"
            event: dict[str, Any] = json.loads(line)
            if event["event"] == name:
                return event

    def end(self) -> None:
        """End it however it is, and close its pipes."""
        if self.process.poll() is None:
            # A stopped process would not see anything else.
            self.process.kill()
            self.process.wait(timeout=10)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


async def read_line(descriptor: int, *, deadline: float) -> bytes:
    """A line from a pipe, byte by byte, so that nothing is lost to a buffer."""
    os.set_blocking(descriptor, False)
    line = b""
    while not line.endswith(b"\n"):
        assert time.monotonic() < deadline, f"no whole line in time, only {line!r}"
        try:
            byte = os.read(descriptor, 1)
        except BlockingIOError:
            await asyncio.sleep(0.02)
            continue
        if not byte:
            break
        line += byte
    return line


class Children:
    """Starts children and ends all of them with the test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._all: list[Child] = []

    def start(self, module: str, *arguments: str, env: Any = None) -> Child:
        child = Child(self._folder, module, *arguments, env=env)
        self._all.append(child)
        return child

    def node(self, node_id: str, coordinator: str, *arguments: str) -> Child:
        """A node daemon that ends with this process."""
        return self.start(
            "node",
            *("--node-id", node_id, "--coordinator", coordinator, "--device", "cpu"),
            "--no-measure",  # every node gets layers then
            *("--threads", "1", "--memory", "1GiB", "--exit-with-parent"),
            *arguments,
        )

    def end(self) -> None:
        for child in self._all:
            child.end()


@contextlib.contextmanager
def children(folder: Path) -> Iterator[Children]:
    started = Children(folder)
    try:
        yield started
    finally:
        started.end()


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


async def until_gone(processes: list[psutil.Process], *, seconds: float) -> float:
    """Wait until none of them runs; returns the seconds it took."""
    started = time.monotonic()
    while running := [p for p in processes if is_running(p)]:
        assert time.monotonic() - started < seconds, f"still there: {running}"
        await asyncio.sleep(0.05)
    return time.monotonic() - started


def is_running(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@contextlib.asynccontextmanager
async def stopped(child: Child) -> AsyncGenerator[None, None]:
    """SIGSTOP for the length of the block."""
    child.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        child.signal(signal.SIGCONT)
