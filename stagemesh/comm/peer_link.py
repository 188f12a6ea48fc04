"""The sending half of two ranks' connection: one long-lived Exchange stream to a peer.

open       channel ready -> hello -> accepted
send       wait for credit, then all frames of one tensor; tensors never interleave
broken     the stream ended, or a send was cut off: what arrived is unknown, so nothing is
           repeated and every later send raises PeerLost
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc
import grpc.aio
import torch

from stagemesh.comm.echo import SentMessage
from stagemesh.comm.frames import (
    ExchangeCall,
    abort_frame,
    encode_message,
    frames_of,
    open_exchange,
)
from stagemesh.comm.mailbox import CreditWindow, message_cost
from stagemesh.comm.tasks import cancel_and_wait
from stagemesh.comm.transport import Envelope
from stagemesh.errors import CommError, GroupAborted, PeerLost, ProtocolError
from stagemesh.rpc.channels import open_channel, wait_ready
from stagemesh.rpc.convert import our_version
from stagemesh.rpc.handshake import PeerStatus, final_error
from stagemesh.rpc.status import from_rpc_error
from stagemesh.rpc.unix_socket import is_reachable, target_of
from stagemesh.rpc.v1 import comm_pb2

_CLOSE_SECONDS = 1.0
# A little longer than `final_error` may take.
_STATUS_SECONDS = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAddress:
    """Where a rank of a group is."""

    rank: int
    node_id: str
    address: str
    unix_path: str = ""
    """A unix socket of the rank, when it has one."""
    host_id: str = ""
    """Where the socket is (see stagemesh.rpc.unix_socket)."""
    world_rank: int | None = None
    """Of a member of a sub-group: its rank in the group that all began with."""

    def target(self) -> str:
        """What to connect to from this process: the unix socket if it is here, else the address."""
        if is_reachable(self.unix_path, host=self.host_id):
            return target_of(self.unix_path)
        return self.address

    @property
    def name(self) -> str:
        """Who it is, for errors: in a sub-group with the rank that others know it by."""
        if self.world_rank is None:
            return f"rank {self.rank}"
        return f"rank {self.rank} ({self._world}node {self.node_id})"

    def __str__(self) -> str:
        return f"rank {self.rank} ({self._world}node {self.node_id} at {self.address})"

    @property
    def _world(self) -> str:
        return "" if self.world_rank is None else f"rank {self.world_rank} of the world, "


def names_of(members: Sequence[PeerAddress]) -> list[str]:
    """The names of a sub-group's members; none for those of a world, whose ranks say it all."""
    is_world = all(member.world_rank is None for member in members)
    return [] if is_world else [member.name for member in members]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """What all links of a transport share."""

    group_id: str
    incarnation: int
    source_rank: int
    token: str | None
    capacity_bytes: int
    chunk_bytes: int
    connect_seconds: float
    """Limit of connecting, beside the deadline of the operation that needs the link."""


