"""Who may do what over the network, and that nothing that arrives is run."""

import asyncio
import contextlib
import pickle
import socket
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import psutil
import pytest

from coordinator.config import CoordinatorConfig, DeploymentConfig
from coordinator.server import Coordinator
from node.config import NodeConfig
from node.daemon import NodeDaemon
from stagemesh.errors import ConfigError, Unauthenticated
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.convert import our_version
from stagemesh.rpc.v1 import (
    comm_pb2,
    comm_pb2_grpc,
    coordinator_pb2,
    coordinator_pb2_grpc,
    node_pb2,
    node_pb2_grpc,
    tensor_pb2,
)
from tests.cluster.asking import ask, assert_answers, endless_model, until, until_health
from tests.support.cluster import Cluster, start_cluster

TOKEN = "the-token-of-this-cluster"


def listening_hosts() -> set[str]:
    return {
        c.laddr.ip.removeprefix("::ffff:")  # an IPv4 address in an IPv6 socket
        for c in psutil.Process().net_connections(kind="inet")
        if c.status == psutil.CONN_LISTEN
    }


async def test_defaults_listen_on_the_loopback_only(tmp_path: Path) -> None:
    deployment = DeploymentConfig(model=str(endless_model(tmp_path)))
    # Free ports in place of the default ones; the hosts are the defaults.
    default = CoordinatorConfig(deployments=(deployment,))
    assert default.rpc_bind.partition(":")[0] == default.http_host == "127.0.0.1"
    config = CoordinatorConfig(deployments=(deployment,), http_port=0, rpc_bind="127.0.0.1:0")
    before = listening_hosts()
    async with (
        Coordinator(config) as coordinator,
        NodeDaemon(NodeConfig(node_id="n", coordinator=coordinator.rpc_address, device="cpu")),
    ):
        await until(listening_hosts)
        assert listening_hosts() - before <= {"127.0.0.1"}
        with socket.socket() as public:
            # Negative control: a public socket would be seen.
            public.bind(("0.0.0.0", 0))
            public.listen()
            assert "0.0.0.0" in listening_hosts()


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "192.0.2.1"])
async def test_a_public_bind_wants_a_token(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigError, match="token"):
        NodeDaemon(NodeConfig(node_id="n", coordinator=None, bind=f"{host}:0", device="cpu"))
    deployment = DeploymentConfig(model=str(endless_model(tmp_path)))
    with pytest.raises(ConfigError, match="token"):
        Coordinator(CoordinatorConfig(deployments=(deployment,), rpc_bind=f"{host}:0"))
    # Negative controls: with a token, or on purpose.
    for allowed in ({"token": TOKEN}, {"insecure": True}):
        config = NodeConfig(
            node_id="n", coordinator=None, bind=f"{host}:0", device="cpu", **allowed
        )
        assert NodeDaemon(config)._server is not None


async def test_a_public_api_without_keys_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    deployment = DeploymentConfig(model=str(endless_model(tmp_path)))
    keys: tuple[frozenset[str], ...] = (frozenset(), frozenset({"key"}))
    for api_keys in keys:
        caplog.clear()
        config = CoordinatorConfig(
            deployments=(deployment,),
            http_host="0.0.0.0",
            http_port=0,
            rpc_bind="127.0.0.1:0",
            api_keys=api_keys,
        )
        async with Coordinator(config):
            assert ("--api-key-file" in caplog.text) is not bool(api_keys)


