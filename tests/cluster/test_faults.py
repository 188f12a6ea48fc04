"""Nodes that crash, hang, are slow or come back, and a coordinator that is restarted.

The nodes run in this process; tests/process does the same to real processes.
"""

import asyncio
import contextlib
import time
from pathlib import Path

import grpc.aio
import pytest

from coordinator.node_link import NodeLink
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.convert import our_version
from stagemesh.rpc.v1 import coordinator_pb2, coordinator_pb2_grpc, node_pb2, node_pb2_grpc
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
from tests.support.cluster import FAST_LIMITS, Cluster, start_cluster


def names(node_id: str, *texts: str | None) -> bool:
    return all(node_id in (text or "") for text in texts)


async def test_a_crash_in_mid_answer_ends_it_and_the_next_one_is_right(tmp_path: Path) -> None:
    async with start_cluster(endless_model(tmp_path)) as cluster, cluster.http() as client:
        events = stream(client, 3000)
        text = ""
        async with contextlib.aclosing(events):
            while len(text) < 10:
                piece = await anext(events)
                assert isinstance(piece, str)
                text += piece
            crashed_at = time.monotonic()
            await cluster.nodes["node-2"].crash()
            error = None
            async for event in events:
                if isinstance(event, dict):
                    error = event
                else:
                    text += event
        assert time.monotonic() - crashed_at < 5
        assert error is not None
        assert names("node-2", error["message"])
        assert error["type"] == "server_error"
        assert text == expected_text(len(text))
        assert len(text) < 3000

        await until_health(client, 200)
        await assert_answers(client, 40)
        plan = cluster.deployment.plan
        assert plan is not None
        assert [stage.node_id for stage in plan.stages] == ["node-1"]


async def test_requests_after_a_crash_in_idle_are_refused_by_name_or_right(tmp_path: Path) -> None:
    async with start_cluster(endless_model(tmp_path)) as cluster, cluster.http() as client:
        await cluster.nodes["node-2"].crash()
        assert (await client.get("/health")).status_code == 503
        started = time.monotonic()
        for _ in range(3):
            response = await ask(client)
            if response.status_code == 200:
                assert response.json()["choices"][0]["text"] == expected_text(8)
            else:
                assert response.status_code == 503
                assert names("node-2", response.json()["error"]["message"]), response.text
        await until_health(client, 200)
        assert time.monotonic() - started < 10
        await assert_answers(client)


async def test_a_crash_while_loading_is_told_and_the_next_node_used(tmp_path: Path) -> None:
    model = endless_model(tmp_path)
    async with start_cluster(model, num_nodes=1, wait=False, min_nodes=2) as cluster:
        node = await cluster.add_node("node-2")
        # Its load waits behind this.
        busy = asyncio.ensure_future(node.daemon._compute.run(lambda: time.sleep(1.0)))
        async with cluster.http() as client:
            await until(lambda: cluster.deployment.phase == "loading")
            await asyncio.sleep(0.2)
            assert (await client.get("/health")).status_code == 503
            await node.crash()
            await until(lambda: "1 of 2 nodes" in cluster.deployment.detail)
            response = await ask(client)
            assert response.status_code == 503
            assert names("node-2", response.text)
            await cluster.add_node("node-3")
            await until_health(client, 200)
            await assert_answers(client)
        await busy


async def test_no_node_left_says_how_to_start_one(tmp_path: Path) -> None:
    model = endless_model(tmp_path)
    async with start_cluster(model, num_nodes=1) as cluster, cluster.http() as client:
        await cluster.nodes["node-1"].crash()
        await until(lambda: "no node is registered" in cluster.deployment.detail)
        response = await ask(client)
        assert response.status_code == 503
        assert names("node-daemon --coordinator", response.json()["error"]["message"])
        await cluster.add_node("node-1")
        await until_health(client, 200)
        await assert_answers(client)


async def test_eight_open_requests_end_and_the_api_lives(tmp_path: Path) -> None:
    async with start_cluster(endless_model(tmp_path)) as cluster, cluster.http() as client:
        answers = [asyncio.create_task(stream_to_end(client, 2000)) for _ in range(8)]
        runtime = cluster.deployment.runtime
        assert runtime is not None
        await until(lambda: runtime.stats.num_tokens > 80)
        await cluster.nodes["node-2"].crash()
        async with asyncio.timeout(10):
            ended = await asyncio.gather(*answers)
        for text, error in ended:
            assert error is not None
            assert names("node-2", error["message"])
            assert text == expected_text(len(text))
        await cluster.add_node("node-2")
        await until_health(client, 200)
        await assert_answers(client)
        cluster.coordinator.raise_if_ended()


