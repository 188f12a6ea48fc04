"""Node processes that share a stage, of which one is killed or stopped in mid answer."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.cluster.asking import (
    ask,
    assert_answers,
    endless_model,
    expected_text,
    stream_to_end,
    until,
    until_health,
)
from tests.process.children import START_SECONDS, Children
from tests.support.cluster import Cluster, start_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

LIMIT_SECONDS = 10.0


def ranks(cluster: Cluster) -> tuple[str, ...]:
    plan = cluster.deployment.plan
    return () if plan is None else plan.stages[0].node_ids


@pytest.mark.parametrize("backend", ["grpc", "gloo"])
async def test_a_killed_rank_is_named_in_time_and_its_stage_placed_anew(
    tmp_path: Path, processes: Children, backend: str
) -> None:
    async with (
        start_cluster(
            endless_model(tmp_path),
            num_nodes=0,
            min_nodes=3,
            tp=(2,),
            num_stages=1,
            tp_backend=backend,
        ) as cluster,
        cluster.http() as client,
    ):
        address = cluster.coordinator.rpc_address
        nodes = {name: processes.node(name, address) for name in ("node-1", "node-2", "node-3")}
        await until_health(client, 200, seconds=START_SECONDS)
        assert ranks(cluster) == ("node-1", "node-2")
        await fails_by_name(cluster, client, "node-2", nodes["node-2"].kill)
        await until_health(client, 200)
        assert ranks(cluster) == ("node-1", "node-3")
        await assert_answers(client, 40)
        if backend == "gloo":
            return
        # Too few are left; a stopped one that goes on is taken again.
        child = nodes["node-3"]
        await fails_by_name(cluster, client, "node-3", lambda: child.signal(signal.SIGSTOP))
        await until(lambda: cluster.deployment.phase == "failed")
        assert "need 2 nodes" in cluster.deployment.detail
        assert (await ask(client)).status_code == 503
        child.signal(signal.SIGCONT)
        await until_health(client, 200, seconds=20)
        assert ranks(cluster) == ("node-1", "node-3")
        await assert_answers(client)


async def fails_by_name(
    cluster: Cluster, client: httpx.AsyncClient, node_id: str, strike: Callable[[], None]
) -> None:
    """An answer goes on until a node of it is struck, and then ends with the node's name."""
    runtime = cluster.deployment.runtime
    assert runtime is not None
    before = runtime.stats.num_tokens
    answer = asyncio.create_task(stream_to_end(client, 4000))
    await until(lambda: runtime.stats.num_tokens > before + 20)
    assert not answer.done()
    strike()
    async with asyncio.timeout(LIMIT_SECONDS):
        text, error = await answer
    assert error is not None
    assert node_id in error["message"]
    assert text == expected_text(len(text))