class Stubs:
    """Calls to a coordinator and a node, with one token or without."""

    def __init__(self, cluster: Cluster, *, token: str | None) -> None:
        head = open_channel(cluster.coordinator.rpc_address, token=token, kind="control")
        node = open_channel(cluster.nodes["node-1"].daemon.address, token=token, kind="control")
        self.channels = (head, node)
        self.head: coordinator_pb2_grpc.CoordinatorServiceAsyncStub = (
            coordinator_pb2_grpc.CoordinatorServiceStub(head)
        )
        self.node: node_pb2_grpc.NodeServiceAsyncStub = node_pb2_grpc.NodeServiceStub(node)
        self.comm: comm_pb2_grpc.CommServiceAsyncStub = comm_pb2_grpc.CommServiceStub(node)

    async def close(self) -> None:
        for channel in self.channels:
            await channel.close()

    async def join(self) -> Any:
        call = self.head.Heartbeat(timeout=5)
        description = node_pb2.NodeDescription(node_id="x", start_id="x", address="127.0.0.1:1")
        join = coordinator_pb2.Join(version=our_version(), node=description)
        await call.write(coordinator_pb2.Beat(join=join))
        return await call.read()

    async def leave(self) -> Any:
        request = coordinator_pb2.LeaveRequest(node_id="node-1")
        return await self.head.Leave(request, timeout=5)

    async def cluster_status(self) -> Any:
        request = coordinator_pb2.GetClusterStatusRequest(version=our_version())
        return await self.head.GetClusterStatus(request, timeout=5)

    async def node_status(self) -> Any:
        return await self.node.GetNodeStatus(node_pb2.GetNodeStatusRequest(), timeout=5)

    async def steps(self) -> Any:
        call = self.node.RunSteps(timeout=5)
        await call.write(node_pb2.StepFrame(hello=node_pb2.StepHello(version=our_version())))
        return await call.read()

    async def load(self) -> Any:
        request = node_pb2.LoadStageRequest(version=our_version(), deployment_id="x")
        return await self.node.LoadStage(request, timeout=5).read()

    async def unload(self) -> Any:
        return await self.node.UnloadStage(node_pb2.UnloadStageRequest(), timeout=5)

    async def watch(self) -> Any:
        return await self.node.WatchResults(node_pb2.WatchResultsRequest(), timeout=5).read()

    async def join_group(self) -> Any:
        request = comm_pb2.JoinGroupRequest(version=our_version())
        return await self.comm.JoinGroup(request, timeout=5)


CALLS = (
    *("join", "leave", "cluster_status"),
    *("node_status", "steps", "load", "unload", "watch", "join_group"),
)


async def code_of(stubs: Stubs, name: str) -> grpc.StatusCode:
    try:
        await getattr(stubs, name)()
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_without_the_token_nothing_is_done(tmp_path: Path) -> None:
    model = endless_model(tmp_path)
    async with (
        start_cluster(model, num_nodes=1, token=TOKEN) as cluster,
        cluster.http() as client,
    ):
        for token in (None, "another-token"):
            stubs = Stubs(cluster, token=token)
            for name in CALLS:
                assert await code_of(stubs, name) is grpc.StatusCode.UNAUTHENTICATED, name
            await stubs.close()
        # A node without it is refused for good and says why.
        settings = {"coordinator": cluster.coordinator.rpc_address, "device": "cpu"}
        async with NodeDaemon(NodeConfig(node_id="stranger", **settings)) as stranger:
            with pytest.raises(Unauthenticated, match="token"):
                await asyncio.wait_for(stranger.run(), 5)
        members = cluster.coordinator.cluster.registry.members
        assert [m.info.node_id for m in members] == ["node-1"]
        # Negative control: with it, each call gets as far as what it asks for.
        stubs = Stubs(cluster, token=TOKEN)
        for name in ("cluster_status", "node_status"):
            assert await code_of(stubs, name) is grpc.StatusCode.OK
        for name in ("steps", "watch"):
            code = await code_of(stubs, name)
            assert code not in (grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED), name
        await stubs.close()
        await assert_answers(client)


class Payload:
    """Unpickled, it would leave a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


async def test_a_pickle_is_bytes_like_any_other(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    data = pickle.dumps(Payload(mark))
    pickle.loads(data)
    mark.unlink()  # negative control: it would have left its mark

    model = endless_model(tmp_path)
    async with start_cluster(model, num_nodes=2) as cluster, cluster.http() as client:
        stubs = Stubs(cluster, token=None)
        group = comm_pb2.JoinGroupRequest(
            version=our_version(), group_id="g", incarnation=1, rank=0, timeout_seconds=5
        )
        for name, node in cluster.nodes.items():
            group.members.add(node_id=name, address=node.daemon.address)
        await stubs.comm.JoinGroup(group, timeout=5)
        (stage,) = cluster.nodes["node-1"].daemon.servicer.stage_statuses()
        for header in (
            tensor_pb2.TensorHeader(dtype=tensor_pb2.DTYPE_FLOAT32, shape=[2, 2], num_bytes=16),
            tensor_pb2.TensorHeader(shape=[len(data)], num_bytes=len(data)),
        ):
            part = tensor_pb2.TensorPart(header=header, data=data)
            steps = (
                node_pb2.StepFrame(
                    hello=node_pb2.StepHello(
                        version=our_version(), deployment_id=stage.deployment_id, incarnation=1
                    )
                ),
                node_pb2.StepFrame(header=node_pb2.StepHeader(step_id=7), activation=part),
            )
            send = (
                comm_pb2.CommTensor(call=comm_pb2.CommCall(group_id="g", peer_rank=1)),
                comm_pb2.CommTensor(part=part),
            )
            exchange = (
                comm_pb2.ExchangeFrame(
                    hello=comm_pb2.ExchangeHello(
                        version=our_version(), group_id="g", incarnation=1, source_rank=1
                    )
                ),
                comm_pb2.ExchangeFrame(envelope=comm_pb2.Envelope(operation="send"), part=part),
            )
            assert await stream_code(stubs.node.RunSteps, *steps) in REFUSALS
            assert await stream_code(stubs.comm.Send, *send) in REFUSALS
            assert await stream_code(stubs.comm.Exchange, *exchange) in REFUSALS
        # As a well-formed tensor it is only numbers, and here of a step that nobody asked for.
        header = tensor_pb2.TensorHeader(
            dtype=tensor_pb2.DTYPE_UINT8, shape=[1, len(data)], num_bytes=len(data)
        )
        part = tensor_pb2.TensorPart(header=header, data=data)
        step = node_pb2.StepHeader(step_id=10**6)
        step.segments.add(session_id=99, num_tokens=1)
        frame = node_pb2.StepFrame(header=step, activation=part)
        await stream_code(stubs.node.RunSteps, steps[0], frame)
        await stubs.close()
        await asyncio.sleep(0.2)
        assert not mark.exists()
        await until_health(client, 200)
        await assert_answers(client)


REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.ABORTED)


async def stream_code(method: Any, *messages: Any) -> grpc.StatusCode:
    """How a call that sends these messages ends."""
    call = method(timeout=3)
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        for message in messages:
            await call.write(message)
        await call.done_writing()
    return await end_of(call)


async def end_of(call: Any) -> grpc.StatusCode:
    """Read what there is to read; a call only ends for one who does."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        if not hasattr(call, "read"):
            await call
        else:
            while await call.read() is not grpc.aio.EOF:
                pass
    code: grpc.StatusCode = await call.code()
    return code


