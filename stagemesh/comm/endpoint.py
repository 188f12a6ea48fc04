"""CommEndpoint: one process's gRPC server for its groups, without a node daemon.

async with CommEndpoint("127.0.0.1:0") as endpoint:
    ...  # tell the other ranks endpoint.address
    group = await endpoint.open_group(
        group_id="g", rank=0, members=members, incarnation=1, timeout_seconds=30.0
    )
"""

import secrets
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from stagemesh.comm.async_group import AsyncGroup
from stagemesh.comm.frames import add_comm_service
from stagemesh.comm.message_group import DEFAULT_DIRECT_BYTES, DEFAULT_MESSAGE_BYTES
from stagemesh.comm.peer_link import PeerAddress
from stagemesh.comm.service import COMM_SERVICE_NAME, CommServicer
from stagemesh.errors import ConfigError
from stagemesh.rpc.address import split_address
from stagemesh.rpc.codec import DEFAULT_MAX_TENSOR_BYTES
from stagemesh.rpc.server import RpcServer, Service
from stagemesh.rpc.unix_socket import host_id

_STOP_GRACE_SECONDS = 0.5
_ALL_INTERFACES = frozenset({"", "0.0.0.0", "[::]"})


class CommEndpoint:
    """Where the other ranks' tensors for this process arrive. Loop-bound."""

    def __init__(
        self,
        bind: str = "127.0.0.1:0",
        *,
        advertise: str | None = None,
        token: str | None = None,
        insecure: bool = False,
        node_id: str = "",
        max_tensor_bytes: int = DEFAULT_MAX_TENSOR_BYTES,
        unix_socket: bool = False,
    ) -> None:
        """Check the settings; nothing listens yet.

        Args:
            bind: host:port to listen on; port 0 takes a free one.
            advertise: host or host:port that other machines reach this one by, where that is not
                `bind`; without a port the real one is added.
            token: shared by all ranks; needed where `bind` is not loopback.
            insecure: allow a public bind without token.
            node_id: the name of this process in errors.
            max_tensor_bytes: larger tensors are neither sent nor accepted.
            unix_socket: listen on a unix socket too, and use those of members on this host.

        Raises:
            ConfigError: an address is malformed, `bind` is public without a token, or it is all
                interfaces and no address for the others is given.
        """
        host, _ = split_address(bind if advertise is None or ":" not in advertise else advertise)
        if advertise is None and host in _ALL_INTERFACES:
            raise ConfigError(
                f"bind {bind!r} listens on all interfaces, which tells the other ranks no address; "
                "set advertise to the host name or address that they reach this machine by"
            )
        self._advertise = advertise
        self.node_id = node_id or f"process-{secrets.token_hex(4)}"
        self._servicer = CommServicer(
            node_id=self.node_id,
            token=token,
            max_tensor_bytes=max_tensor_bytes,
            unix_sockets=unix_socket,
        )
        service = Service(
            name=COMM_SERVICE_NAME,
            servicer=self._servicer,
            add=add_comm_service,
        )
        self._server = RpcServer(
            bind,
            services=[service],
            token=token,
            insecure=insecure,
            node_id=node_id,
            unix_socket=unix_socket,
        )

    @property
    def address(self) -> str:
        """host:port for the other ranks, once started."""
        if self._advertise is None:
            return self._server.address
        return (
            self._advertise if ":" in self._advertise else f"{self._advertise}:{self._server.port}"
        )

    def member(self, rank: int) -> PeerAddress:
        """This process as a rank of a group, its unix socket included; once started."""
        return PeerAddress(
            rank=rank,
            node_id=self.node_id,
            address=self.address,
            unix_path=self._server.unix_path,
            host_id=host_id() if self._server.unix_path else "",
        )

    async def open_group(
        self,
        *,
        group_id: str,
        rank: int,
        members: Sequence[PeerAddress],
        incarnation: int,
        timeout_seconds: float,
        direct_bytes: int = DEFAULT_DIRECT_BYTES,
        chunk_bytes: int = DEFAULT_MESSAGE_BYTES,
    ) -> AsyncGroup:
        """Make this process a rank of a group: see `CommServicer.open_group`."""
        return await self._servicer.open_group(
            group_id=group_id,
            rank=rank,
            members=members,
            incarnation=incarnation,
            timeout_seconds=timeout_seconds,
            direct_bytes=direct_bytes,
            chunk_bytes=chunk_bytes,
        )

    async def leave_group(self, group: AsyncGroup) -> None:
        """Leave a group. May be called again."""
        await self._servicer.leave_group(group)

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: the address cannot be bound.
        """
        await self._server.start()

    async def close(self) -> None:
        """Leave all groups and stop listening. May be called again."""
        await self._servicer.close()
        await self._server.stop(_STOP_GRACE_SECONDS)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
