"""CommService: the groups of one process, and the Exchange streams of the other ranks'.

A process opens its own groups with `open_group`. On a node a driver does so from outside: it joins
its rank (JoinGroup) and then sends, receives and calls collectives through the daemon. Tensors
between ranks go from server to server. A group lives until it is left, a higher incarnation of it,
or the end of the server.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import grpc.aio

from stagemesh.comm.async_group import AsyncGroup
from stagemesh.comm.driver_calls import first_call, read_tensor, read_tensors, run_collective
from stagemesh.comm.frames import decode_frame, reduce_op_from_proto, spec_from_header
from stagemesh.comm.grpc_transport import GrpcTransport
from stagemesh.comm.member_record import member_from_proto
from stagemesh.comm.message_group import DEFAULT_DIRECT_BYTES, DEFAULT_MESSAGE_BYTES
from stagemesh.comm.peer_link import PeerAddress, names_of
from stagemesh.errors import (
    ConfigError,
    GroupAborted,
    NotReady,
    ProtocolError,
)
from stagemesh.rpc.codec import DEFAULT_MAX_TENSOR_BYTES, stream_parts
from stagemesh.rpc.convert import check_version
from stagemesh.rpc.v1 import comm_pb2, comm_pb2_grpc

logger = logging.getLogger(__name__)

COMM_SERVICE_NAME = comm_pb2.DESCRIPTOR.services_by_name["CommService"].full_name

MAX_TIMEOUT_SECONDS = 24 * 3600.0
MAX_GROUP_SIZE = 4096
MAX_GROUPS = 1024

# How long a peer's hello waits here for our own driver to join.
_JOIN_WAIT_SECONDS = 60.0

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Membership:
    """This process's part of a group."""

    group: AsyncGroup
    transport: GrpcTransport