async def test_a_broken_hop_between_live_nodes_is_linked_anew(tmp_path: Path) -> None:
    async with start_cluster(endless_model(tmp_path)) as cluster, cluster.http() as client:
        await assert_answers(client)
        servicer = cluster.nodes["node-1"].daemon.servicer
        (deployment,) = servicer._deployments.values()
        call = deployment.runner.next_ranks[0]._call
        assert call is not None
        call.cancel()
        response = await ask(client)
        assert response.status_code == 503
        assert names("node-1", response.text)
        assert names("node-2", response.text)
        await until_health(client, 200)
        await assert_answers(client)
        plan = cluster.deployment.plan
        assert plan is not None
        assert plan.num_stages == 2
        assert [m.state for m in cluster.coordinator.cluster.registry.members] == ["ready"] * 2


async def test_a_stage_that_raises_fails_its_step_only(tmp_path: Path) -> None:
    """Negative control of the case above: what is not the hop's fault does not load anew."""
    async with start_cluster(endless_model(tmp_path)) as cluster, cluster.http() as client:
        servicer = cluster.nodes["node-2"].daemon.servicer
        (deployment,) = servicer._deployments.values()
        engine, run = deployment.runner.engine, deployment.runner.engine.run

        def fail_once(*_: object) -> None:
            engine.run = run  # type: ignore[method-assign]
            raise ArithmeticError("out of luck")

        engine.run = fail_once  # type: ignore[method-assign,assignment]
        response = await ask(client)
        assert response.status_code == 500
        message = response.json()["error"]["message"]
        assert names("node-2", message)
        assert "ArithmeticError: out of luck" in message
        assert (await client.get("/health")).status_code == 200
        await assert_answers(client)
        assert cluster.deployment._incarnation == 1


async def test_a_result_that_nobody_waits_for_starts_the_pipeline_over(tmp_path: Path) -> None:
    """A pipeline whose answers make no sense is not trusted, and not given up for good either."""
    async with start_cluster(endless_model(tmp_path)) as cluster, cluster.http() as client:
        (deployment,) = cluster.nodes["node-2"].daemon.servicer._deployments.values()
        deployment.runner._report(10**6, ValueError("stray"), operation="compute")
        await until(lambda: cluster.deployment._incarnation == 2)
        await until_health(client, 200)
        await assert_answers(client)


@pytest.mark.slow
async def test_a_slow_node_stays_a_member(tmp_path: Path) -> None:
    """A load and a forward that block for longer than the silence limit are no silence."""
    model = endless_model(tmp_path)
    async with start_cluster(model, num_nodes=1, wait=False, min_nodes=2) as cluster:
        node = await cluster.add_node("node-2")
        load = asyncio.ensure_future(node.daemon._compute.run(lambda: time.sleep(4.0)))
        await cluster.wait_ready()
        await load
        forward = asyncio.ensure_future(node.daemon._compute.run(lambda: time.sleep(3.0)))
        started = time.monotonic()
        async with cluster.http() as client:
            await assert_answers(client)
        await forward
        assert time.monotonic() - started > 2.9
        history = [type(e).__name__ for e in cluster.coordinator.cluster.registry.history]
        assert history == ["NodeJoined", "NodeJoined"]


async def test_a_restarted_coordinator_gets_its_nodes_and_they_forget_the_old_plan(
    tmp_path: Path,
) -> None:
    async with start_cluster(endless_model(tmp_path)) as cluster:
        old = cluster.deployment.deployment_id
        await cluster.restart_coordinator()
        started = time.monotonic()
        await cluster.wait_ready(15)
        assert time.monotonic() - started < 15
        assert cluster.deployment.deployment_id != old
        held = {
            stage.deployment_id
            for node in cluster.nodes.values()
            for stage in node.daemon.servicer.stage_statuses()
        }
        assert held == {cluster.deployment.deployment_id}
        async with cluster.http() as client:
            await assert_answers(client)


async def test_a_node_that_is_back_on_its_port_is_reached_within_5_s(tmp_path: Path) -> None:
    async with start_cluster(endless_model(tmp_path), num_nodes=1) as cluster:
        node = await cluster.add_node("node-2")
        address = node.daemon.address
        channel = open_channel(address, token=None, kind="control")
        stub: node_pb2_grpc.NodeServiceAsyncStub = node_pb2_grpc.NodeServiceStub(channel)
        request = node_pb2.DescribeRequest(version=our_version())
        first = await stub.Describe(request, timeout=2)
        await node.crash()
        for _ in range(5):
            called_at = time.monotonic()
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.Describe(request, timeout=1)
            assert time.monotonic() - called_at < 1.5
            await asyncio.sleep(0.3)
        again = await cluster.add_node("node-2", bind=address)
        assert again.daemon.address == address
        listening_at = time.monotonic()
        while True:
            try:
                second = await stub.Describe(request, timeout=1)
                break
            except grpc.aio.AioRpcError:
                assert time.monotonic() - listening_at < 5
                await asyncio.sleep(0.25)
        assert time.monotonic() - listening_at < 5
        assert second.node_id == first.node_id
        assert second.start_id != first.start_id
        await channel.close()


def num_tasks() -> int:
    return sum(not task.done() for task in asyncio.all_tasks())


