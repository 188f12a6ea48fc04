"""Nodes and links of a real cluster: measured, shown, planned with; and probes that misbehave."""

import contextlib
import re
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from transformers import AutoModelForCausalLM

from coordinator.commands.status import fetch_status
from coordinator.config import DeploymentConfig
from coordinator.placing import best_plan
from coordinator.planner.profiles import ClusterProfile, LinkProfile, NodeProfile
from coordinator.profile_messages import cluster_profile
from node.profile_service import PROFILE_SERVICE_NAME, ProfileServicer
from stagemesh.comm.service import CommServicer
from stagemesh.errors import ConfigError, PeerLost, ProtocolError, StagemeshError
from stagemesh.model_spec import load_model_spec
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.convert import our_version
from stagemesh.rpc.probe import MAX_PROBE_BYTES, TakeTurn, Turn, probe_link
from stagemesh.rpc.server import RpcServer, Service
from stagemesh.rpc.status import from_rpc_error
from stagemesh.rpc.v1 import (
    comm_pb2,
    coordinator_pb2,
    coordinator_pb2_grpc,
    profile_pb2,
    profile_pb2_grpc,
)
from stagemesh.rpc.v1 import tensor_pb2 as tensors
from tests.cluster.asking import until
from tests.support.cluster import FAST_LIMITS, Cluster, start_cluster, tiny_model
from tests.support.stage_chain import reference_tokens

ONE_ON_PAPER = ClusterProfile(
    nodes=(
        NodeProfile(
            node_id="paper",
            memory_bytes=2**30,
            stream_bytes_per_second={"float32": 1e10},
            flops_per_second={"float32": 1e11},
        ),
    ),
    default_link=LinkProfile(latency_seconds=1e-3, bytes_per_second=1e9),
)


@contextlib.asynccontextmanager
async def measured(folder: Path, **options) -> AsyncGenerator[Cluster, None]:
    # On a busy machine nodes that take turns need longer than a cluster waits by default.
    limits = replace(FAST_LIMITS, measure_seconds=25.0)
    settings = {
        "node_settings": {"measure": True},
        "objective": "latency",
        "limits": limits,
        **options,
    }
    async with start_cluster(tiny_model(folder), **settings) as cluster:
        yield cluster


@contextlib.asynccontextmanager
async def profile_stub(cluster: Cluster, node: str = "node-1"):
    channel = open_channel(cluster.nodes[node].daemon.address, token=None, kind="data")
    try:
        yield profile_pb2_grpc.ProfileServiceStub(channel)
    finally:
        await channel.close()


async def test_nodes_are_measured_and_the_planner_places(tmp_path: Path) -> None:
    async with measured(tmp_path) as cluster:
        status = await fetch_status(cluster.coordinator.rpc_address, token=None)
        for node in status.nodes:
            profile = node.status.profile
            assert {r.dtype for r in profile.rates} == {"float32", "bfloat16", "float16"}
            assert profile.process_bytes > 50 * 2**20
        # Whoever joined first probes the other.
        ends = {frozenset((link.source, link.link.node_id)) for link in status.links}
        nodes = ("node-1", "node-2")
        assert ends == {frozenset(("coordinator", node)) for node in nodes} | {frozenset(nodes)}
        assert all(0 < link.link.latency_seconds < 1 for link in status.links)
        # Nodes have tried what sums would take; the coordinator is no rank of a stage.
        for link in status.links:
            is_ranks = link.source != "coordinator"
            assert (0 < link.link.sum_seconds < 1) == is_ranks
            assert (link.link.sum_bytes_per_second > 0) == is_ranks
            assert (link.link.sum_slowdown >= 1) == is_ranks
        # A model this small is fastest on one node, and the other hears why.
        (deployment,) = status.deployments
        assert len(deployment.stages) == 1
        assert deployment.prediction.tokens_per_second > 0
        assert [u.node_id for u in deployment.unused] != [deployment.stages[0].node_id]
        assert "slower" in deployment.unused[0].reason
        assert len(await cluster.generate([1, 2, 3], 4)) == 4
        # Who reads the status gets the profile that the coordinator plans with.
        seen = cluster_profile([node.status for node in status.nodes], status.links)
        infos = cluster.coordinator.cluster.registry.ready_nodes()
        assert seen == cluster.coordinator.cluster.measurements.cluster_profile(infos)


