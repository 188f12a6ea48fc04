"""`coordinator up` as a process: nothing of it outlives it, however it ends."""

import signal
from pathlib import Path

import httpx
import psutil
import pytest

from tests.cluster.asking import assert_answers, endless_model
from tests.process.children import Child, Children, descendants, until_gone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


async def start_up(folder: Path, processes: Children) -> tuple[Child, str, list[psutil.Process]]:
    """A cluster of two nodes: its parent, its API and its children."""
    up = processes.start(
        "coordinator",
        *("up", "--nodes", "2", "--model", str(endless_model(folder)), "--json"),
        *("--threads", "1", "--memory", "1GiB", "--device", "cpu"),
        *("--port", "0", "--rpc-bind", "127.0.0.1:0"),
        # A token that the user has set for another cluster is not this one's.
        env={"STAGEMESH_TOKEN": "of-another-cluster"},
    )
    api = (await up.next_event("listening"))["api"]
    nodes = descendants(up.pid)
    assert sum("node" in process.cmdline() for process in nodes) == 2, nodes
    return up, api, nodes


async def test_a_killed_parent_leaves_no_child(tmp_path: Path, processes: Children) -> None:
    up, api, nodes = await start_up(tmp_path, processes)
    async with httpx.AsyncClient(base_url=api, trust_env=False, timeout=20) as client:
        await assert_answers(client)
    up.kill()
    assert await until_gone(nodes, seconds=10) < 10


async def test_sigterm_ends_the_cluster_with_status_0(tmp_path: Path, processes: Children) -> None:
    up, _, nodes = await start_up(tmp_path, processes)
    up.signal(signal.SIGTERM)
    assert await up.wait(seconds=10) == 0, up.output()
    await until_gone(nodes, seconds=0.5)
