"""Weights for real daemons without files: sent once, resumed after a kill, kept, in namespaces."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagemesh.model_spec import ModelSpec, load_model_spec
from tests.cluster.asking import assert_answers, endless_model, until, until_health
from tests.process.children import START_SECONDS, Child, Children
from tests.support.checkpoints import write_chain_model
from tests.support.cluster import Cluster, start_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

NO_FILES = ("--no-local-files", "--cache-dir")


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


def start_nodes(cluster: Cluster, processes: Children, folder: Path) -> dict[str, Child]:
    return {
        name: processes.node(
            name, cluster.coordinator.rpc_address, *NO_FILES, str(folder / f"cache-{name}")
        )
        for name in ("node-1", "node-2")
    }


def stage_bytes(cluster: Cluster) -> dict[str, int]:
    """What each node has to get, by its place in the plan."""
    plan, spec = cluster.deployment.plan, cluster.deployment.spec
    assert plan is not None
    return {
        stage.node_id: content_bytes(spec, stage.start_layer, stage.end_layer)
        for stage in plan.stages
    }


def content_bytes(spec: ModelSpec, start: int, end: int) -> int:
    """Of the files; tensors of equal content count once (a chain model has many)."""
    found = {}
    for info in spec.tensors_for_stage(start, end):
        with info.file.open("rb") as file:
            file.seek(info.offset)
            found[file.read(info.num_bytes)] = info.num_bytes
    return sum(found.values())


async def test_two_daemons_without_files_get_their_shards_and_keep_them(
    tmp_path: Path, processes: Children
) -> None:
    model = endless_model(tmp_path)
    async with start_cluster(model, num_nodes=0, min_nodes=2) as cluster, cluster.http() as client:
        nodes = start_nodes(cluster, processes, tmp_path)
        await until_health(client, 200, seconds=START_SECONDS)
        await assert_answers(client)
        sent = cluster.coordinator.weights.sent_bytes
        expected = stage_bytes(cluster)
        assert dict(sent) == pytest.approx(expected, rel=0.01)
        assert 'weights_sent_bytes_total{node="node-1"}' in (await client.get("/metrics")).text
        loads = cluster.coordinator.servicer.cluster_status().deployments[0].loads
        assert {load.node_id: load.fetch.present_bytes for load in loads} == expected
        for child in nodes.values():
            child.kill()
        await cluster.restart_coordinator()
        start_nodes(cluster, processes, tmp_path)
        await until_health(client, 200, seconds=START_SECONDS)
        await assert_answers(client)
        assert cluster.coordinator.weights.sent_bytes.total() == 0
        assert cluster.coordinator.weights._models.hashed_bytes == 0  # remembered


async def test_a_node_that_is_killed_half_way_gets_only_the_rest(
    tmp_path: Path, processes: Children
) -> None:
    # Large enough to be killed in: an embedding and a head of 16 MB each.
    model = write_chain_model(tmp_path / "model", successors={65: 66, 66: 65}, vocab_size=2000)
    async with start_cluster(model, num_nodes=0, min_nodes=1, wait=False) as cluster:
        cluster.coordinator.weights._limits = cluster.coordinator.weights._limits.__class__(
            chunk_bytes=4096
        )
        sent = cluster.coordinator.weights.sent_bytes
        whole = content_bytes(load_model_spec(model), 0, 4)
        address, cache = cluster.coordinator.rpc_address, tmp_path / "cache"
        node = processes.node("node-1", address, *NO_FILES, str(cache))
        await until(lambda: sent.total() > whole // 2, seconds=START_SECONDS)
        node.kill()
        kept = sum(p.stat().st_size for p in cache.rglob("*") if p.is_file() and len(p.name) == 64)
        assert whole // 4 < kept < whole
        await until(lambda: cluster.coordinator.weights.num_transfers == 0)
        before = sent.total()
        processes.node("node-1", address, *NO_FILES, str(cache))
        await cluster.wait_ready(START_SECONDS)
        assert sent.total() - before == whole - kept


@contextlib.contextmanager
def namespaces(*names: str) -> Iterator[dict[str, str]]:
    """Network namespaces joined by a bridge; yields the address of each."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and ip (Debian: apt-get install iproute2)")

    def ip(*words: str, check: bool = True) -> bool:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=10)
        assert not check or done.returncode == 0, done.stderr
        return done.returncode == 0

    tag = f"sm{os.getpid() % 100000}"
    spaces = {name: f"{tag}{name}" for name in names}
    try:
        if not ip("netns", "add", f"{tag}hub", check=False):
            pytest.skip("no network namespaces here")
        ip("-n", f"{tag}hub", "link", "add", "name", "hub0", "type", "bridge")
        ip("-n", f"{tag}hub", "link", "set", "hub0", "up")
        addresses = {}
        for index, (name, space) in enumerate(spaces.items(), start=1):
            ip("netns", "add", space)
            ip(
                "-n",
                f"{tag}hub",
                "link",
                "add",
                f"p{index}",
                "type",
                "veth",
                "peer",
                "e",
                "netns",
                space,
            )
            ip("-n", f"{tag}hub", "link", "set", f"p{index}", "master", "hub0", "up")
            ip("-n", space, "addr", "add", f"10.77.0.{index}/24", "dev", "e")
            for device in ("e", "lo"):
                ip("-n", space, "link", "set", device, "up")
            addresses[name] = f"10.77.0.{index}"
        yield addresses
    finally:
        for space in (*spaces.values(), f"{tag}hub"):
            ip("netns", "del", space, check=False)


