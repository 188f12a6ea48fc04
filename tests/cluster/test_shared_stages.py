"""Stages that several daemons share as tensor-parallel ranks, against transformers alone."""

import asyncio
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from transformers import AutoModelForCausalLM

from coordinator.config import Limits
from stagemesh.errors import CheckpointError, StagemeshError
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.convert import our_version
from stagemesh.rpc.v1 import comm_pb2, node_pb2, node_pb2_grpc
from tests.cluster.asking import (
    ask,
    assert_answers,
    endless_model,
    expected_text,
    stream_to_end,
    until,
    until_health,
)
from tests.support.cluster import FAST_LIMITS, Cluster, start_cluster, tiny_model
from tests.support.stage_chain import reference_tokens

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32]
THREE_GROUPS = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}
COPIES = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}


def stages_of(cluster: Cluster) -> list[tuple[str, ...]]:
    plan = cluster.deployment.plan
    assert plan is not None
    return [stage.node_ids for stage in plan.stages]


def engine_of(cluster: Cluster, node_id: str) -> Any:
    (deployment,) = cluster.nodes[node_id].daemon.servicer._deployments.values()
    return deployment.runner.engine


@pytest.mark.parametrize(
    ("degrees", "config", "settings"),
    [
        ((2, 1), THREE_GROUPS, {"max_step_tokens": 3}),
        ((1, 2), {}, {"max_step_tokens": 5}),
        ((4,), COPIES, {}),
        ((2, 1), THREE_GROUPS, {"tp_backend": "gloo"}),
    ],
)
async def test_ranks_give_the_tokens_of_one_process(
    tmp_path: Path, degrees: tuple[int, ...], config: dict[str, Any], settings: dict[str, Any]
) -> None:
    folder = tiny_model(tmp_path, **config)
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompts = [PROMPT, PROMPT[:2], [*PROMPT, *PROMPT], [7]]
    async with start_cluster(folder, num_nodes=sum(degrees), tp=degrees, **settings) as cluster:
        assert [len(ranks) for ranks in stages_of(cluster)] == list(degrees)
        at_once = await asyncio.gather(*(cluster.generate(prompt, 12) for prompt in prompts))
        assert at_once == [reference_tokens(model, prompt, 12) for prompt in prompts]
        await until(lambda: cluster.num_sessions() == 0)
        assert cluster.kv_used_bytes() == 0


async def test_what_is_planned_is_what_is_loaded(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, **THREE_GROUPS)
    async with start_cluster(folder, num_nodes=3, tp=(2, 1)) as cluster:
        plan = cluster.deployment.plan
        assert plan is not None
        assert stages_of(cluster) == [("node-1", "node-2"), ("node-3",)]
        shares = plan.stages[0].shares
        assert shares is not None
        assert shares.query_heads == (4, 2)
        for stage in plan.stages:
            for rank, assigned in enumerate(stage.ranks):
                engine = engine_of(cluster, assigned.node_id)
                assert engine.stage.weight_bytes == assigned.weight_bytes
                assert engine.cache.layout.bytes_per_token == assigned.kv_bytes_per_token
                group = engine.stage.tensor_group
                assert (group is None) == (stage.num_ranks == 1)
                if group is not None:
                    assert (group.shares, group.rank) == (stage.shares, rank)
                node = cluster.nodes[assigned.node_id].daemon.servicer
                (status,) = node.stage_statuses()
                assert (status.tensor_rank, status.num_ranks) == (rank, stage.num_ranks)
        # Each rank of the second stage is fed once: by one rank of the first.
        fed = [
            list(deployment.runner.next_ranks)
            for node_id in ("node-1", "node-2", "node-3")
            for deployment in cluster.nodes[node_id].daemon.servicer._deployments.values()
        ]
        assert fed == [[0], [], []]
        placed = cluster.coordinator.servicer.cluster_status().deployments[0].stages
        assert [(s.stage, s.tensor_rank, s.num_ranks, s.node_id) for s in placed] == [
            (0, 0, 2, "node-1"),
            (0, 1, 2, "node-2"),
            (1, 0, 1, "node-3"),
        ]


async def test_a_refused_step_leaves_the_ranks_in_step(tmp_path: Path) -> None:
    """What all ranks refuse alike is one failure of one step, and the next ones go on."""
    async with start_cluster(endless_model(tmp_path), tp=(2,)) as cluster, cluster.http() as client:
        for node_id in cluster.nodes:
            engine_of(cluster, node_id).cache.limit_bytes = 0
        response = await ask(client)
        assert response.status_code != 200
        assert "CapacityExceeded" in response.text
        for node_id in cluster.nodes:
            engine_of(cluster, node_id).cache.limit_bytes = 2**30
        await assert_answers(client, 40)
        assert cluster.deployment._incarnation == 1


@pytest.mark.parametrize("backend", ["grpc", "gloo"])
async def test_a_rank_that_fails_ends_the_group_by_its_name(tmp_path: Path, backend: str) -> None:
    model = endless_model(tmp_path)
    async with (
        start_cluster(model, tp=(2,), tp_backend=backend) as cluster,
        cluster.http() as client,
    ):
        await assert_answers(client)
        engine = engine_of(cluster, "node-2")

        def fail(*_: object) -> None:
            raise ArithmeticError("out of luck")

        engine._forward = fail
        response = await ask(client)
        assert response.status_code == 503
        assert "node-2" in response.text
        assert "ArithmeticError: out of luck" in response.text
        await until_health(client, 200)
        await assert_answers(client)
        assert cluster.deployment._incarnation == 2