async def settled(cluster: Cluster) -> int:
    """Tasks when nothing changes any more."""
    await cluster.wait_ready()
    counts = [num_tasks()]
    while len(counts) < 4 or len(set(counts[-4:])) > 1:
        assert len(counts) < 60, counts
        await asyncio.sleep(0.1)
        counts.append(num_tasks())
    return counts[-1]


async def test_restarts_leave_nothing_behind(tmp_path: Path) -> None:
    async with start_cluster(endless_model(tmp_path)) as cluster, cluster.http() as client:
        for _ in range(3):
            await cluster.nodes["node-2"].crash()
            await until_health(client, 200)
            assert num_plan_nodes(cluster) == 1
            await cluster.nodes["node-1"].crash()
            await until(lambda: cluster.deployment.phase != "ready")
            await cluster.add_node("node-1")
            await until_health(client, 200)
            await cluster.add_node("node-2")
            await assert_answers(client)
        before = await settled(cluster)
        for _ in range(5):
            await cluster.nodes["node-2"].crash()
            await cluster.add_node("node-2")
            await asyncio.sleep(0.1)
        await until(lambda: len(cluster.coordinator.cluster.registry.ready_nodes()) == 2)
        assert await settled(cluster) == before
        await assert_answers(client)
        await until(lambda: cluster.num_sessions() == 0)
        assert cluster.kv_used_bytes() == 0


async def test_a_coordinator_that_stood_still_blames_no_node(tmp_path: Path) -> None:
    async with start_cluster(endless_model(tmp_path)) as cluster, cluster.http() as client:
        time.sleep(FAST_LIMITS.silence_seconds + 0.2)  # noqa: ASYNC251  # on purpose
        await asyncio.sleep(1.0)
        await assert_answers(client)
        history = [type(e).__name__ for e in cluster.coordinator.cluster.registry.history]
        assert history == ["NodeJoined", "NodeJoined"]


async def test_the_late_end_of_an_old_stream_is_not_the_end_of_the_new_one(tmp_path: Path) -> None:
    async with start_cluster(endless_model(tmp_path), num_nodes=0) as cluster:
        head = cluster.coordinator.cluster
        old = await join(cluster)
        head.apply(head.registry.expire(now=time.monotonic() + 60, limit_seconds=50))
        assert [m.state for m in head.registry.members] == ["lost"]
        new = await join(cluster)
        await old.close()
        await asyncio.sleep(0.3)
        assert [m.state for m in head.registry.members] == ["ready"]
        # Negative control: the end of the new one is.
        await new.close()
        await until(lambda: [m.state for m in head.registry.members] == ["lost"])


async def join(cluster: Cluster) -> grpc.aio.Channel:
    """A node that joins and then says nothing more, on a channel of its own."""
    channel = open_channel(cluster.coordinator.rpc_address, token=None, kind="control")
    stub: coordinator_pb2_grpc.CoordinatorServiceAsyncStub = (
        coordinator_pb2_grpc.CoordinatorServiceStub(channel)
    )
    description = node_pb2.NodeDescription(node_id="n", start_id="s", address="127.0.0.1:1")
    call = stub.Heartbeat()
    beat = coordinator_pb2.Join(version=our_version(), node=description)
    await call.write(coordinator_pb2.Beat(join=beat))
    await call.read()
    return channel


def num_plan_nodes(cluster: Cluster) -> int:
    assert cluster.deployment.plan is not None
    return cluster.deployment.plan.num_stages


async def test_a_node_counted_as_lost_frees_its_stages_and_may_return(tmp_path: Path) -> None:
    """Its beats stop for longer than the limit, as if the process had been stopped."""
    async with start_cluster(endless_model(tmp_path)) as cluster, cluster.http() as client:
        node = cluster.nodes["node-2"]
        # Nor does the coordinator reach it to free what it holds.
        cluster.deployment._unload = NodeLink.close  # type: ignore[method-assign,assignment]
        registry = cluster.coordinator.cluster.registry
        beat = registry.beat
        registry.beat = (  # type: ignore[method-assign]
            lambda node_id, **sign: None if node_id == "node-2" else beat(node_id, **sign)
        )
        since = time.monotonic()
        answer = asyncio.create_task(stream_to_end(client, 4000))
        # By name: either may have joined first.
        await until(
            lambda: (
                {m.info.node_id: m.state for m in registry.members}
                == {"node-1": "ready", "node-2": "lost"}
            )
        )
        assert time.monotonic() - since < FAST_LIMITS.silence_seconds + 2
        registry.beat = beat  # type: ignore[method-assign]
        text, error = await answer
        if error is None:
            assert len(text) == 4000
        else:
            assert names("node-2", error["message"])
        await until(lambda: not node.daemon.servicer.stage_statuses())
        await until(lambda: [m.state for m in registry.members] == ["ready", "ready"])
        await until_health(client, 200)
        await assert_answers(client)
        assert num_plan_nodes(cluster) == 1