async def test_on_demand_everything_is_measured_anew(tmp_path: Path) -> None:
    async with measured(tmp_path, num_nodes=1) as cluster:
        measurements = cluster.coordinator.cluster.measurements
        (info,) = cluster.coordinator.cluster.registry.ready_nodes()
        before, link = measurements.node(info), measurements.link(None, info)
        status = await fetch_status(cluster.coordinator.rpc_address, token=None, measure=True)
        after = measurements.node(info)
        assert before is not None
        assert after is not None
        assert after.measured_at > before.measured_at
        assert status.nodes[0].status.profile.measured_at == after.measured_at
        assert measurements.link(None, info) not in (None, link)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"node_ids": ["nobody"], "timeout_seconds": 5}, "no such nodes: nobody"),
        ({"timeout_seconds": 0}, "timeout_seconds must be in"),
        ({"timeout_seconds": 1e9}, "timeout_seconds must be in"),
    ],
)
async def test_orders_to_measure_are_checked(tmp_path: Path, fields, words) -> None:
    async with start_cluster(tiny_model(tmp_path), num_nodes=0) as cluster:
        channel = open_channel(cluster.coordinator.rpc_address, token=None, kind="control")
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        request = coordinator_pb2.MeasureClusterRequest(version=our_version(), **fields)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.MeasureCluster(request, timeout=5)
        await channel.close()
        error = from_rpc_error(caught.value, operation="measure", peer="it")
        assert isinstance(error, ConfigError)
        assert words in str(error)


async def test_without_measuring_memory_places(tmp_path: Path) -> None:
    async with start_cluster(tiny_model(tmp_path), objective="latency") as cluster:
        assert cluster.deployment.plan is not None
        assert cluster.deployment.plan.num_stages == 2
        assert cluster.deployment.planned is None
        status = await fetch_status(cluster.coordinator.rpc_address, token=None)
        assert not status.links
        assert not status.deployments[0].HasField("prediction")
        # Whoever asks gets a profile nevertheless.
        async with profile_stub(cluster) as stub:
            request = profile_pb2.MeasureRequest(version=our_version(), timeout_seconds=30)
            assert (await stub.Measure(request, timeout=30)).rates


async def test_the_planner_shares_a_stage_where_one_node_has_no_room(tmp_path: Path) -> None:
    """`--max-tp 2`, live: two nodes hold what neither does alone, and give one process's tokens."""
    wishes: dict[str, Any] = {
        "dtype": "float32",
        "objective": "latency",
        "num_stages": 1,
        "max_tp": 2,
        "max_context_tokens": 64,
        "prompt_tokens": 16,
        "concurrency": 1,
    }
    folder = tiny_model(tmp_path)
    config = DeploymentConfig(model=str(folder), **wishes)
    alone = best_plan(config, load_model_spec(folder), ONE_ON_PAPER)[0].plan.replicas[0].stages[0]
    needed = alone.ranks[0].memory.total - alone.ranks[0].memory.overhead
    settings = {"measure": True, "memory_bytes": int(0.8 * needed)}
    async with measured(tmp_path, node_settings=settings, **wishes) as cluster:
        plan = cluster.deployment.plan
        assert [stage.node_ids for stage in plan.stages] == [("node-1", "node-2")]
        assert cluster.deployment.planned is not None, "the planner has placed it"
        prompt = [3, 14, 15, 92]
        expected = reference_tokens(AutoModelForCausalLM.from_pretrained(folder), prompt, 8)
        assert await cluster.generate(prompt, 8) == expected


