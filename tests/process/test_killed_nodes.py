"""Node processes that are killed or stopped, under a coordinator in this process."""

import asyncio
import contextlib
import signal
import time
from pathlib import Path

import psutil
import pytest

from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.v1 import node_pb2, node_pb2_grpc
from tests.cluster.asking import (
    ask,
    assert_answers,
    endless_model,
    expected_text,
    stream,
    stream_to_end,
    until,
    until_health,
)
from tests.process.children import START_SECONDS, Child, Children, stopped
from tests.support.cluster import FAST_LIMITS, Cluster, start_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def two_nodes(folder: Path) -> contextlib.AbstractAsyncContextManager[Cluster]:
    return start_cluster(endless_model(folder), num_nodes=0, min_nodes=2)


def start_nodes(cluster: Cluster, processes: Children) -> dict[str, Child]:
    names = ("node-1", "node-2")
    return {name: processes.node(name, cluster.coordinator.rpc_address) for name in names}


def node_states(cluster: Cluster) -> dict[str, str]:
    return {m.info.node_id: m.state for m in cluster.coordinator.cluster.registry.members}


def planned_nodes(cluster: Cluster) -> list[str]:
    plan = cluster.deployment.plan
    return [] if plan is None else [stage.node_id for stage in plan.stages]


async def test_kill_while_loading_then_in_mid_answer_then_idle(
    tmp_path: Path, processes: Children
) -> None:
    async with two_nodes(tmp_path) as cluster, cluster.http() as client:
        nodes = start_nodes(cluster, processes)
        await until(lambda: cluster.deployment.phase == "loading", seconds=START_SECONDS)
        nodes["node-2"].kill()
        await until(lambda: cluster.deployment.phase == "waiting")
        assert (await client.get("/health")).status_code == 503
        response = await ask(client)
        assert response.status_code == 503
        assert "node-2" in response.text
        nodes["node-2"] = processes.node("node-2", cluster.coordinator.rpc_address)
        await until_health(client, 200, seconds=START_SECONDS)
        assert planned_nodes(cluster) == ["node-1", "node-2"]

        text, error, killed_at = "", None, 0.0
        async for event in stream(client, 3000):
            if isinstance(event, dict):
                error = event
            else:
                text += event
            if len(text) >= 10 and not killed_at:
                killed_at = time.monotonic()
                nodes["node-2"].kill()
        assert time.monotonic() - killed_at < 10
        assert error is not None
        assert "node-2" in error["message"]
        assert text == expected_text(len(text))
        await until_health(client, 200)
        assert planned_nodes(cluster) == ["node-1"]
        await assert_answers(client, 40)

        nodes["node-2"] = processes.node("node-2", cluster.coordinator.rpc_address)
        await until(lambda: node_states(cluster)["node-2"] == "ready", seconds=START_SECONDS)
        nodes["node-1"].kill()
        killed_at = time.monotonic()
        for _ in range(3):
            response = await ask(client)
            if response.status_code != 200:
                assert response.status_code == 503
                assert "node-1" in response.text
        await until_health(client, 200)
        assert time.monotonic() - killed_at < 10
        await assert_answers(client)
        assert planned_nodes(cluster) == ["node-2"]


async def test_eight_requests_end_when_their_second_node_is_killed(
    tmp_path: Path, processes: Children
) -> None:
    async with two_nodes(tmp_path) as cluster, cluster.http() as client:
        nodes = start_nodes(cluster, processes)
        await until_health(client, 200, seconds=START_SECONDS)
        answers = [asyncio.create_task(stream_to_end(client, 2000)) for _ in range(8)]
        runtime = cluster.deployment.runtime
        assert runtime is not None
        await until(lambda: runtime.stats.num_tokens > 80)
        nodes["node-2"].kill()
        assert await until_health(client, 503) < FAST_LIMITS.silence_seconds
        async with asyncio.timeout(10):
            ended = await asyncio.gather(*answers)
        for text, error in ended:
            assert error is not None
            assert "node-2" in error["message"]
            assert text == expected_text(len(text))
        cluster.coordinator.raise_if_ended()
        nodes["node-2"] = processes.node("node-2", cluster.coordinator.rpc_address)
        await until(lambda: node_states(cluster)["node-2"] == "ready", seconds=START_SECONDS)
        await until_health(client, 200)
        await assert_answers(client)


