"""The coordinator: composes cluster, gRPC server, HTTP API and telemetry; thin on purpose.

    async with Coordinator(config) as coordinator:
        await coordinator.run()

Stop order: end the API's requests -> tear the pipelines down and unload the stages -> tell the
broker -> stop the gRPC server within the grace. Nothing starts in the constructor.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import uvicorn

from coordinator.api.app import create_app
from coordinator.api.health import DeploymentHealth, HealthReport
from coordinator.cluster import Cluster
from coordinator.config import CoordinatorConfig
from coordinator.metrics import metrics_text
from coordinator.service import CoordinatorServicer
from coordinator.telemetry import CoordinatorTelemetry
from coordinator.texts import ServedTexts
from coordinator.weight_server import DeployedWeights
from stagemesh.errors import ConfigError
from stagemesh.model_spec import load_model_spec
from stagemesh.rpc.security import is_loopback
from stagemesh.rpc.server import RpcServer, Service
from stagemesh.rpc.v1 import coordinator_pb2_grpc, weights_pb2_grpc
from stagemesh.weight_transfer.cache_folder import default_cache_folder
from stagemesh.weight_transfer.content_hash import HashBook
from stagemesh.weight_transfer.disk_threads import DiskThreads
from stagemesh.weight_transfer.service import WEIGHT_SERVICE_NAME, WeightServicer

logger = logging.getLogger(__name__)

_STREAM_GRACE_SECONDS = 0.5


class _QuietServer(uvicorn.Server):
    """uvicorn without its signal handlers: signals belong to the command line, which cancels us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


class Coordinator:
    """One cluster's head.

    Args:
        config: its settings.

    Raises:
        ModelError: a model is not there or its files are wrong: found before anything starts.
    """

    def __init__(self, config: CoordinatorConfig) -> None:
        self._config = config
        models = [(d, load_model_spec(d.model, name=d.name)) for d in config.deployments]
        self.telemetry = CoordinatorTelemetry(config.mqtt_url, cluster_name=config.cluster)
        self.cluster = Cluster(
            models,
            limits=config.limits,
            token=config.token,
            on_deployment=self.telemetry.deployment,
            on_request=self.telemetry.request,
        )
        self.telemetry.listen(self.cluster)
        self.texts = ServedTexts((name, d.spec) for name, d in self.cluster.deployments.items())
        self.servicer = CoordinatorServicer(self.cluster)
        self._disk = DiskThreads("disk")
        self._deployed = DeployedWeights(
            lambda: [d.spec for d in self.cluster.deployments.values()],
            disk=self._disk,
            book=HashBook(default_cache_folder() / "hashes"),
        )
        self.weights = WeightServicer(self._deployed, disk=self._disk, models=self._deployed)
        self._rpc = RpcServer(
            config.rpc_bind,
            services=[
                Service(
                    name="stagemesh.rpc.v1.CoordinatorService",
                    servicer=self.servicer,
                    add=coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server,
                ),
                Service(
                    name=WEIGHT_SERVICE_NAME,
                    servicer=self.weights,
                    add=weights_pb2_grpc.add_WeightServiceServicer_to_server,
                ),
            ],
            token=config.token,
            insecure=config.insecure,
        )
        self._socket: socket.socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._http: uvicorn.Server | None = None

    @property
    def rpc_address(self) -> str:
        """host:port that nodes register at, once started."""
        return self._rpc.address

    @property
    def api_url(self) -> str:
        """Base URL of the API, once started; empty when none is served."""
        if self._socket is None:
            return ""
        host, port = self._socket.getsockname()[:2]
        return f"http://{host if ':' not in host else f'[{host}]'}:{port}"

    def health(self) -> HealthReport:
        """The state of the deployments."""
        return HealthReport(
            deployments=tuple(
                DeploymentHealth(
                    model=d.name,
                    is_ready=d.phase == "ready",
                    detail=f"{d.phase}: {d.detail}" if d.phase != "ready" else "",
                )
                for d in self.cluster.deployments.values()
            )
        )

    async def __aenter__(self) -> Self:
        await self._rpc.start()
        try:
            self._socket = self._bind_http()
        except BaseException:
            await self._rpc.stop(0)
            raise
        self._tasks.append(asyncio.create_task(self.cluster.run(), name="cluster"))
        if self.telemetry.bus is not None:
            self._tasks.append(asyncio.create_task(self.telemetry.bus.run(), name="mqtt"))
        if self._socket is not None:
            self._http = self._http_server()
            serve = self._http.serve(sockets=[self._socket])
            self._tasks.append(asyncio.create_task(serve, name="http"))
        return self

    async def run(self) -> None:
        """Serve until cancelled, or until a part fails, whose error is raised."""
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        self.raise_if_ended()

    def raise_if_ended(self) -> None:
        """Raise the error of a part that has failed; for those who do not await `run`."""
        for task in self._tasks:
            if task.done():
                task.result()
                raise RuntimeError(f"{task.get_name()} ended by itself")

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._http is not None:
            self._http.should_exit = True
        for task in self._tasks:
            if task.get_name() == "cluster":
                task.cancel()
        ending = [task for task in self._tasks if task.get_name() != "mqtt"]
        if ending:
            await asyncio.wait(ending, timeout=self._config.grace_seconds)
        # After the cluster, whose last words it carries; bounded by a grace of its own.
        if self.telemetry.bus is not None:
            await self.telemetry.bus.stop()
        for task in self._tasks:
            task.cancel()
        # Pipelines are closed: what is still open are heartbeats, which end only with us.
        await self._rpc.stop(min(_STREAM_GRACE_SECONDS, self._config.grace_seconds))
        await self._deployed.close()
        self._disk.close()
        self.texts.close()

    def _bind_http(self) -> socket.socket | None:
        """Bind here rather than in uvicorn, which ends the process when the port is taken."""
        host, port = self._config.http_host, self._config.http_port
        if port is None:
            return None
        if not (is_loopback(host) or self._config.api_keys or self._config.insecure):
            logger.warning(
                "the API listens on %s without keys: whoever reaches the port can use the models; "
                "give --api-key-file, or say --insecure if that is meant",
                host,
            )
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = socket.socket(family, socket.SOCK_STREAM)
        try:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind((host, port))
        except OSError as error:
            server.close()
            raise ConfigError(
                f"cannot serve the API on {host}:{port}: {error.strerror}; choose another with "
                "--port or end what uses it"
            ) from error
        return server

    def _http_server(self) -> uvicorn.Server:
        app = create_app(
            engine=self.cluster,
            texts=self.texts,
            health=self.health,
            metrics=lambda: metrics_text(self.cluster, self.weights),
            api_keys=self._config.api_keys,
        )
        settings = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=int(self._config.grace_seconds) or 1,
        )
        return _QuietServer(settings)
