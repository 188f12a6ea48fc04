"""What a user can get wrong, and what the cluster says: files, ports, plans, requests, versions."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from coordinator.config import CoordinatorConfig, DeploymentConfig
from coordinator.server import Coordinator
from node.config import NodeConfig
from node.daemon import NodeDaemon
from stagemesh.errors import CheckpointError, ConfigError, ModelNotFound, StagemeshError
from stagemesh.model_spec import load_model_spec
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.v1 import (
    common_pb2,
    coordinator_pb2,
    coordinator_pb2_grpc,
    node_pb2,
    node_pb2_grpc,
)
from stagemesh.version import PROTOCOL_MAJOR
from tests.cluster.asking import (
    CONTEXT_TOKENS,
    ask,
    assert_answers,
    endless_model,
    until,
    until_health,
)
from tests.support.checkpoints import edit_config, edit_tensors
from tests.support.cluster import Cluster, start_cluster


def config_for(model: Path | str, **settings: Any) -> CoordinatorConfig:
    deployment = DeploymentConfig(model=str(model), dtype="float32")
    return CoordinatorConfig(
        deployments=(deployment,), **{"http_port": 0, "rpc_bind": "127.0.0.1:0", **settings}
    )


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-16])


def only_bin(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def no_layer(folder: Path) -> None:
    name = "model.layers.2.mlp.up_proj.weight"
    edit_tensors(folder, lambda t: {k: v for k, v in t.items() if k != name})


def missing_shard(folder: Path) -> None:
    names = load_model_spec(folder).tensors
    last = "model-00002-of-00002.safetensors"
    weight_map = dict.fromkeys(names, "model.safetensors") | {"model.norm.weight": last}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))


BAD_FILES: dict[str, tuple[Callable[[Path], None], type[StagemeshError], list[str]]] = {
    "truncated": (truncate, CheckpointError, ["model.safetensors", "bytes"]),
    "a missing shard": (
        missing_shard,
        CheckpointError,
        ["index.json", "model-00002-of-00002.safetensors", "not in the folder"],
    ),
    "only .bin": (only_bin, CheckpointError, ["pytorch_model.bin", "safetensors"]),
    "no config": (no_config, StagemeshError, ["config.json"]),
    "no tokenizer": (no_tokenizer, StagemeshError, ["tokenizer"]),
    "a missing tensor": (no_layer, CheckpointError, ["layer 2", "mlp.up_proj.weight"]),
}


@pytest.mark.parametrize(("damage", "error", "words"), BAD_FILES.values(), ids=BAD_FILES)
def test_bad_files_are_found_before_anything_starts(
    tmp_path: Path,
    damage: Callable[[Path], None],
    error: type[StagemeshError],
    words: list[str],
) -> None:
    folder = endless_model(tmp_path)
    Coordinator(config_for(folder)).texts.close()  # negative control: it is right before
    damage(folder)
    with pytest.raises(error) as raised:
        Coordinator(config_for(folder))
    assert all(word in str(raised.value) for word in words), str(raised.value)


@pytest.mark.parametrize("reference", ["/no/such/folder", "no-such-name", "../../etc", ""])
def test_a_missing_model_is_named(reference: str) -> None:
    with pytest.raises(StagemeshError) as raised:
        Coordinator(config_for(reference))
    assert Path(reference).name in str(raised.value)
    assert isinstance(raised.value, ModelNotFound | CheckpointError)


async def test_a_port_in_use_is_named_and_nothing_stays_behind(tmp_path: Path) -> None:
    folder = endless_model(tmp_path)
    async with start_cluster(folder, num_nodes=1) as cluster:
        taken = cluster.coordinator.rpc_address
        with pytest.raises(ConfigError, match=taken):
            await Coordinator(config_for(folder, rpc_bind=taken)).__aenter__()
        http_port = httpx.URL(cluster.api_url).port
        assert http_port is not None
        second = Coordinator(config_for(folder, http_port=http_port))
        with pytest.raises(ConfigError, match=f"{http_port}.*--port"):
            await second.__aenter__()
        # Its gRPC port was taken before the other was found to be in use.
        with socket.socket() as probe:
            host, _, port = second.rpc_address.rpartition(":")
            probe.bind((host, int(port)))
        node = NodeConfig(node_id="x", coordinator=None, bind=taken, device="cpu")
        with pytest.raises(ConfigError, match=taken):
            await NodeDaemon(node).__aenter__()
        async with cluster.http() as client:
            await assert_answers(client)


async def test_requests_that_cannot_be_served(tmp_path: Path) -> None:
    model = endless_model(tmp_path)
    async with start_cluster(model, num_nodes=1) as cluster, cluster.http() as client:
        unknown = await ask(client, model="no-such-model")
        assert unknown.status_code == 404
        assert "no-such-model" in unknown.text
        assert "'model'" in unknown.json()["error"]["message"]

        long_prompt = await ask(client, prompt="A" * (CONTEXT_TOKENS + 5))
        assert long_prompt.status_code == 400
        message = long_prompt.json()["error"]["message"]
        assert str(CONTEXT_TOKENS) in message
        assert str(CONTEXT_TOKENS + 5) in message
        assert long_prompt.json()["error"]["code"] == "context_length_exceeded"
        await assert_answers(client)


async def refusal(client: httpx.AsyncClient) -> str:
    """Why a request is refused now."""
    response = await ask(client)
    assert response.status_code == 503, response.text
    health = await client.get("/health")
    assert health.status_code == 503
    message: str = response.json()["error"]["message"]
    return message


def held_stages(cluster: Cluster) -> int:
    return sum(len(n.daemon.servicer.stage_statuses()) for n in cluster.nodes.values())


async def test_too_few_nodes_are_waited_for(tmp_path: Path) -> None:
    model = endless_model(tmp_path)
    async with (
        start_cluster(model, num_nodes=0, min_nodes=2) as cluster,
        cluster.http() as client,
    ):
        assert "node-daemon --coordinator" in await refusal(client)
        await cluster.add_node("node-1")
        await until(lambda: "1 of 2 nodes" in cluster.deployment.detail)
        assert "1 of 2 nodes" in await refusal(client)
        await cluster.add_node("node-2")
        await cluster.wait_ready()
        await assert_answers(client)


async def test_a_model_too_large_is_refused_with_numbers_and_nothing_is_loaded(
    tmp_path: Path,
) -> None:
    model = endless_model(tmp_path)
    settings = {"memory_bytes": 2**18}
    async with (
        start_cluster(model, num_nodes=2, wait=False, node_settings=settings) as cluster,
        cluster.http() as client,
    ):
        await until(lambda: cluster.deployment.phase == "failed")
        message = await refusal(client)
        for part in ("4 layers", "node-1", "node-2", "GiB", "available"):
            assert part in message
        assert held_stages(cluster) == 0
        # Another node of enough memory changes that.
        await cluster.add_node("node-3")
        await until_health(client, 200)
        await assert_answers(client)


async def test_more_stages_than_nodes_wait_for_the_next_node(tmp_path: Path) -> None:
    model = endless_model(tmp_path)
    async with (
        start_cluster(model, num_nodes=2, wait=False, num_stages=3) as cluster,
        cluster.http() as client,
    ):
        await until(lambda: cluster.deployment.phase == "failed")
        message = await refusal(client)
        assert "3 stages" in message
        assert "2 of 2 nodes" in message
        assert held_stages(cluster) == 0
        await cluster.add_node("node-3")
        await until_health(client, 200)
        assert held_stages(cluster) == 3
        await assert_answers(client)


async def test_more_stages_than_layers_are_refused(tmp_path: Path) -> None:
    model = endless_model(tmp_path)
    async with (
        start_cluster(model, num_nodes=1, wait=False, num_stages=5) as cluster,
        cluster.http() as client,
    ):
        await until(lambda: cluster.deployment.phase == "failed")
        message = await refusal(client)
        assert "5 stages" in message
        assert "4 layers" in message
        assert held_stages(cluster) == 0


async def test_files_that_differ_on_a_node_are_refused_by_its_name(tmp_path: Path) -> None:
    """They are changed between the coordinator's look at them and the node's."""
    model = endless_model(tmp_path)
    async with (
        start_cluster(model, num_nodes=0, min_nodes=1) as cluster,
        cluster.http() as client,
    ):
        edit_config(model, {"rope_theta": 123.0})
        await cluster.add_node("node-1", is_streaming=False)
        await until(lambda: cluster.deployment.phase == "failed")
        message = await refusal(client)
        assert "node-1" in message
        assert "fingerprint" in message
        assert held_stages(cluster) == 0


async def test_in_place_of_files_that_differ_a_node_takes_the_coordinators(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = endless_model(tmp_path)
    async with (
        start_cluster(model, num_nodes=0, min_nodes=1) as cluster,
        cluster.http() as client,
    ):
        edit_config(model, {"rope_theta": 123.0})
        await cluster.add_node("node-1")
        await until_health(client, 200)
        # The model is that of the plan, not that of the file which was edited since.
        await assert_answers(client)
        assert "give all hosts the same files" in caplog.text


async def test_files_that_are_not_on_a_node_are_refused_by_its_name(tmp_path: Path) -> None:
    model = endless_model(tmp_path)
    async with (
        start_cluster(model, num_nodes=0, min_nodes=1) as cluster,
        cluster.http() as client,
    ):
        model.rename(tmp_path / "elsewhere")
        await cluster.add_node("node-1")
        await until(lambda: cluster.deployment.phase == "failed")
        message = await refusal(client)
        assert "node-1" in message
        assert str(model) in message


NEWER = common_pb2.ProtocolVersion(major=PROTOCOL_MAJOR + 1, minor=0, software="9.9")
NONE = common_pb2.ProtocolVersion()
VERSIONS = {"newer": (NEWER, f"{PROTOCOL_MAJOR + 1}.0"), "none": (NONE, "no protocol version")}


@pytest.mark.parametrize(("version", "named"), VERSIONS.values(), ids=VERSIONS)
async def test_another_version_may_not_join(
    tmp_path: Path, version: common_pb2.ProtocolVersion, named: str
) -> None:
    async with start_cluster(endless_model(tmp_path), num_nodes=0, wait=False) as cluster:
        description = node_pb2.NodeDescription(
            node_id="stranger", start_id="s", address="127.0.0.1:1", memory_bytes=2**30
        )
        join = coordinator_pb2.Join(version=version, node=description)
        refused = await heartbeat(cluster, coordinator_pb2.Beat(join=join))
        assert refused.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert named in (refused.details() or "")
        assert f"{PROTOCOL_MAJOR}." in (refused.details() or "")
        assert "stranger" in (refused.details() or "")
        assert cluster.coordinator.cluster.registry.members == ()

        no_join = await heartbeat(cluster, coordinator_pb2.Beat(sequence=1))
        assert no_join.code() is grpc.StatusCode.INVALID_ARGUMENT


async def heartbeat(cluster: Cluster, beat: coordinator_pb2.Beat) -> grpc.aio.AioRpcError:
    """How a heartbeat stream that begins like this is refused."""
    channel = open_channel(cluster.coordinator.rpc_address, token=None, kind="control")
    stub: coordinator_pb2_grpc.CoordinatorServiceAsyncStub = (
        coordinator_pb2_grpc.CoordinatorServiceStub(channel)
    )
    call = stub.Heartbeat(timeout=5)
    try:
        await call.write(beat)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
    finally:
        await channel.close()
    return raised.value


@pytest.mark.parametrize(("version", "named"), VERSIONS.values(), ids=VERSIONS)
async def test_a_node_takes_nothing_from_another_version(
    tmp_path: Path, version: common_pb2.ProtocolVersion, named: str
) -> None:
    async with start_cluster(endless_model(tmp_path), num_nodes=1) as cluster:
        daemon = cluster.nodes["node-1"].daemon
        channel = open_channel(daemon.address, token=None, kind="control")
        stub: node_pb2_grpc.NodeServiceAsyncStub = node_pb2_grpc.NodeServiceStub(channel)
        (stage,) = daemon.servicer.stage_statuses()
        hello = node_pb2.StepHello(version=version, deployment_id=stage.deployment_id)
        steps = stub.RunSteps(timeout=5)
        await steps.write(node_pb2.StepFrame(hello=hello))
        load = stub.LoadStage(node_pb2.LoadStageRequest(version=version), timeout=5)
        for call in (
            steps.read(),
            load.read(),
            stub.Describe(node_pb2.DescribeRequest(version=version), timeout=5),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call
            assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert named in (raised.value.details() or "")
        await channel.close()
        async with cluster.http() as client:
            await assert_answers(client)


async def test_a_name_that_is_taken_is_refused_and_its_owner_serves_on(tmp_path: Path) -> None:
    model = endless_model(tmp_path)
    async with start_cluster(model, num_nodes=1) as cluster, cluster.http() as client:
        config = NodeConfig(
            node_id="node-1", coordinator=cluster.coordinator.rpc_address, device="cpu"
        )
        async with NodeDaemon(config) as second:
            with pytest.raises(ConfigError, match=r"node-1.*taken"):
                await asyncio.wait_for(second.run(), 5)
        members = cluster.coordinator.cluster.registry.members
        assert [(m.info.node_id, m.state) for m in members] == [("node-1", "ready")]
        assert members[0].info.address == cluster.nodes["node-1"].daemon.address
        await assert_answers(client)


async def test_a_node_without_its_coordinator_waits_for_it(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    config = NodeConfig(
        node_id="early", coordinator=address, device="cpu", num_threads=1, memory_bytes=2**30
    )
    async with NodeDaemon(config) as daemon:
        task = asyncio.create_task(daemon.run())
        await asyncio.sleep(0.5)
        assert not task.done()
        started = time.monotonic()
        async with Coordinator(config_for(endless_model(tmp_path), rpc_bind=address)) as head:
            await until(lambda: len(head.cluster.registry.ready_nodes()) == 1)
            assert time.monotonic() - started < 5
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"node_id": "a/b"}, "a/b"),
        ({"node_id": ""}, "node id"),
        ({"bind": "no-port"}, "no-port"),
        ({"coordinator": "host:99999"}, "coordinator: address 'host:99999'"),
        ({"bind": "::1:5"}, "bind: address '::1:5'"),
        ({"advertise": ":5"}, "advertise: address ':5' has no host"),
        ({"num_threads": 0}, "0"),
        ({"memory_bytes": -1}, "-1"),
        ({"mqtt_url": "http://broker"}, "mqtt://"),
        ({"mqtt_url": "mqtt://broker", "cluster": "a/b"}, "a/b"),
        ({"metrics_seconds": 0.0}, "0.0"),
    ],
)
def test_wrong_settings_of_a_node_are_named(settings: dict[str, Any], word: str) -> None:
    good = {"node_id": "n", "coordinator": None}
    NodeConfig(**good)
    with pytest.raises(ConfigError, match=word):
        NodeConfig(**(good | settings))