async def held_deployments(address: str) -> list[str]:
    """What a node process has loaded."""
    channel = open_channel(address, token=None, kind="control")
    stub: node_pb2_grpc.NodeServiceAsyncStub = node_pb2_grpc.NodeServiceStub(channel)
    try:
        status = await stub.GetNodeStatus(node_pb2.GetNodeStatusRequest(), timeout=5)
    finally:
        await channel.close()
    return [stage.deployment_id for stage in status.stages]


async def test_a_stopped_process_is_silent_and_does_no_harm_when_it_goes_on(
    tmp_path: Path, processes: Children
) -> None:
    async with two_nodes(tmp_path) as cluster, cluster.http() as client:
        nodes = start_nodes(cluster, processes)
        await until_health(client, 200, seconds=START_SECONDS)
        by_id = {m.info.node_id: m.info for m in cluster.coordinator.cluster.registry.members}
        assert await held_deployments(by_id["node-2"].address) != []

        text, error = "", None
        async with stopped(nodes["node-2"]):
            stopped_at = time.monotonic()
            async for event in stream(client, 3000):
                if isinstance(event, dict):
                    error = event
                else:
                    text += event
            assert time.monotonic() - stopped_at < FAST_LIMITS.silence_seconds + 2
            assert error is not None
            assert "node-2" in error["message"]
            await until_health(client, 200)
            await assert_answers(client)
            assert node_states(cluster) == {"node-1": "ready", "node-2": "lost"}

        await until(lambda: node_states(cluster)["node-2"] == "ready")
        held = ["something"]
        deadline = time.monotonic() + 5
        while held:
            held = await held_deployments(by_id["node-2"].address)
            assert time.monotonic() < deadline, f"node-2 still holds {held}"
        assert planned_nodes(cluster) == ["node-1"]
        await assert_answers(client)
        # It takes its part of the next plan.
        nodes["node-1"].kill()
        await until(lambda: planned_nodes(cluster) == ["node-2"])
        await until_health(client, 200)
        await assert_answers(client)


async def test_five_restarts_leave_nothing_behind(tmp_path: Path, processes: Children) -> None:
    async with two_nodes(tmp_path) as cluster, cluster.http() as client:
        nodes = start_nodes(cluster, processes)
        await until_health(client, 200, seconds=START_SECONDS)
        await assert_answers(client)
        for _ in range(5):
            nodes["node-2"].kill()
            nodes["node-2"] = processes.node("node-2", cluster.coordinator.rpc_address)
            await asyncio.sleep(1.0)
        await until(lambda: node_states(cluster)["node-2"] == "ready", seconds=START_SECONDS)
        await until_health(client, 200)
        await assert_answers(client)

        survivor = psutil.Process(nodes["node-1"].pid)
        assert survivor.children(recursive=True) == []
        survivor.cpu_percent()
        own = psutil.Process()
        own.cpu_percent()
        await asyncio.sleep(2.0)
        assert survivor.cpu_percent() < 10
        assert own.cpu_percent() < 15
        runtime = cluster.deployment.runtime
        assert runtime is not None
        assert runtime.scheduler.is_idle
        assert runtime.num_active == 0


async def test_a_killed_coordinator_is_followed_by_the_next_on_its_port(
    tmp_path: Path, processes: Children
) -> None:
    model = endless_model(tmp_path)
    arguments = ("serve", "--model", str(model), "--port", "0", "--min-nodes", "2", "--json")
    first = processes.start("coordinator", *arguments, "--rpc-bind", "127.0.0.1:0")
    address = (await first.next_event("listening"))["rpc"]
    for name in ("node-1", "node-2"):
        processes.node(name, address)
    await first.next_event("ready")

    first.kill()
    second = processes.start("coordinator", *arguments, "--rpc-bind", address)
    assert (await second.next_event("listening"))["rpc"] == address
    listening_at = time.monotonic()
    ready = await second.next_event("ready")
    assert time.monotonic() - listening_at < 15
    assert [stage["node_id"] for stage in ready["stages"]] == ["node-1", "node-2"]
    second.signal(signal.SIGTERM)
    assert await second.wait(seconds=10) == 0, second.output()