class PeerLink:
    """The stream to one peer. Made by `open_link`."""

    def __init__(
        self,
        peer: PeerAddress,
        *,
        config: LinkConfig,
        channel: grpc.aio.Channel,
        call: ExchangeCall,
        status: PeerStatus,
        on_broken: Callable[[CommError], None],
    ) -> None:
        self._peer = peer
        self._config = config
        self._channel = channel
        self._call = call
        self._status = status
        self._on_broken = on_broken
        self.last_sent: SentMessage | None = None
        """The last small message, to know its like."""
        self._broken = ""
        self._window = CreditWindow(capacity_bytes=config.capacity_bytes)
        # Frames of two tensors on one stream could not be told apart.
        self._writing = asyncio.Lock()
        self._acks = asyncio.ensure_future(self._read_acks())

    async def send(self, envelope: Envelope, tensor: torch.Tensor) -> None:
        """Send one message.

        Raises:
            PeerLost: the link is broken, or breaks now.
        """
        num_bytes = tensor.numel() * tensor.element_size()
        cost = message_cost(num_bytes)
        async with self._writing:
            await self._window.acquire(cost)
            try:
                if num_bytes <= self._config.chunk_bytes:
                    frame, self.last_sent = encode_message(envelope, tensor)
                    await self._write(frame)
                    return
                frames = frames_of(envelope, tensor, chunk_bytes=self._config.chunk_bytes)
                async with contextlib.aclosing(frames):
                    async for frame in frames:
                        await self._write(frame)
            except BaseException as error:
                # Also when cancelled: the peer waits for the rest of a tensor that never comes.
                self._break(f"a send was cut off ({type(error).__name__})")
                self._call.cancel()
                raise

    def can_send_now(self, num_bytes: int) -> bool:
        """Whether a message of so many bytes waits for nothing but the network."""
        return not self._writing.locked() and self._window.has_room(message_cost(num_bytes))

    async def notify_abort(self, cause: str) -> None:
        """Tell the peer that the group is aborted."""
        async with self._writing:
            await self._write(abort_frame(cause))

    async def close(self) -> None:
        """End the stream; the peer still takes what was sent."""
        self._broken = self._broken or "this rank left the group"
        with contextlib.suppress(TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._call.done_writing()
                # Ends when the peer has read all and closed its side.
                await asyncio.wait({self._acks})
        await cancel_and_wait([self._acks])
        self._call.cancel()
        await self._channel.close()

    async def _write(self, frame: bytes) -> None:
        if self._broken:
            raise self._lost()
        try:
            await self._call.write(frame)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            # The reader of acks learns why the stream ended.
            await asyncio.wait({self._acks}, timeout=_STATUS_SECONDS)
            self._break("its stream ended")
            raise self._lost() from error

    async def _read_acks(self) -> None:
        try:
            while True:
                ack = await self._call.read()
                if ack is grpc.aio.EOF:
                    break
                assert isinstance(ack, comm_pb2.ExchangeAck)
                self._window.release(ack.credit_bytes)
            self._break("it left the group")
        except grpc.aio.AioRpcError as raised:
            error = await final_error(self._call, raised, self._status)
            cause = from_rpc_error(error, operation="Exchange", peer=str(self._peer))
            if isinstance(cause, GroupAborted):
                # The peer's abort reaches us on this stream or on its own, whichever is faster.
                self._on_broken(cause)
            self._break(f"{error.code().name} {error.details()}")

    def _break(self, reason: str) -> None:
        if self._broken:
            return
        self._broken = reason
        self._window.fail(self._lost)
        self._on_broken(self._lost())

    def _lost(self) -> CommError:
        return PeerLost(
            f"{self._peer} is lost to group {self._config.group_id}: {self._broken}",
            rank=self._peer.rank,
            node_id=self._peer.node_id,
        )


async def open_link(
    peer: PeerAddress, *, config: LinkConfig, on_broken: Callable[[CommError], None]
) -> PeerLink:
    """Connect to a peer and wait until it accepts us. The caller may cancel at its deadline.

    Raises:
        PeerLost: the peer cannot be reached.
        StagemeshError: the peer refuses; the class is the peer's (VersionMismatch, ...).
    """
    channel = open_channel(peer.target(), token=config.token, kind="data")
    try:
        await _wait_connected(channel, peer, config)
        # No timeout: the stream lives as long as the group.
        call = open_exchange(channel)
        status = PeerStatus(call)
        async with asyncio.timeout(config.connect_seconds):
            await call.write(_hello(peer, config))
            ack = await call.read()
        if not isinstance(ack, comm_pb2.ExchangeAck) or not ack.accepted:
            raise ProtocolError(f"{peer} answered the hello without accepting it")
    except BaseException as error:
        await channel.close()
        if isinstance(error, grpc.aio.AioRpcError):
            raise from_rpc_error(error, operation="Exchange", peer=str(peer)) from error
        if isinstance(error, TimeoutError):
            raise _unreachable(peer, config, "it did not answer the hello") from error
        raise
    return PeerLink(
        peer, config=config, channel=channel, call=call, status=status, on_broken=on_broken
    )


async def _wait_connected(channel: grpc.aio.Channel, peer: PeerAddress, config: LinkConfig) -> None:
    try:
        await wait_ready(channel, address=peer.address, timeout_seconds=config.connect_seconds)
    except PeerLost as error:
        raise _unreachable(peer, config, str(error)) from error


def _unreachable(peer: PeerAddress, config: LinkConfig, why: str) -> PeerLost:
    return PeerLost(
        f"{peer} cannot be reached for group {config.group_id}: {why}",
        rank=peer.rank,
        node_id=peer.node_id,
    )


def _hello(peer: PeerAddress, config: LinkConfig) -> bytes:
    return comm_pb2.ExchangeFrame(
        hello=comm_pb2.ExchangeHello(
            version=our_version(),
            group_id=config.group_id,
            incarnation=config.incarnation,
            source_rank=config.source_rank,
            target_rank=peer.rank,
        )
    ).SerializeToString()
