"""CoordinatorService: what nodes and `coordinator status` call."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

import grpc.aio

from coordinator.cluster import Cluster
from coordinator.deployment import Deployment
from coordinator.group_rendezvous import GroupRendezvous, Place
from coordinator.membership import Member, NodeInfo
from coordinator.plan_report import prediction_basis
from coordinator.profile_messages import cluster_link, measured_node, node_info, node_profile
from stagemesh.errors import CollectiveTimeout, ConfigError, NotReady, ProtocolError
from stagemesh.rpc.convert import check_version, our_version
from stagemesh.rpc.v1 import comm_pb2, coordinator_pb2, coordinator_pb2_grpc, node_pb2

logger = logging.getLogger(__name__)

MAX_RENDEZVOUS_SECONDS = 24 * 3600.0
MAX_MEASURE_SECONDS = 600.0

Context = grpc.aio.ServicerContext[Any, Any]


class CoordinatorServicer(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Serves one cluster.

    Args:
        cluster: where signs of life go.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._started = time.monotonic()
        # The last status that each node sent, by node id; kept for nodes that are gone too.
        self.statuses: dict[str, node_pb2.NodeStatus] = {}
        self._rendezvous = GroupRendezvous()
        self._arrived = asyncio.Condition()

    async def Heartbeat(  # noqa: N802
        self, request_iterator: AsyncIterator[coordinator_pb2.Beat], context: Context
    ) -> AsyncGenerator[coordinator_pb2.BeatReply, None]:
        """A node's stream of life."""
        first = await anext(aiter(request_iterator), None)
        if first is None or not first.HasField("join"):
            raise ProtocolError("the first beat of a heartbeat stream must join")
        node = _node_info(first.join)
        limits, registry = self._cluster.limits, self._cluster.registry
        self._cluster.join(node)
        joined_at = registry.joined_at(node.node_id)
        self._take_status(node, first.status)
        try:
            yield coordinator_pb2.BeatReply(
                interval_seconds=limits.heartbeat_seconds,
                limit_seconds=limits.silence_seconds,
                coordinator_id=self._cluster.coordinator_id,
            )
            async for beat in request_iterator:
                registry.beat(node.node_id, start_id=node.start_id, now=time.monotonic())
                self._take_status(node, beat.status)
                yield coordinator_pb2.BeatReply(sequence=beat.sequence)
        finally:
            # The end of a stream from before the node was lost is noticed late, perhaps when it has
            # come back on another: that is not the end of that one.
            if registry.joined_at(node.node_id) == joined_at:
                self._cluster.apply(registry.stream_closed(node.start_id, now=time.monotonic()))

    def _take_status(self, node: NodeInfo, status: node_pb2.NodeStatus) -> None:
        self.statuses[node.node_id] = status
        if status.HasField("profile"):
            try:
                self._cluster.measured(node, measured_node(status.profile))
            except ProtocolError as error:
                # Its figures are worth nothing, but the node can serve.
                logger.info("profile ignored: %s", error, extra={"peer": node.node_id})

    async def Leave(  # noqa: N802
        self, request: coordinator_pb2.LeaveRequest, context: Context
    ) -> coordinator_pb2.LeaveReply:
        """A node stops on purpose."""
        self._cluster.apply(
            self._cluster.registry.leave(
                request.node_id, start_id=request.start_id, now=time.monotonic()
            )
        )
        return coordinator_pb2.LeaveReply()

    async def GetClusterStatus(  # noqa: N802
        self, request: coordinator_pb2.GetClusterStatusRequest, context: Context
    ) -> coordinator_pb2.ClusterStatus:
        """Everything `coordinator status` shows."""
        check_version(request.version, peer="the caller")
        return self.cluster_status()

    async def MeasureCluster(  # noqa: N802
        self, request: coordinator_pb2.MeasureClusterRequest, context: Context
    ) -> coordinator_pb2.ClusterStatus:
        """Measure nodes and links anew, then show everything."""
        check_version(request.version, peer="the caller")
        if not 0 < request.timeout_seconds <= MAX_MEASURE_SECONDS:
            raise ConfigError(
                f"timeout_seconds must be in (0, {MAX_MEASURE_SECONDS:g}], "
                f"got {request.timeout_seconds}"
            )
        known = {n.node_id for n in self._cluster.registry.ready_nodes()}
        unknown = sorted(set(request.node_ids) - known)
        if unknown:
            raise ConfigError(f"no such nodes: {', '.join(unknown)}; ready: {sorted(known)}")
        await self._cluster.measurer.measure_again(
            request.node_ids, timeout_seconds=request.timeout_seconds
        )
        return self.cluster_status()

    async def Rendezvous(  # noqa: N802
        self, request: coordinator_pb2.RendezvousRequest, context: Context
    ) -> coordinator_pb2.RendezvousReply:
        """Let a process wait until its group is complete."""
        check_version(request.version, peer=f"a rank of group {request.group_id!r}")
        if not 0 < request.timeout_seconds <= MAX_RENDEZVOUS_SECONDS:
            raise ConfigError(
                f"timeout_seconds must be in (0, {MAX_RENDEZVOUS_SECONDS:g}], "
                f"got {request.timeout_seconds}"
            )
        arrival = self._rendezvous.arrive(
            request.group_id,
            world_size=request.world_size,
            rank=request.rank if request.HasField("rank") else None,
            place=Place(
                address=request.member.address,
                node_id=request.member.node_id,
                unix_path=request.member.unix_path,
                host_id=request.member.host_id,
            ),
        )
        try:
            async with asyncio.timeout(request.timeout_seconds), self._arrived:
                self._arrived.notify_all()
                await self._arrived.wait_for(lambda: arrival.meeting is not None)
        except TimeoutError:
            raise CollectiveTimeout(
                f"group {request.group_id} is not complete after {request.timeout_seconds:g} s: "
                f"{self._rendezvous.describe_missing(arrival)}"
            ) from None
        finally:
            # Also when the caller hangs up, which cancels us.
            self._rendezvous.withdraw(arrival)
        assert arrival.meeting is not None
        assert arrival.rank is not None
        return coordinator_pb2.RendezvousReply(
            rank=arrival.rank,
            members=[
                comm_pb2.GroupMember(
                    address=place.address,
                    node_id=place.node_id,
                    unix_path=place.unix_path,
                    host_id=place.host_id,
                )
                for place in arrival.meeting.places
            ],
            incarnation=arrival.meeting.incarnation,
        )

    def cluster_status(self) -> coordinator_pb2.ClusterStatus:
        """Nodes and deployments, now."""
        registry = self._cluster.registry
        return coordinator_pb2.ClusterStatus(
            coordinator_id=self._cluster.coordinator_id,
            version=our_version(),
            nodes=[
                self._cluster_node(member, registry.last_beat(member.info.node_id))
                for member in registry.members
            ],
            deployments=[_deployment_status(d) for d in self._cluster.deployments.values()],
            links=self._links(),
            uptime_seconds=time.monotonic() - self._started,
        )

    def _links(self) -> list[coordinator_pb2.ClusterLink]:
        profile = self._cluster.measurements.cluster_profile(self._cluster.registry.ready_nodes())
        known = {} if profile is None else profile.links
        return [cluster_link(source, target, link) for (source, target), link in known.items()]

    def _cluster_node(self, member: Member, last_beat: float | None) -> coordinator_pb2.ClusterNode:
        status = self.statuses.get(member.info.node_id)
        if status is None:
            raise NotReady(f"node {member.info.node_id} has sent no status")
        age = time.monotonic() - (member.changed_at_seconds if last_beat is None else last_beat)
        shown = coordinator_pb2.ClusterNode(
            status=status, state=member.state, last_beat_seconds=age
        )
        # Perhaps newer than what came with the last beat.
        measured = self._cluster.measurements.node(member.info)
        if measured is not None:
            shown.status.profile.CopyFrom(node_profile(measured))
        return shown