async def test_nodes_that_cannot_measure_themselves_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The wait for their profiles says whose, and ends."""

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("node.profiler.SpeedMeasurement", broken)
    limits = replace(FAST_LIMITS, measure_seconds=4.0)
    async with measured(tmp_path, limits=limits, wait=False) as cluster:
        reason = "waiting for 4 s at most until these are measured: node-1, node-2"
        await until(lambda: reason in cluster.deployment.detail)
        await cluster.wait_ready()
        assert len(await cluster.generate([1, 2, 3], 4)) == 4
    assert "placed before these are measured: node-1, node-2" in caplog.text
    assert caplog.text.count("no such kernel; models are placed by memory here") == 2


async def test_a_lost_node_is_replaced_without_waiting_for_a_profile(tmp_path: Path) -> None:
    async with measured(tmp_path) as cluster:
        used = cluster.deployment.plan.stages[0].node_id
        (other,) = set(cluster.nodes) - {used}
        await cluster.nodes.pop(used).crash()
        await until(lambda: cluster.deployment.phase != "ready")
        await cluster.wait_ready()
        assert [s.node_id for s in cluster.deployment.plan.stages] == [other]
        assert cluster.deployment.planned is not None


async def test_a_probe_measures_within_its_bounds(tmp_path: Path) -> None:
    async with start_cluster(tiny_model(tmp_path), num_nodes=1) as cluster:
        address = cluster.nodes["node-1"].daemon.address
        link = await probe_link(address, node_id="node-1", token=None, timeout_seconds=10)
        assert 0 < link.latency_seconds < 1
        assert 1e5 < link.bytes_per_second < 1e12
        with pytest.raises(ConfigError, match="max_bytes"):
            await probe_link(
                address, node_id="n", token=None, timeout_seconds=1, max_bytes=MAX_PROBE_BYTES + 1
            )
        with pytest.raises(PeerLost, match="node gone"):
            await probe_link("127.0.0.1:1", node_id="gone", token=None, timeout_seconds=0.5)
        # A peer that cannot be reached does not spoil the rest of the answer.
        async with profile_stub(cluster) as stub:
            reply = await stub.ProbePeers(
                profile_pb2.ProbePeersRequest(
                    version=our_version(),
                    timeout_seconds=1.0,
                    peers=[
                        profile_pb2.ProbePeer(node_id="gone", address="127.0.0.1:1"),
                        profile_pb2.ProbePeer(node_id="node-1", address=address),
                    ],
                ),
                timeout=20,
            )
        gone, itself = reply.links
        assert "gone" in gone.error
        assert not itself.error
        assert itself.bytes_per_second > 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"members": ["node-1"]}, "between two nodes, got 1"),
        ({"members": ["node-1", "node-2", "node-2"]}, "between two nodes, got 3"),
        ({"members": ["node-1", "gone"], "rank": 2}, "rank"),
        ({"timeout_seconds": 0.0}, "timeout_seconds must be in"),
        ({}, "within 1 s|lost|gone"),
    ],
)
async def test_a_node_adds_up_with_one_peer_that_comes(tmp_path: Path, fields, words) -> None:
    fields = {"members": ["node-1", "gone"], "timeout_seconds": 1.0, **fields}
    async with (
        start_cluster(tiny_model(tmp_path), num_nodes=1, wait=False) as cluster,
        profile_stub(cluster) as stub,
    ):
        address = cluster.nodes["node-1"].daemon.address
        members = [
            comm_pb2.GroupMember(node_id=name, address="127.0.0.1:1" if name == "gone" else address)
            for name in fields.pop("members")
        ]
        request = profile_pb2.ProbeSumsRequest(
            version=our_version(), group_id="g", members=members, **fields
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ProbeSums(request, timeout=20)
        error = from_rpc_error(caught.value, operation="probe sums", peer="it")
        assert isinstance(error, StagemeshError)
        assert re.search(words, str(error)), str(error)
        assert not cluster.nodes["node-1"].daemon.comm._memberships


def tensor_part(num_bytes: int, *, data: bytes = b"") -> tensors.TensorPart:
    header = tensors.TensorHeader(dtype=tensors.DTYPE_UINT8, shape=[num_bytes], num_bytes=num_bytes)
    return tensors.TensorPart(header=header, data=data)


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([profile_pb2.ProbeFrame(part=tensor_part(1, data=b"x"))], "must have the version"),
        (
            [
                profile_pb2.ProbeFrame(version=our_version()),
                profile_pb2.ProbeFrame(part=tensor_part(MAX_PROBE_BYTES + 1)),
            ],
            "bytes",
        ),
        (
            [
                profile_pb2.ProbeFrame(version=our_version()),
                profile_pb2.ProbeFrame(part=tensor_part(4, data=b"too much")),
            ],
            "4",
        ),
    ],
)
async def test_hostile_probes_are_refused(tmp_path: Path, frames, words) -> None:
    async with (
        start_cluster(tiny_model(tmp_path), num_nodes=1, wait=False) as cluster,
        profile_stub(cluster) as stub,
    ):
        call = stub.Probe(iter_frames(frames), timeout=10)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        error = from_rpc_error(caught.value, operation="probe", peer="it")
        assert isinstance(error, StagemeshError)
        assert words in str(error)
        if words == "must have the version":
            assert isinstance(error, ProtocolError)


async def iter_frames(frames):
    for frame in frames:
        yield frame


class Busy:
    """A profiler whose turns say to take so long."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    @contextlib.contextmanager
    def turns(self) -> Iterator[TakeTurn]:
        async def take_turn() -> Turn:
            return Turn(begun=0.0, ended=self.seconds)

        yield take_turn


@pytest.mark.parametrize(("seconds", "is_seen"), [(0.0, True), (3600.0, False)])
async def test_what_the_peer_computes_is_not_the_links(seconds: float, is_seen: bool) -> None:
    service = Service(
        name=PROFILE_SERVICE_NAME,
        servicer=ProfileServicer(
            node_id="it", profiler=Busy(seconds), comm=CommServicer(node_id="it"), token=None
        ),
        add=profile_pb2_grpc.add_ProfileServiceServicer_to_server,
    )
    async with RpcServer("127.0.0.1:0", services=[service]) as server:
        link = await probe_link(server.address, node_id="it", token=None, timeout_seconds=10)
    # An hour is more than any way here takes, so nothing of it would be left.
    assert (link.latency_seconds > 0) == is_seen
