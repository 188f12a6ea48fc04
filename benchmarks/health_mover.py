"""Moves a tensor from one node daemon to another, as a driver does, as often as it is told to.

    python -m benchmarks.health_mover NUM_BYTES ADDRESS ADDRESS

It lets the daemons join a group and says so. Each line of input is one transfer; when the tensor
has come back out of the second daemon, the answer is its seconds.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Sequence
from typing import TypeAlias

import torch

from stagemesh.rpc.channels import open_channel, wait_ready
from stagemesh.rpc.codec import TensorAssembler, stream_parts
from stagemesh.rpc.convert import our_version
from stagemesh.rpc.v1 import comm_pb2, comm_pb2_grpc

_GROUP = "moved"
_TIMEOUT_SECONDS = 60.0

# A string, as only the stubs for type checkers have it.
_Stub: TypeAlias = "comm_pb2_grpc.CommServiceAsyncStub"


async def _parts(tensor: torch.Tensor) -> AsyncIterator[comm_pb2.CommTensor]:
    call: comm_pb2.CommCall | None = comm_pb2.CommCall(group_id=_GROUP, peer_rank=1)
    async for part in stream_parts(tensor):
        yield comm_pb2.CommTensor(call=call, part=part)
        call = None


async def _receive(stub: _Stub) -> torch.Tensor:
    request = comm_pb2.RecvRequest(call=comm_pb2.CommCall(group_id=_GROUP, peer_rank=0))
    assembler = TensorAssembler()
    tensor = None
    async for reply in stub.Recv(request, timeout=_TIMEOUT_SECONDS):
        tensor = assembler.add(reply.part)
    assembler.finish()
    assert tensor is not None
    return tensor


async def _join(stubs: Sequence[_Stub], names: Sequence[str]) -> None:
    members = [
        comm_pb2.GroupMember(node_id=f"n{rank}", address=address)
        for rank, address in enumerate(names)
    ]
    for rank, stub in enumerate(stubs):
        request = comm_pb2.JoinGroupRequest(
            version=our_version(),
            group_id=_GROUP,
            incarnation=1,
            rank=rank,
            members=members,
            timeout_seconds=_TIMEOUT_SECONDS,
        )
        await stub.JoinGroup(request, timeout=_TIMEOUT_SECONDS)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


async def run(num_bytes: int, addresses: Sequence[str]) -> None:
    """Serve until standard input ends."""
    torch.set_num_threads(1)
    tensor = torch.arange(num_bytes // 4, dtype=torch.int32)
    async with contextlib.AsyncExitStack() as stack:
        stubs: list[_Stub] = []
        for address in addresses:
            channel = await stack.enter_async_context(
                open_channel(address, token=None, kind="data")
            )
            await wait_ready(channel, address=address, timeout_seconds=_TIMEOUT_SECONDS)
            stubs.append(comm_pb2_grpc.CommServiceStub(channel))
        await _join(stubs, addresses)
        _say("joined")
        while await asyncio.to_thread(sys.stdin.readline):
            started = time.perf_counter()
            received, _ = await asyncio.gather(
                _receive(stubs[1]), stubs[0].Send(_parts(tensor), timeout=_TIMEOUT_SECONDS)
            )
            seconds = time.perf_counter() - started
            if not torch.equal(received, tensor):
                raise RuntimeError("what came out is not what went in")
            del received
            _say(str(seconds))


if __name__ == "__main__":
    asyncio.run(run(int(sys.argv[1]), sys.argv[2:]))
