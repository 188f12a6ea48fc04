"""One gRPC server of a process: our services, health and reflection, token and error statuses.

    async with RpcServer("127.0.0.1:0", token=None, services=[...]) as server:
        print(server.address)

Stopping is ordered and bounded: health says NOT_SERVING, no new call is taken, open calls get the
grace to end and are cancelled then.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc.aio
from grpc_health.v1 import (  # type: ignore[import-untyped]
    health,
    health_pb2,
    health_pb2_grpc,
)
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]

from stagemesh.errors import ConfigError
from stagemesh.rpc.address import split_address
from stagemesh.rpc.channels import MESSAGE_OPTIONS, WINDOW_OPTIONS, Options
from stagemesh.rpc.fork_guard import PROCESS_GUARD
from stagemesh.rpc.security import TokenInterceptor, check_bind
from stagemesh.rpc.status import ErrorStatusInterceptor
from stagemesh.rpc.unix_socket import SocketFolder, target_of

logger = logging.getLogger(__name__)

_SERVER_OPTIONS: Options = [
    *MESSAGE_OPTIONS,
    *WINDOW_OPTIONS,
    # With SO_REUSEPORT a second process would silently share the port and get half of the calls.
    ("grpc.so_reuseport", 0),
    # Our channels ping every 10 s, also when idle; the default would answer with GOAWAY.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_frame_size", 2**20),
]

_MAX_CONCURRENT_RPCS = 4096
"""Far above what a mesh holds open; a bound, so that a flood meets RESOURCE_EXHAUSTED."""

_STOP_MARGIN_SECONDS = 5.0
_SETTLE_SECONDS = 1.0
"""For calls that a stop has cancelled to unwind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A servicer to serve."""

    name: str
    """Full name, e.g. "stagemesh.rpc.v1.NodeService"."""
    servicer: Any
    """The object with its methods."""
    add: Callable[[Any, grpc.aio.Server], None]
    """The generated `add_..._to_server`."""


class RpcServer:
    """An async context manager around a grpc.aio server."""

    def __init__(
        self,
        bind: str,
        *,
        services: Sequence[Service],
        token: str | None = None,
        insecure: bool = False,
        node_id: str = "",
        unix_socket: bool = False,
    ) -> None:
        """Check the settings; nothing listens yet.

        Args:
            bind: host:port; port 0 takes a free one.
            services: what to serve, beside health and reflection.
            token: when set, each call but health must show it.
            insecure: allow a public bind without token.
            node_id: named in the errors that go out.
            unix_socket: listen on a unix socket too, for processes of this user on this host; the
                token is asked for there as well.

        Raises:
            ConfigError: the address is malformed, or public without a token.
        """
        self._host, self._port = split_address(bind)
        check_bind(self._host, token=token, insecure=insecure)
        self._bind = bind
        self._services = tuple(services)
        self._token = token
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None
        self._statuses = ErrorStatusInterceptor(node_id=node_id)
        self._has_unix_socket = unix_socket
        self._socket_folder: SocketFolder | None = None

    @property
    def address(self) -> str:
        """host:port with the real port, once started."""
        return f"{self._host}:{self._port}"

    @property
    def port(self) -> int:
        """The real port, once started."""
        return self._port

    @property
    def unix_path(self) -> str:
        """Path of the unix socket, once started; empty without one."""
        return "" if self._socket_folder is None else self._socket_folder.path

    async def start(self) -> None:
        """Listen and serve.

        Raises:
            ConfigError: the address cannot be bound, or this process was forked from one that
                uses gRPC.
        """
        PROCESS_GUARD.check()
        assert self._server is None
        interceptors: list[grpc.aio.ServerInterceptor] = [self._statuses]
        if self._token is not None:
            interceptors.append(TokenInterceptor(self._token))
        server = grpc.aio.server(
            interceptors=interceptors,
            options=_SERVER_OPTIONS,
            maximum_concurrent_rpcs=_MAX_CONCURRENT_RPCS,
        )
        await self._register(server)
        try:
            self._port = server.add_insecure_port(self._bind)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {self._bind}: the port is in use or the address is not one of "
                "this machine. Choose another port (0 takes a free one) or end what uses it"
            ) from error
        if self._has_unix_socket:
            self._listen_unix(server)
        await server.start()
        self._server = server
        logger.info("rpc server listens", extra={"address": self.address})

    def _listen_unix(self, server: grpc.aio.Server) -> None:
        folder = SocketFolder.make()
        if folder is None:
            logger.warning("no unix socket: the path of temporary files is too long for one")
            return
        try:
            server.add_insecure_port(target_of(folder.path))
        except RuntimeError as error:
            folder.remove()
            raise ConfigError(
                f"cannot listen on the unix socket {folder.path}: {error}; "
                "let TMPDIR name a folder on a file system that allows sockets"
            ) from error
        self._socket_folder = folder

    async def _register(self, server: grpc.aio.Server) -> None:
        for service in self._services:
            service.add(service.servicer, server)
            await self.set_serving(service.name, serving=True)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        await self.set_serving("", serving=True)
        names = [service.name for service in self._services]
        reflection.enable_server_reflection(
            [*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server
        )

    async def set_serving(self, name: str, *, serving: bool) -> None:
        """Set what health says about a service; the empty name is the whole server."""
        states = health_pb2.HealthCheckResponse
        await self._health.set(name, states.SERVING if serving else states.NOT_SERVING)

    async def stop(self, grace_seconds: float = 1.0) -> None:
        """Stop serving; open calls get `grace_seconds`. May be called again."""
        server, self._server = self._server, None
        if server is None:
            return
        await self._health.enter_graceful_shutdown()
        try:
            async with asyncio.timeout(grace_seconds + _STOP_MARGIN_SECONDS):
                await server.stop(grace_seconds)
            if not await self._statuses.settle(_SETTLE_SECONDS):
                logger.warning("calls still run in a stopped rpc server")
        except TimeoutError:
            logger.warning("rpc server did not stop in time", extra={"address": self.address})
        finally:
            folder, self._socket_folder = self._socket_folder, None
            if folder is not None:
                folder.remove()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()