SECRET = "what no error may quote"
TRAVERSALS = ["../../etc", "/etc/passwd", "..%2f..%2fetc", "model/../model", "model\x00.gguf", "."]


async def test_a_model_id_is_a_name_and_no_path(tmp_path: Path) -> None:
    model = endless_model(tmp_path)
    (tmp_path / "secret").write_text(SECRET)
    async with start_cluster(model, num_nodes=1) as cluster, cluster.http() as client:
        for name in (*TRAVERSALS, str(tmp_path / "secret")):
            response = await ask(client, model=name)
            assert response.status_code == 404, name
            assert SECRET not in response.text
        stubs = Stubs(cluster, token=None)
        for name in (*TRAVERSALS, str(tmp_path / "secret"), str(tmp_path)):
            for source in (
                node_pb2.ModelSource(name="model", path=name),
                node_pb2.ModelSource(name="model", reference=name),
            ):
                request = node_pb2.LoadStageRequest(
                    version=our_version(),
                    deployment_id="x",
                    model=source,
                    num_stages=1,
                    end_layer=4,
                    dtype="float32",
                )
                call = stubs.node.LoadStage(request, timeout=10)
                assert await end_of(call) in (
                    grpc.StatusCode.NOT_FOUND,
                    grpc.StatusCode.DATA_LOSS,
                    grpc.StatusCode.INVALID_ARGUMENT,
                    # The node finds no such files, asks the coordinator, and there is none either.
                    grpc.StatusCode.FAILED_PRECONDITION,
                ), (name, await call.details())
                assert SECRET not in (await call.details() or "")
        await stubs.close()
        held = cluster.nodes["node-1"].daemon.servicer.stage_statuses()
        assert [stage.deployment_id for stage in held] == [cluster.deployment.deployment_id]
        await assert_answers(client)


def num_connections(port: int) -> int:
    return sum(
        c.laddr.port == port and c.status == psutil.CONN_ESTABLISHED
        for c in psutil.Process().net_connections(kind="tcp")
    )


async def test_stray_bytes_reach_nobody(tmp_path: Path) -> None:
    model = endless_model(tmp_path)
    async with start_cluster(model, num_nodes=1) as cluster, cluster.http() as client:
        await assert_answers(client)
        ports = [
            int(cluster.coordinator.rpc_address.rpartition(":")[2]),
            int(cluster.nodes["node-1"].daemon.address.rpartition(":")[2]),
            httpx.URL(cluster.api_url).port or 0,
        ]
        before = [num_connections(port) for port in ports]
        for port in ports:
            for stray in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", bytes(1024), b"\x16\x03\x01" * 99):
                for _ in range(7):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.write(stray)
                    await writer.drain()
                    writer.close()
        await until(
            lambda: all(
                num_connections(port) <= count for port, count in zip(ports, before, strict=True)
            ),
            seconds=5,
        )
        members = cluster.coordinator.cluster.registry.members
        assert [m.state for m in members] == ["ready"]
        await assert_answers(client)
