"""The ranks that run a stage together, seen from one of them: their group and its compute thread.

The group is opened over the daemon's own comm service, at the addresses that the coordinator knows
from the nodes' descriptions. Over Gloo the ranks first meet in such a group, where rank 0 tells the
others where its store is.

A stage with other ranks has a compute thread of its own. It waits there for the others, and with
one thread for several stages two nodes could wait for each other's next one.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from node.executor import ComputeThread
from stagemesh.comm.async_group import AsyncGroup
from stagemesh.comm.comm_loop import CommLoop
from stagemesh.comm.gloo_opener import GlooOpener, connect_store, serve_store
from stagemesh.comm.member_record import member_from_proto
from stagemesh.comm.peer_link import PeerAddress
from stagemesh.comm.process_group import ProcessGroup
from stagemesh.comm.service import CommServicer
from stagemesh.errors import ConfigError, ProtocolError
from stagemesh.models.tensor_group import TensorGroup
from stagemesh.placement.tensor_shares import TensorShares
from stagemesh.rpc.address import split_address
from stagemesh.rpc.convert import tensor_shares_from_proto
from stagemesh.rpc.security import is_loopback
from stagemesh.rpc.v1 import node_pb2

T = TypeVar("T")

BACKENDS = ("grpc", "gloo")
"""What may carry the tensors of a stage's ranks."""

_ADDRESS_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """With whom, and as which rank, a node runs a stage."""

    group_id: str
    incarnation: int
    rank: int
    members: tuple[PeerAddress, ...]
    shares: TensorShares
    backend: str
    timeout_seconds: float

    @property
    def rank_names(self) -> list[str]:
        """Who the ranks are, for errors."""
        return [f"rank {member.rank} (node {member.node_id})" for member in self.members]


def group_request(request: node_pb2.LoadStageRequest, *, node_id: str) -> GroupRequest | None:
    """The group that a request to load asks for; None for a stage on one node.

    Raises:
        ConfigError: the shares make no sense, or the backend is not one.
        ProtocolError: the rank is not that of this node, or there are shares for others.
    """
    if not request.HasField("tensor_group"):
        return None
    group = request.tensor_group
    members = tuple(member_from_proto(m, rank=rank) for rank, m in enumerate(group.members))
    shares = tensor_shares_from_proto(request.tensor_shares)
    rank = request.tensor_rank
    if shares.num_ranks != len(members):
        raise ProtocolError(
            f"stage {request.stage} has {len(members)} ranks and shares for {shares.num_ranks}"
        )
    if rank >= len(members) or members[rank].node_id != node_id:
        names = ", ".join(member.node_id for member in members)
        raise ProtocolError(
            f"node {node_id} was told to be rank {rank} of stage {request.stage}, whose ranks are "
            f"{names}"
        )
    backend = request.tensor_backend or BACKENDS[0]
    if backend not in BACKENDS:
        raise ConfigError(
            f"the ranks of a stage are connected by {' or '.join(BACKENDS)}, got {backend!r}"
        )
    return GroupRequest(
        group_id=group.group_id,
        incarnation=group.incarnation,
        rank=rank,
        members=members,
        shares=shares,
        backend=backend,
        timeout_seconds=group.timeout_seconds,
    )


class StageGroup:
    """An open group and the thread that computes for it. Made by `open_stage_group`."""

    def __init__(
        self, tensor_group: TensorGroup, compute: ComputeThread, stack: contextlib.AsyncExitStack
    ) -> None:
        self.tensor_group = tensor_group
        self.compute = compute
        self._stack = stack

    @property
    def is_over(self) -> bool:
        """Whether a failure ended the group: its ranks can compute nothing more together."""
        return self.tensor_group.process_group.async_group.is_over

    async def close(self) -> None:
        """Leave the group, which wakes whoever waits in it, here and there. May be called again."""
        await self._stack.aclose()


async def open_stage_group(request: GroupRequest, *, comm: CommServicer) -> StageGroup:
    """Make this node a rank of a stage.

    Over gRPC this waits for nobody: the ranks meet once they have loaded. Over Gloo it waits until
    all are here.

    Raises:
        ConfigError: a value is out of range, or the incarnation is not new.
        CommError: the ranks do not come together within the group's limit.
    """
    async with contextlib.AsyncExitStack() as stack:
        compute = ComputeThread(f"compute-{request.group_id}")
        stack.callback(compute.close)
        group = await comm.open_group(
            group_id=request.group_id,
            rank=request.rank,
            members=request.members,
            incarnation=request.incarnation,
            timeout_seconds=request.timeout_seconds,
            rank_names=request.rank_names,
        )
        stack.push_async_callback(comm.leave_group, group)
        if request.backend == "gloo":
            group = await _open_gloo(request, group, compute, stack)
        process_group = ProcessGroup(
            group,
            loop=CommLoop(loop=asyncio.get_running_loop()),
            opener=comm,
            members=request.members,
        )
        tensor_group = TensorGroup(process_group, request.shares)
        return StageGroup(tensor_group, compute, stack.pop_all())


async def _open_gloo(
    request: GroupRequest,
    meeting: AsyncGroup,
    compute: ComputeThread,
    stack: contextlib.AsyncExitStack,
) -> AsyncGroup:
    """The same ranks over Gloo. `meeting` stays open as long: rank 0 may be done first."""
    seconds = request.timeout_seconds
    host, _ = split_address(request.members[request.rank].address)
    told = torch.zeros(_ADDRESS_BYTES, dtype=torch.uint8)

    async def blocking(function: Callable[[], T]) -> T:
        return await compute.run(function)

    if request.rank == 0:
        served = await blocking(
            lambda: serve_store(f"{host}:0", advertise=None, timeout_seconds=seconds)
        )
        raw = served.address.encode()
        told[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        await meeting.broadcast(told, src=0)
        store = served.store
    else:
        await meeting.broadcast(told, src=0)
        address = bytes(told.tolist()).rstrip(b"\0").decode(errors="replace")
        store = await blocking(lambda: connect_store(address, timeout_seconds=seconds))
    opener = GlooOpener(store, host="127.0.0.1" if is_loopback(host) else host)
    group = await opener.open_group(
        group_id=request.group_id,
        rank=request.rank,
        members=request.members,
        incarnation=request.incarnation,
        timeout_seconds=seconds,
        rank_names=request.rank_names,
    )
    stack.push_async_callback(opener.leave_group, group)
    return group