class CommServicer(comm_pb2_grpc.CommServiceServicer):
    """Serves stagemesh.rpc.v1.CommService for one process."""

    def __init__(
        self,
        *,
        node_id: str,
        token: str | None = None,
        max_tensor_bytes: int = DEFAULT_MAX_TENSOR_BYTES,
        join_wait_seconds: float = _JOIN_WAIT_SECONDS,
        unix_sockets: bool = False,
    ) -> None:
        """Make a servicer without groups.

        Args:
            node_id: this node, or the name of this process.
            token: shown to the servers of other ranks.
            max_tensor_bytes: larger tensors are refused, from drivers and peers.
            join_wait_seconds: how long a peer that is early waits for our JoinGroup.
            unix_sockets: whether to reach members of this host over theirs, where they have one.
        """
        self._node_id = node_id
        self._token = token
        self._max_tensor_bytes = max_tensor_bytes
        self._join_wait = join_wait_seconds
        self._unix_sockets = unix_sockets
        self._memberships: dict[str, _Membership] = {}
        self._joined = asyncio.Condition()
        self._is_closed = False

    async def close(self) -> None:
        """Leave all groups. May be called again."""
        async with self._joined:
            self._is_closed = True
            self._joined.notify_all()
        memberships, self._memberships = list(self._memberships.values()), {}
        await asyncio.gather(*(member.group.close() for member in memberships))

    def group(self, group_id: str) -> AsyncGroup:
        """The group that this process has joined.

        Raises:
            NotReady: it is in no such group.
        """
        member = self._memberships.get(group_id)
        if member is None:
            raise NotReady(
                f"node {self._node_id} is in no group {group_id!r}; call JoinGroup first"
            )
        return member.group

    async def open_group(
        self,
        *,
        group_id: str,
        rank: int,
        members: Sequence[PeerAddress],
        incarnation: int,
        timeout_seconds: float,
        rank_names: Sequence[str] | None = None,
        direct_bytes: int = DEFAULT_DIRECT_BYTES,
        chunk_bytes: int = DEFAULT_MESSAGE_BYTES,
    ) -> AsyncGroup:
        """Make this process a rank of a group; a higher incarnation replaces the one before.

        Args:
            group_id: name of the group, the same on all ranks.
            rank: this rank.
            members: all ranks in rank order, this one included.
            incarnation: version of the group, the same on all ranks.
            timeout_seconds: deadline of every operation that sets none of its own.
            rank_names: who the ranks are in errors, where their numbers do not say it.
            direct_bytes, chunk_bytes: see AsyncGroup; equal on all ranks.

        Raises:
            ConfigError: a value is out of range, or the incarnation is not new.
            NotReady: this server is stopping.
        """
        _check_membership(group_id, rank, members, timeout_seconds)
        if self._is_closed:
            raise NotReady(f"node {self._node_id} is stopping")
        before = self._memberships.get(group_id)
        if before is not None and before.group.incarnation >= incarnation:
            raise ConfigError(
                f"node {self._node_id} has joined incarnation {before.group.incarnation} of group "
                f"{group_id!r}; joining again needs a higher one, got {incarnation}"
            )
        if before is None and len(self._memberships) >= MAX_GROUPS:
            raise ConfigError(f"node {self._node_id} is in {MAX_GROUPS} groups, which is the limit")
        if not self._unix_sockets:
            members = [replace(member, unix_path="") for member in members]
        transport = GrpcTransport(
            rank,
            peers=members,
            group_id=group_id,
            incarnation=incarnation,
            token=self._token,
            timeout_seconds=timeout_seconds,
            max_tensor_bytes=self._max_tensor_bytes,
        )
        group = AsyncGroup(
            transport,
            group_id=group_id,
            timeout_seconds=timeout_seconds,
            rank_names=names_of(members) if rank_names is None else rank_names,
            direct_bytes=direct_bytes,
            chunk_bytes=chunk_bytes,
        )
        async with self._joined:
            self._memberships[group_id] = _Membership(group=group, transport=transport)
            self._joined.notify_all()
        if before is not None:
            await before.group.close()
        logger.info("joined group", extra={"group_id": group_id, "group_rank": rank})
        return group

    async def leave_group(self, group: AsyncGroup) -> None:
        """Leave a group, unless a later incarnation has taken its place. May be called again."""
        member = self._memberships.get(group.group_id)
        if member is not None and member.group is group:
            del self._memberships[group.group_id]
        await group.close()

    async def JoinGroup(  # noqa: N802
        self, request: comm_pb2.JoinGroupRequest, context: _Context
    ) -> comm_pb2.JoinGroupReply:
        """Open a group for the driver of this node."""
        check_version(request.version, peer=f"the driver of group {request.group_id!r}")
        await self.open_group(
            group_id=request.group_id,
            rank=request.rank,
            members=[
                member_from_proto(member, rank=rank) for rank, member in enumerate(request.members)
            ],
            incarnation=request.incarnation,
            timeout_seconds=request.timeout_seconds,
            direct_bytes=(
                request.direct_bytes if request.HasField("direct_bytes") else DEFAULT_DIRECT_BYTES
            ),
            chunk_bytes=(
                request.chunk_bytes if request.HasField("chunk_bytes") else DEFAULT_MESSAGE_BYTES
            ),
        )
        return comm_pb2.JoinGroupReply()

    async def LeaveGroup(  # noqa: N802
        self, request: comm_pb2.LeaveGroupRequest, context: _Context
    ) -> comm_pb2.LeaveGroupReply:
        """Leave a group; leaving one that is not joined is fine, so that it may be repeated."""
        member = self._memberships.pop(request.group_id, None)
        if member is not None:
            await member.group.close()
        return comm_pb2.LeaveGroupReply()

    async def Send(  # noqa: N802
        self, request_iterator: AsyncIterator[comm_pb2.CommTensor], context: _Context
    ) -> comm_pb2.SendReply:
        """Send the driver's tensor to a rank."""
        call, requests = await first_call(request_iterator, seconds=self._join_wait)
        group = self.group(call.group_id)
        tensor = await read_tensor(requests, group, max_bytes=self._max_tensor_bytes)
        await group.send(tensor, dst=call.peer_rank, tag=call.tag)
        return comm_pb2.SendReply()

    async def Recv(  # noqa: N802
        self, request: comm_pb2.RecvRequest, context: _Context
    ) -> AsyncIterator[comm_pb2.CommTensor]:
        """Hand out the next tensor of a rank."""
        group = self.group(request.call.group_id)
        has_expected = request.HasField("expected")
        tensor = await group.recv_tensor(
            src=request.call.peer_rank,
            tag=request.call.tag,
            expected=spec_from_header(request.expected) if has_expected else None,
        )
        async for part in stream_parts(tensor):
            yield comm_pb2.CommTensor(part=part)

    async def AllReduce(  # noqa: N802
        self, request_iterator: AsyncIterator[comm_pb2.CommTensor], context: _Context
    ) -> AsyncIterator[comm_pb2.CommTensor]:
        """Reduce the driver's tensor with those of the other ranks' drivers."""
        call, requests = await first_call(request_iterator, seconds=self._join_wait)
        group = self.group(call.group_id)
        op = reduce_op_from_proto(call.reduce_op)
        tensor = await read_tensor(requests, group, max_bytes=self._max_tensor_bytes)
        await group.all_reduce(tensor, op=op)
        async for part in stream_parts(tensor):
            yield comm_pb2.CommTensor(part=part)

    async def Collective(  # noqa: N802
        self, request_iterator: AsyncIterator[comm_pb2.CommTensor], context: _Context
    ) -> AsyncIterator[comm_pb2.CommTensor]:
        """Take part in any collective with the driver's tensors, and hand out what it gives."""
        limit = self._max_tensor_bytes
        call, requests = await first_call(request_iterator, seconds=self._join_wait)
        group = self.group(call.group_id)
        tensors = await read_tensors(requests, group, max_bytes=limit, at_most=group.size)
        for result in await run_collective(group, call, tensors, max_bytes=limit):
            async for part in stream_parts(result):
                yield comm_pb2.CommTensor(part=part)

    async def Exchange(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[bytes], context: _Context
    ) -> AsyncIterator[comm_pb2.ExchangeAck]:
        """Take another rank's messages, for as long as the group lives.

        Served by `add_comm_service`, which hands its frames over as bytes.
        """
        frames = aiter(request_iterator)
        async with asyncio.timeout(self._join_wait):
            first = await anext(frames, None)
        frame = None if first is None else decode_frame(first)
        if frame is None or not frame.HasField("hello"):
            raise ProtocolError("the first frame of an Exchange stream must be a hello")
        hello = frame.hello
        check_version(hello.version, peer=f"rank {hello.source_rank} of group {hello.group_id!r}")
        member = await self._wait_joined(hello)
        group = member.group
        if hello.target_rank != group.rank or not 0 <= hello.source_rank < group.size:
            raise ProtocolError(
                f"hello from rank {hello.source_rank} to rank {hello.target_rank} reached rank "
                f"{group.rank} of {group.size} in group {hello.group_id!r}; "
                "the members' addresses differ between the ranks"
            )
        acks = member.transport.serve_peer(hello.source_rank, frames)
        async with contextlib.aclosing(acks):
            async for ack in acks:
                yield ack

    async def _wait_joined(self, hello: comm_pb2.ExchangeHello) -> _Membership:
        def is_decided() -> bool:
            member = self._memberships.get(hello.group_id)
            return self._is_closed or (
                member is not None and member.group.incarnation >= hello.incarnation
            )

        try:
            async with asyncio.timeout(self._join_wait), self._joined:
                await self._joined.wait_for(is_decided)
        except TimeoutError:
            raise NotReady(
                f"node {self._node_id} has not joined incarnation {hello.incarnation} of group "
                f"{hello.group_id!r} in {self._join_wait:g} s"
            ) from None
        member = self._memberships.get(hello.group_id)
        if member is None:
            raise NotReady(f"node {self._node_id} is stopping")
        if member.group.incarnation > hello.incarnation:
            raise GroupAborted(
                f"incarnation {hello.incarnation} of group {hello.group_id!r} is over; node "
                f"{self._node_id} has joined {member.group.incarnation}"
            )
        return member


def _check_membership(
    group_id: str, rank: int, members: Sequence[PeerAddress], timeout_seconds: float
) -> None:
    size = len(members)
    if not group_id:
        raise ConfigError("group_id must not be empty")
    if not 1 <= size <= MAX_GROUP_SIZE:
        raise ConfigError(f"a group has 1 to {MAX_GROUP_SIZE} members, got {size}")
    if not 0 <= rank < size:
        raise ConfigError(f"rank must be in [0, {size}), got {rank}")
    if not 0 < timeout_seconds <= MAX_TIMEOUT_SECONDS:
        raise ConfigError(
            f"timeout_seconds must be in (0, {MAX_TIMEOUT_SECONDS:g}], got {timeout_seconds}"
        )
    if any(not member.address or not member.node_id for member in members):
        raise ConfigError("each member needs a node_id and an address")