async def test_a_rank_that_cannot_load_says_why_and_frees_the_others(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    async with start_cluster(folder, num_nodes=1, min_nodes=2, tp=(2,), wait=False) as cluster:
        node = await cluster.add_node("node-2")

        async def refuse(*_: object, **__: object) -> AsyncGenerator[None, None]:
            await asyncio.sleep(0.3)  # the other one waits for this by now
            raise CheckpointError("the disk is gone")
            yield

        node.daemon.servicer._loader.load = refuse  # type: ignore[method-assign,assignment]
        await until(lambda: cluster.deployment.phase == "failed")
        assert "node-2" in cluster.deployment.detail
        assert "the disk is gone" in cluster.deployment.detail
        await until(lambda: not cluster.nodes["node-1"].daemon.comm._memberships)


async def test_a_rank_that_is_silent_is_named_in_time(tmp_path: Path) -> None:
    limits = Limits(
        **{name: getattr(FAST_LIMITS, name) for name in FAST_LIMITS.__slots__}
        | {"step_seconds": 2.0}
    )
    model = endless_model(tmp_path)
    async with start_cluster(model, tp=(2,), limits=limits) as cluster, cluster.http() as client:
        await assert_answers(client)
        engine = engine_of(cluster, "node-2")
        run = engine.run

        def sleep_once(*arguments: Any) -> Any:
            engine.run = run
            time.sleep(3.0)
            return run(*arguments)

        engine.run = sleep_once
        response = await ask(client)
        assert response.status_code == 503
        assert "CollectiveTimeout" in response.text
        assert "rank 1 (node node-2)" in response.text
        await until_health(client, 200)
        await assert_answers(client)


async def test_a_lost_rank_fails_its_requests_and_the_stage_is_placed_anew(tmp_path: Path) -> None:
    model = endless_model(tmp_path)
    async with (
        start_cluster(model, num_nodes=3, tp=(2,), num_stages=1) as cluster,
        cluster.http() as client,
    ):
        assert stages_of(cluster) == [("node-1", "node-2")]
        answer = asyncio.create_task(stream_to_end(client, 3000))
        runtime = cluster.deployment.runtime
        assert runtime is not None
        await until(lambda: runtime.stats.num_tokens > 20)
        await cluster.nodes["node-2"].crash()
        async with asyncio.timeout(10):
            text, error = await answer
        assert error is not None
        assert "node-2" in error["message"]
        assert text == expected_text(len(text))
        await until_health(client, 200)
        assert stages_of(cluster) == [("node-1", "node-3")]
        await assert_answers(client, 40)


SHARES = node_pb2.TensorShares(
    num_kv_heads=2, query_heads=[2, 2], mlp_columns=[8, 8], vocab_rows=[130, 130]
)


WHOLE = node_pb2.TensorShares(num_kv_heads=2, query_heads=[4], mlp_columns=[16], vocab_rows=[260])
BAD_GROUPS: list[tuple[dict[str, Any], str]] = [
    ({"tensor_rank": 1}, "node-1 was told to be rank 1"),
    ({"tensor_rank": 7}, "rank 7"),
    ({"tensor_backend": "mpi"}, "'mpi'"),
    ({"tensor_shares": node_pb2.TensorShares(num_kv_heads=2)}, "query_heads must be one number"),
    ({"tensor_shares": WHOLE}, "2 ranks and shares for 1"),
    # Negative control: a group that makes sense is refused for its model alone.
    ({}, "no model with fingerprint"),
]


async def test_a_group_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    async with start_cluster(endless_model(tmp_path), num_nodes=1) as cluster:
        node = cluster.nodes["node-1"].daemon
        members = [
            comm_pb2.GroupMember(node_id=name, address=node.address) for name in ("node-1", "other")
        ]
        group = node_pb2.TensorGroup(
            group_id="g", incarnation=1, members=members, timeout_seconds=5.0
        )
        fields = {
            "version": our_version(),
            "deployment_id": "another",
            "model": node_pb2.ModelSource(name="m", path="/nowhere"),
            "tensor_group": group,
            "tensor_shares": SHARES,
        }
        channel = open_channel(node.address, token=None, kind="control")
        stub: node_pb2_grpc.NodeServiceAsyncStub = node_pb2_grpc.NodeServiceStub(channel)
        for changes, text in BAD_GROUPS:
            request = node_pb2.LoadStageRequest(**{**fields, **changes})
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in stub.LoadStage(request, timeout=5):
                    pass
            assert text in (caught.value.details() or ""), changes
        await until(lambda: not node.comm._memberships)
        await channel.close()
        async with cluster.http() as client:
            await assert_answers(client)


async def test_what_cannot_be_divided_is_refused_before_anything_loads(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, **THREE_GROUPS)
    async with start_cluster(folder, num_nodes=7, tp=(7,), num_stages=1, wait=False) as cluster:
        await until(lambda: cluster.deployment.phase == "failed")
        assert "tp 7" in cluster.deployment.detail
        assert "6 heads" in cluster.deployment.detail
        assert cluster.deployment.plan is None
        assert not any(node.daemon.servicer._deployments for node in cluster.nodes.values())
        with pytest.raises(StagemeshError, match="not ready"):
            await cluster.generate(PROMPT, 1)
