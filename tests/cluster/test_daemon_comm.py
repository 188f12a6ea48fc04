"""A whole node daemon, not only its service, carries tensors between the ranks of a group."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace

import grpc.aio
import pytest
import torch

from node.config import NodeConfig
from node.daemon import NodeDaemon
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.convert import our_version
from stagemesh.rpc.unix_socket import host_id
from stagemesh.rpc.v1 import comm_pb2, comm_pb2_grpc, node_pb2, node_pb2_grpc
from tests.comm.daemons import all_reduce, join, recv, send


@contextlib.asynccontextmanager
async def node_daemons(
    count: int, *, token: str | None = None, unix_socket: bool = False
) -> AsyncIterator[list[SimpleNamespace]]:
    """Daemons without a coordinator, each with a driver's stub."""
    async with contextlib.AsyncExitStack() as stack:
        members = []
        for index in range(count):
            config = NodeConfig(
                node_id=f"n{index}",
                coordinator=None,
                device="cpu",
                num_threads=1,
                token=token,
                unix_socket=unix_socket,
            )
            daemon = await stack.enter_async_context(NodeDaemon(config))
            channel = open_channel(daemon.address, token=token, kind="data")
            stack.push_async_callback(channel.close)
            stub = comm_pb2_grpc.CommServiceStub(channel)
            description = await node_pb2_grpc.NodeServiceStub(channel).Describe(
                node_pb2.DescribeRequest(version=our_version())
            )
            members.append(
                SimpleNamespace(
                    node_id=f"n{index}", server=daemon, stub=stub, description=description
                )
            )
        yield members


async def test_send_recv_and_all_reduce_between_three_daemons() -> None:
    tensors = [torch.full((3, 2), float(rank + 1), dtype=torch.bfloat16) for rank in range(3)]
    async with node_daemons(3, token="secret") as members:
        await join(members)
        sums = await asyncio.gather(
            *(all_reduce(m, t) for m, t in zip(members, tensors, strict=True))
        )
        received, _ = await asyncio.gather(
            recv(members[2], peer=0, tag=7), send(members[0], tensors[0], peer=2, tag=7)
        )
    assert all(torch.equal(s, torch.full((3, 2), 6.0, dtype=torch.bfloat16)) for s in sums)
    assert torch.equal(received, tensors[0])


@pytest.mark.skipif(not host_id(), reason="this system tells no boot id")
async def test_daemons_tell_of_their_unix_sockets_and_use_them() -> None:
    async with node_daemons(2, unix_socket=True) as pair:
        members = [
            comm_pb2.GroupMember(
                node_id=each.node_id,
                # Nobody is there: only the socket can have carried it.
                address="127.0.0.1:1",
                unix_path=each.description.unix_path,
                host_id=each.description.host_id,
            )
            for each in pair
        ]
        for rank, each in enumerate(pair):
            request = comm_pb2.JoinGroupRequest(
                version=our_version(),
                group_id="g",
                incarnation=1,
                rank=rank,
                members=members,
                timeout_seconds=5.0,
            )
            await each.stub.JoinGroup(request)
        sums = await asyncio.gather(*(all_reduce(each, torch.ones(3)) for each in pair))
    assert [each.tolist() for each in sums] == [[2.0] * 3] * 2
    # Control: unless it is switched on, there is none to tell of.
    async with node_daemons(1) as (daemon,):
        assert (daemon.description.unix_path, daemon.description.host_id) == ("", "")


async def test_without_the_group_an_operation_is_refused() -> None:
    async with node_daemons(1, token=None) as members:
        with pytest.raises(grpc.aio.AioRpcError, match="JoinGroup"):
            await all_reduce(members[0], torch.ones(2))