async def test_nodes_in_network_namespaces_of_their_own(tmp_path: Path) -> None:
    """The coordinator listens everywhere; nodes reach it at the address that they register at."""
    model = endless_model(tmp_path)
    running: list[subprocess.Popen[bytes]] = []
    with namespaces("c", "a", "b") as addresses, contextlib.ExitStack() as stack:
        tag = f"sm{os.getpid() % 100000}"

        def start(space: str, module: str, *arguments: str) -> None:
            log = stack.enter_context((tmp_path / f"{space}.log").open("wb"))
            command = ["ip", "netns", "exec", f"{tag}{space}", sys.executable, "-m", module]
            environment = {**os.environ, "STAGEMESH_TOKEN": "secret"}
            running.append(
                subprocess.Popen([*command, *arguments], stdout=log, stderr=log, env=environment)
            )

        try:
            serve = ("serve", "--model", str(model), "--rpc-bind", "0.0.0.0:7000", "--port", "8000")
            start("c", "coordinator", *serve, "--dtype", "float32", "--min-nodes", "2")
            for name in ("a", "b"):
                where = ("--bind", f"{addresses[name]}:7100", "--node-id", name)
                memory = ("--memory", "1GiB", "--threads", "1", "--no-measure", "--device", "cpu")
                cache = (*NO_FILES, str(tmp_path / f"cache-{name}"))
                start(
                    name, "node", "--coordinator", f"{addresses['c']}:7000", *where, *memory, *cache
                )
            await until(lambda: "deployment ready" in (tmp_path / "c.log").read_text(), seconds=60)
            text = scrape(f"{tag}c")
            sent = {
                m[1]: float(m[2])
                for m in re.finditer(r'weights_sent_bytes_total\{node="(\w)"\} (\S+)', text)
            }
            assert sorted(sent) == ["a", "b"]
            spec = load_model_spec(model)
            halves = [content_bytes(spec, 0, 2), content_bytes(spec, 2, 4)]
            assert sorted(sent.values()) == pytest.approx(sorted(halves), rel=0.01)
        finally:
            for process in running:
                process.terminate()
            for process in running:
                process.wait(timeout=20)


def scrape(space: str) -> str:
    """What the coordinator there says to Prometheus."""
    code = "import httpx; print(httpx.get('http://127.0.0.1:8000/metrics', trust_env=False).text)"
    command = ["ip", "netns", "exec", space, sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
