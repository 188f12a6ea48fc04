"""Comm services on loopback, and drivers that call them."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from stagemesh.comm.frames import add_comm_service, reduce_op_to_proto
from stagemesh.comm.reduce import ReduceOp
from stagemesh.comm.service import COMM_SERVICE_NAME, CommServicer
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.codec import TensorAssembler, header_of, stream_parts
from stagemesh.rpc.convert import our_version
from stagemesh.rpc.server import RpcServer, Service
from stagemesh.rpc.v1 import comm_pb2, comm_pb2_grpc


@dataclass
class Daemon:
    """One comm service and a driver's stub to it."""

    node_id: str
    servicer: CommServicer
    server: RpcServer
    stub: comm_pb2_grpc.CommServiceStub
    stack: contextlib.AsyncExitStack = field(repr=False)

    async def stop(self) -> None:
        await self.stack.aclose()


async def start_daemon(
    node_id: str, *, token: str | None = None, bind: str = "127.0.0.1:0", **settings: float
) -> Daemon:
    async with contextlib.AsyncExitStack() as stack:
        servicer = CommServicer(node_id=node_id, token=token, **settings)
        service = Service(
            name=COMM_SERVICE_NAME,
            servicer=servicer,
            add=add_comm_service,
        )
        server = RpcServer(bind, services=[service], token=token, node_id=node_id)
        await stack.enter_async_context(server)
        stack.push_async_callback(servicer.close)
        channel = open_channel(server.address, token=token, kind="data")
        stack.push_async_callback(channel.close)
        stub = comm_pb2_grpc.CommServiceStub(channel)
        return Daemon(node_id, servicer, server, stub, stack.pop_all())


@contextlib.asynccontextmanager
async def daemons(size: int, **settings: float) -> AsyncIterator[list[Daemon]]:
    async with contextlib.AsyncExitStack() as stack:
        started = [await start_daemon(f"n{index}", **settings) for index in range(size)]
        for daemon in started:
            stack.push_async_callback(daemon.stop)
        yield started


@contextlib.asynccontextmanager
async def child_daemon(node_id: str) -> AsyncIterator[Any]:
    """A daemon in a process of its own (tests.comm.child)."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.comm.child",
        node_id,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    channel = None
    try:
        address = (await asyncio.wait_for(process.stdout.readline(), 30)).decode().strip()
        channel = open_channel(address, token=None, kind="data")
        yield SimpleNamespace(
            node_id=node_id,
            server=SimpleNamespace(address=address),
            stub=comm_pb2_grpc.CommServiceStub(channel),
            process=process,
        )
    finally:
        if channel is not None:
            await channel.close()
        if process.returncode is None:
            process.kill()
        await process.wait()
        process._transport.close()


async def join(
    members: Sequence[Daemon],
    *,
    group_id: str = "g",
    incarnation: int = 1,
    timeout_seconds: float = 5.0,
    ranks: Sequence[int] | None = None,
) -> None:
    """Make the daemons a group in this order; `ranks` limits who is told."""
    for rank in range(len(members)) if ranks is None else ranks:
        await members[rank].stub.JoinGroup(
            comm_pb2.JoinGroupRequest(
                version=our_version(),
                group_id=group_id,
                incarnation=incarnation,
                rank=rank,
                members=[
                    comm_pb2.GroupMember(node_id=m.node_id, address=m.server.address)
                    for m in members
                ],
                timeout_seconds=timeout_seconds,
            )
        )


async def _stream(
    call: comm_pb2.CommCall, tensor: torch.Tensor
) -> AsyncIterator[comm_pb2.CommTensor]:
    head: comm_pb2.CommCall | None = call
    async for part in stream_parts(tensor):
        yield comm_pb2.CommTensor(call=head, part=part)
        head = None


async def _collect(replies: AsyncIterator[comm_pb2.CommTensor]) -> torch.Tensor:
    assembler = TensorAssembler()
    tensor = None
    async for reply in replies:
        tensor = assembler.add(reply.part)
    assert tensor is not None
    return tensor


async def send(
    daemon: Daemon, tensor: torch.Tensor, *, peer: int, tag: int = 0, group_id: str = "g"
) -> None:
    call = comm_pb2.CommCall(group_id=group_id, peer_rank=peer, tag=tag)
    await daemon.stub.Send(_stream(call, tensor), timeout=30)


async def recv(
    daemon: Daemon,
    *,
    peer: int,
    tag: int = 0,
    like: torch.Tensor | None = None,
    group_id: str = "g",
) -> torch.Tensor:
    call = comm_pb2.CommCall(group_id=group_id, peer_rank=peer, tag=tag)
    expected = None if like is None else header_of(like)
    return await _collect(
        daemon.stub.Recv(comm_pb2.RecvRequest(call=call, expected=expected), timeout=30)
    )


async def all_reduce(
    daemon: Daemon, tensor: torch.Tensor, *, op: ReduceOp = ReduceOp.SUM, group_id: str = "g"
) -> torch.Tensor:
    call = comm_pb2.CommCall(group_id=group_id, reduce_op=reduce_op_to_proto(op))
    return await _collect(daemon.stub.AllReduce(_stream(call, tensor), timeout=30))


async def collective(
    daemon: Daemon,
    kind: "comm_pb2.CollectiveKind.ValueType",
    tensors: Sequence[torch.Tensor] = (),
    *,
    root: int = 0,
    op: ReduceOp | None = None,
    expected: Sequence[torch.Tensor] = (),
    group_id: str = "g",
) -> list[torch.Tensor]:
    """Call Collective; `expected` says dtypes and shapes."""
    call = comm_pb2.CommCall(
        group_id=group_id,
        collective=kind,
        root_rank=root,
        reduce_op=comm_pb2.REDUCE_OP_UNSPECIFIED if op is None else reduce_op_to_proto(op),
        expected=[header_of(tensor) for tensor in expected],
    )

    async def requests() -> AsyncIterator[comm_pb2.CommTensor]:
        yield comm_pb2.CommTensor(call=call)
        for tensor in tensors:
            async for part in stream_parts(tensor):
                yield comm_pb2.CommTensor(part=part)

    assembler = TensorAssembler()
    results = []
    async for reply in daemon.stub.Collective(requests(), timeout=30):
        tensor = assembler.add(reply.part)
        if tensor is not None:
            results.append(tensor)
    assembler.finish()
    return results