def _node_info(join: coordinator_pb2.Join) -> NodeInfo:
    check_version(join.version, peer=f"node {join.node.node_id} ({join.node.address})")
    return node_info(join.node, software=join.version.software)


def _deployment_status(deployment: Deployment) -> coordinator_pb2.DeploymentStatus:
    plan, runtime = deployment.plan, deployment.runtime
    progress = deployment.loads.values()
    return coordinator_pb2.DeploymentStatus(
        deployment_id=deployment.deployment_id,
        model=deployment.name,
        state=deployment.phase,
        detail=deployment.detail,
        dtype="" if plan is None else plan.dtype,
        stages=[
            coordinator_pb2.StagePlacement(
                stage=stage.stage,
                node_id=rank.node_id,
                start_layer=stage.start_layer,
                end_layer=stage.end_layer,
                weight_bytes=rank.weight_bytes,
                kv_bytes=rank.kv_cache_bytes,
                tensor_rank=index,
                num_ranks=stage.num_ranks,
            )
            for stage in (() if plan is None else plan.stages)
            for index, rank in enumerate(stage.ranks)
        ],
        active_requests=0 if runtime is None else runtime.num_active,
        waiting_requests=0 if runtime is None else runtime.scheduler.num_waiting,
        generated_tokens=0 if runtime is None else runtime.stats.num_tokens,
        loaded_bytes=sum(p.loaded_bytes for p in progress),
        total_bytes=sum(p.total_bytes for p in progress),
        loads=list(_loads(deployment)),
        prediction=_prediction(deployment),
        unused=[
            coordinator_pb2.UnusedNode(node_id=node_id, reason=reason)
            for node_id, reason in (
                {} if deployment.planned is None else deployment.planned.unused
            ).items()
        ],
    )


def _loads(deployment: Deployment) -> Iterator[coordinator_pb2.NodeLoad]:
    for (stage, rank), progress in sorted(deployment.loads.items()):
        if deployment.plan is None:
            return
        load = coordinator_pb2.NodeLoad(
            stage=stage,
            tensor_rank=rank,
            node_id=deployment.plan.stages[stage].node_ids[rank],
            loaded_bytes=progress.loaded_bytes,
            total_bytes=progress.total_bytes,
        )
        if progress.fetch is not None:
            fetch = progress.fetch
            load.fetch.total_bytes = fetch.total_bytes
            load.fetch.present_bytes = fetch.present_bytes
            load.fetch.hashed_bytes = fetch.hashed_bytes
            load.fetch.received_bytes = sum(fetch.received.values())
            for source, num_bytes in fetch.received.items():
                load.fetch.origins.add(source=source, num_bytes=num_bytes)
        yield load


def _prediction(deployment: Deployment) -> coordinator_pb2.PlacementPrediction | None:
    if deployment.planned is None:
        return None
    expected = deployment.planned.prediction
    return coordinator_pb2.PlacementPrediction(
        time_per_token_seconds=expected.time_per_token_seconds,
        tokens_per_second=expected.tokens_per_second,
        time_to_first_token_seconds=expected.time_to_first_token_seconds,
        limiting=expected.limiting,
        objective=deployment.config.objective or "latency",
        basis=prediction_basis(deployment.config),
    )
