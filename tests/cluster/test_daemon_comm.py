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
from stagemesh.rpc.v1 import comm_pb2_grpc
from tests.comm.daemons import all_reduce, join, recv, send


@contextlib.asynccontextmanager
async def node_daemons(count: int, *, token: str | None) -> AsyncIterator[list[SimpleNamespace]]:
    """Daemons without a coordinator, each with a driver's stub."""
    async with contextlib.AsyncExitStack() as stack:
        members = []
        for index in range(count):
            config = NodeConfig(
                node_id=f"n{index}", coordinator=None, device="cpu", num_threads=1, token=token
            )
            daemon = await stack.enter_async_context(NodeDaemon(config))
            channel = open_channel(daemon.address, token=token, kind="data")
            stack.push_async_callback(channel.close)
            stub = comm_pb2_grpc.CommServiceStub(channel)
            members.append(SimpleNamespace(node_id=f"n{index}", server=daemon, stub=stub))
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


async def test_without_the_group_an_operation_is_refused() -> None:
    async with node_daemons(1, token=None) as members:
        with pytest.raises(grpc.aio.AioRpcError, match="JoinGroup"):
            await all_reduce(members[0], torch.ones(2))
