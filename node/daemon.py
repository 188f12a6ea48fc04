"""The node daemon: composes device, stages, services and membership; thin on purpose.

    async with NodeDaemon(config) as daemon:
        await daemon.run()

Stop order: leave the cluster -> say "offline" -> end the stages' streams and free their memory ->
drop the compute thread's queue -> stop the server within the grace. Nothing starts in the
constructor.
"""

import asyncio
import logging
from types import TracebackType
from typing import Self

from node.config import NodeConfig
from node.device import resolve_device
from node.executor import ComputeThread
from node.model_source import ModelSource
from node.model_wanted import SourceConfig
from node.profile_service import PROFILE_SERVICE_NAME, ProfileServicer, profile_to_proto
from node.profiler import Profiler
from node.registration import Registration
from node.service import NodeServicer
from node.stage_loader import StageLoader
from node.status import NodeReporter, stage_metrics
from node.telemetry import NodeTelemetry
from node.weight_cache import WeightCache
from stagemesh.comm.frames import add_comm_service
from stagemesh.comm.service import COMM_SERVICE_NAME, CommServicer
from stagemesh.errors import StagemeshError
from stagemesh.rpc.server import RpcServer, Service
from stagemesh.rpc.v1 import node_pb2_grpc, profile_pb2, profile_pb2_grpc, weights_pb2_grpc
from stagemesh.weight_transfer.cache_folder import default_cache_folder
from stagemesh.weight_transfer.disk_threads import DiskThreads
from stagemesh.weight_transfer.service import WEIGHT_SERVICE_NAME, WeightServicer

logger = logging.getLogger(__name__)

_STREAM_GRACE_SECONDS = 0.5


class NodeDaemon:
    """One host's daemon.

    Args:
        config: its settings.
    """

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self._device = resolve_device(
            config.device, num_threads=config.num_threads, memory_bytes=config.memory_bytes
        )
        self._compute = ComputeThread(f"compute-{self._device.torch_device}")
        self._reporter = NodeReporter(config, self._device, profile=self._profile)
        self._disk = DiskThreads("disk")
        self._cache = WeightCache(
            config.cache_folder or default_cache_folder() / "weights",
            limit_bytes=config.cache_limit_bytes,
        )
        self.weights = WeightServicer(self._cache, disk=self._disk)
        self.comm = CommServicer(
            node_id=config.node_id,
            token=config.token,
            max_tensor_bytes=config.max_tensor_bytes,
            unix_sockets=config.unix_socket,
        )
        self.servicer = NodeServicer(
            node_id=config.node_id,
            describe=self._reporter.description,
            status=self._reporter.status,
            loader=StageLoader(
                device=self._device.torch_device,
                compute=self._compute,
                models=self._model_source(),
            ),
            compute=self._compute,
            comm=self.comm,
            token=config.token,
            max_tensor_bytes=config.max_tensor_bytes,
        )
        self.profiler = Profiler(
            self._device.torch_device, compute=self._compute, load=self.servicer.load
        )
        self._server = RpcServer(
            config.bind,
            services=[
                Service(
                    name="stagemesh.rpc.v1.NodeService",
                    servicer=self.servicer,
                    add=node_pb2_grpc.add_NodeServiceServicer_to_server,
                ),
                Service(
                    name=COMM_SERVICE_NAME,
                    servicer=self.comm,
                    add=add_comm_service,
                ),
                Service(
                    name=WEIGHT_SERVICE_NAME,
                    servicer=self.weights,
                    add=weights_pb2_grpc.add_WeightServiceServicer_to_server,
                ),
                Service(
                    name=PROFILE_SERVICE_NAME,
                    servicer=ProfileServicer(
                        node_id=config.node_id,
                        profiler=self.profiler,
                        comm=self.comm,
                        token=config.token,
                    ),
                    add=profile_pb2_grpc.add_ProfileServiceServicer_to_server,
                ),
            ],
            token=config.token,
            insecure=config.insecure,
            node_id=config.node_id,
            unix_socket=config.unix_socket,
        )
        self._registration: Registration | None = None
        self._telemetry: NodeTelemetry | None = None

    def _model_source(self) -> ModelSource:
        config = SourceConfig(
            node_id=self._config.node_id,
            coordinator=self._config.coordinator,
            token=self._config.token,
            has_local_files=self._config.has_local_files,
            is_streaming=self._config.is_streaming,
        )
        return ModelSource(config, cache=self._cache, disk=self._disk)

    @property
    def address(self) -> str:
        """host:port of the gRPC server, once started."""
        return self._server.address

    @property
    def registration(self) -> Registration | None:
        """Membership, when the node has a coordinator."""
        return self._registration

    async def __aenter__(self) -> Self:
        await self._server.start()
        self._reporter.address = self._config.advertise or self._server.address
        self._reporter.unix_path = self._server.unix_path
        if self._config.coordinator is not None:
            self._registration = Registration(
                coordinator=self._config.coordinator,
                token=self._config.token,
                status=self.servicer.node_status,
                on_orphaned=self.servicer.unload_all,
            )
        if self._config.mqtt_url is not None:
            self._telemetry = NodeTelemetry(
                self._config.mqtt_url,
                cluster=self._config.cluster,
                node_id=self._config.node_id,
                start_id=self._reporter.start_id,
                address=self._reporter.address,
                interval_seconds=self._config.metrics_seconds,
                stages=lambda: [stage_metrics(s) for s in self.servicer.stage_statuses()],
            )
        logger.info(
            "node is up",
            extra={
                "address": self._reporter.address,
                "device": str(self._device.torch_device),
                "num_threads": self._device.num_threads,
            },
        )
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.comm.close()
        await self.servicer.unload_all()
        self._compute.close()
        # The stages' streams have ended; what is still open waits for a peer that may be gone.
        await self._server.stop(min(_STREAM_GRACE_SECONDS, self._config.grace_seconds))
        self._disk.close()

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            StagemeshError: the coordinator refuses this node for good.
        """
        measuring = asyncio.create_task(self._measure_once(), name="measure")
        try:
            await self._serve()
        finally:
            measuring.cancel()
            await asyncio.wait({measuring}, timeout=1.0)

    async def _serve(self) -> None:
        if self._telemetry is None:
            await self._stay_registered()
            return
        publishing = asyncio.create_task(self._telemetry.run(), name="telemetry")
        try:
            await self._stay_registered()
        finally:
            await self._telemetry.stop()
            await publishing

    async def _measure_once(self) -> None:
        """Beside the registration, which does not wait for it: the profile comes with a beat."""
        if not self._config.measure:
            return
        try:
            await self.profiler.measure()
        except StagemeshError as error:
            logger.warning("no profile: %s; models are placed by memory here", error)

    def _profile(self) -> profile_pb2.NodeProfile | None:
        profile = self.profiler.profile
        return None if profile is None else profile_to_proto(profile)

    async def _stay_registered(self) -> None:
        if self._registration is None:
            await asyncio.Event().wait()
            return
        beating = asyncio.create_task(self._registration.run(), name="heartbeat")
        try:
            # Shielded: a stop must not end the stream before the node has said goodbye on it.
            await asyncio.shield(beating)
        finally:
            await self._registration.leave(self._config.node_id, self._reporter.start_id)
            beating.cancel()
            await asyncio.wait({beating}, timeout=1.0)
