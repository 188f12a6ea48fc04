"""Node daemons as child processes on this machine, for `up` and `generate --nodes`."""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from stagemesh.errors import ConfigError, NotReady
from stagemesh.private_folder import PrivateFolder

logger = logging.getLogger(__name__)

_FREE_SHARE = 0.8
_PROCESS_BYTES = 512 * 2**20
_LEAST_BYTES = 2**20
_STOP_SECONDS = 5.0


class LocalNodes:
    """Starts node daemons and ends them, whatever happens to us.

    Each child's standard input is a pipe that we hold: should this process be killed, the pipe ends
    and the children stop. What they print goes to a file each, quoted when one dies.

    Args:
        count: how many.
        coordinator: host:port to register at.
        threads: CPU threads of each, one figure or one per node; the cores divided by `count`, at
            least one, by default.
        memory_bytes: memory that each offers; an equal part of 80 % of what is free, less what
            its process takes, by default.
        device: device of each.
        token: the cluster's token.
    """

    def __init__(
        self,
        count: int,
        *,
        coordinator: str,
        threads: int | Sequence[int] | None = None,
        memory_bytes: int | None = None,
        device: str = "auto",
        token: str | None = None,
        mqtt_url: str | None = None,
    ) -> None:
        if count < 1:
            raise ConfigError(f"a local cluster needs at least one node, got {count}")
        self.count = count
        self._coordinator = coordinator
        cores = psutil.cpu_count() or 1
        each = threads or max(1, cores // count)
        self._threads = [each] * count if isinstance(each, int) else list(each)
        if len(self._threads) != count:
            raise ConfigError(f"threads for {len(self._threads)} nodes, but there are {count}")
        free = int(psutil.virtual_memory().available * _FREE_SHARE)
        # What a node offers is for the model; its process comes on top.
        self._memory_bytes = memory_bytes or max(_LEAST_BYTES, free // count - _PROCESS_BYTES)
        self._device = device
        self._token = token
        self._mqtt_url = mqtt_url
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self._logs = PrivateFolder.make()

    async def __aenter__(self) -> Self:
        try:
            for index in range(1, self.count + 1):
                await self._start(index)
        except BaseException:
            await self.stop()
            raise
        return self

    async def _start(self, index: int) -> None:
        node_id = f"node-{index}"
        command = [
            *(sys.executable, "-m", "node"),
            *("--node-id", node_id),
            *("--coordinator", self._coordinator),
            *("--threads", str(self._threads[index - 1])),
            *("--memory", str(self._memory_bytes)),
            *("--device", self._device),
            *("--log-level", "info", "--exit-with-parent"),
        ]
        # Through the environment, not the command line, which every user of the host can read. What
        # this process has inherited for itself is not for nodes of a cluster that knows no token.
        secrets = {"STAGEMESH_TOKEN": self._token or "", "STAGEMESH_MQTT": self._mqtt_url or ""}
        with self.log_path(node_id).open("wb") as log:
            self.processes[node_id] = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **secrets},
            )
        logger.info(
            "node started", extra={"peer": node_id, "child_pid": self.processes[node_id].pid}
        )

    def log_path(self, node_id: str) -> Path:
        """File with what a node printed."""
        return self._logs.path / f"{node_id}.log"

    async def watch(self) -> None:
        """Return never; raise when a child ends.

        Raises:
            NotReady: with the last lines that the child printed.
        """
        waits = {
            asyncio.create_task(process.wait(), name=node_id): node_id
            for node_id, process in self.processes.items()
        }
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
        ended = next(iter(done))
        raise NotReady(self.obituary(waits[ended], ended.result()))

    def obituary(self, node_id: str, status: int) -> str:
        """Why a child ended, for a person."""
        lines = self.log_path(node_id).read_text(errors="replace").strip().splitlines()
        return f"{node_id} ended with status {status}: " + (" | ".join(lines[-3:]) or "no output")

    async def stop(self) -> None:
        """End all children: SIGTERM, then SIGKILL after 5 s; only processes started here."""
        running = [p for p in self.processes.values() if p.returncode is None]
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        if running:
            waits = [asyncio.create_task(process.wait()) for process in running]
            await asyncio.wait(waits, timeout=_STOP_SECONDS)
        for process in running:
            if process.returncode is None:
                logger.warning("node did not stop in time", extra={"child_pid": process.pid})
                process.kill()
                await process.wait()
        self._logs.remove()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()
