"""The parent's side of the renderer: a child process, started when first needed.

A child that dies or overstays is ended and replaced at the next rendering.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coordinator.text.frames import pack_frame, receive_frame
from stagemesh.errors import ConfigError

_WORKER_MODULE = "coordinator.text.render_worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderLimits:
    """What one rendering may use."""

    max_cpu_seconds: float = 1.0
    """Processor time; a benign template takes about a millisecond."""
    max_wall_seconds: float = 15.0
    """Waiting, the child's start included; long, since a busy machine is no fault of a template."""
    max_memory_bytes: int = 512 * 2**20
    """Address space of the child."""
    max_output_chars: int = 16 * 2**20
    """Length of the rendered text."""
    max_kills: int = 3
    """A template whose renderer had to be ended this often is not run any more."""

    def __post_init__(self) -> None:
        for name in ("max_cpu_seconds", "max_wall_seconds", "max_memory_bytes"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")


class RenderKilled(Exception):
    """The renderer was ended because a limit was passed, or ended itself."""


class RenderProcess:
    """One child process that renders one template.

    Args:
        setup: the first frame: source, special tokens and the limits that the child keeps itself.
        limits: the limits.
    """

    def __init__(self, setup: Mapping[str, Any], *, limits: RenderLimits) -> None:
        own_limits = {
            "max_cpu_seconds": limits.max_cpu_seconds,
            "max_memory_bytes": limits.max_memory_bytes,
            "max_output_chars": limits.max_output_chars,
        }
        self._setup = pack_frame({**setup, **own_limits})
        self._limits = limits
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., RenderProcess] | None = None

    def render(self, request: Mapping[str, Any]) -> dict[str, str]:
        """Send one request and return the child's answer.

        Raises:
            RenderKilled: the child passed a limit or died.
        """
        frame = pack_frame(request)
        deadline = time.monotonic() + self._limits.max_wall_seconds
        if not self._lock.acquire(timeout=self._limits.max_wall_seconds):
            raise RenderKilled("the renderer is busy with another request")
        try:
            return self._exchange(frame, deadline=deadline)
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the child, if there is one; the next rendering would start another."""
        if self._end is not None:
            self._end()
        self._connection = self._process = self._end = None

    def _exchange(self, frame: bytes, *, deadline: float) -> dict[str, str]:
        try:
            connection = self._connected()
            connection.settimeout(max(1e-3, deadline - time.monotonic()))
            connection.sendall(frame)
            # An escaped character takes up to 12 bytes.
            max_bytes = 12 * self._limits.max_output_chars + 4096
            answer: dict[str, str] = receive_frame(
                connection, max_bytes=max_bytes, deadline=deadline
            )
        except TimeoutError as error:
            self.close()
            raise RenderKilled(
                f"rendering took longer than {self._limits.max_wall_seconds} s"
            ) from error
        except (EOFError, ConnectionError, ValueError) as error:
            raise RenderKilled(self._reap()) from error
        return answer

    def _connected(self) -> socket.socket:
        """The connection to the child; starts the child when there is none."""
        if self._connection is None:
            self._connection, self._process = _start()
            # Also when this object is dropped without close(), and when the interpreter exits.
            self._end = weakref.finalize(self, _end_child, self._process, self._connection)
            self._connection.settimeout(self._limits.max_wall_seconds)
            self._connection.sendall(self._setup)
        return self._connection

    def _reap(self) -> str:
        """End what is left of the child and say how it ended."""
        assert self._process is not None
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            code = None
        self.close()
        if code == -signal.SIGPROF:
            return f"rendering took longer than {self._limits.max_cpu_seconds} s of processor time"
        return f"the renderer ended unexpectedly (exit code {code})"


def _start() -> tuple[socket.socket, "subprocess.Popen[bytes]"]:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-B", "-m", _WORKER_MODULE],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            # Only what imports need: nothing of the coordinator's environment reaches a template.
            env={"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
    return ours, process


def _end_child(process: "subprocess.Popen[bytes]", connection: socket.socket) -> None:
    connection.close()
    process.kill()
    process.wait(timeout=5.0)
