"""A large tensor on its way does not keep a node from answering."""

import asyncio
import statistics
import time

import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stagemesh.rpc.channels import open_channel, wait_ready
from tests.comm.daemons import child_daemon, daemons, join, recv, send

NUM_BYTES = 256 * 2**20


async def _ping_every_50_ms(
    address: str, *, start: asyncio.Barrier, stop: asyncio.Event
) -> list[float]:
    """Seconds each health call took, from the moment that all are connected until `stop`."""
    waits = []
    async with open_channel(address, token=None, kind="control") as channel:
        await wait_ready(channel, address=address, timeout_seconds=10)
        await start.wait()
        stub = health_pb2_grpc.HealthStub(channel)
        while not stop.is_set():
            began = time.monotonic()
            reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=1)
            waits.append(time.monotonic() - began)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
            await asyncio.sleep(0.05)
    return waits


@pytest.mark.parametrize("strided", [False, True])
async def test_health_answers_while_256_mib_move(strided):
    numbers = torch.arange(NUM_BYTES // 4, dtype=torch.int32)
    if strided:
        tensor = torch.stack([numbers, numbers], dim=1)[:, 0]
        assert not tensor.is_contiguous()
    else:
        tensor = numbers
    async with daemons(1) as (first,), child_daemon("n1") as second:
        pair = [first, second]
        await join(pair, timeout_seconds=30)
        start, stop = asyncio.Barrier(3), asyncio.Event()
        pings = [
            asyncio.ensure_future(_ping_every_50_ms(d.server.address, start=start, stop=stop))
            for d in pair
        ]
        await start.wait()
        received, _ = await asyncio.gather(recv(pair[1], peer=0), send(pair[0], tensor, peer=1))
        stop.set()
        waits = [wait for node_waits in await asyncio.gather(*pings) for wait in node_waits]
    assert torch.equal(received, numbers)
    assert len(waits) >= 4
    # Every call had a deadline of 1 s, though one node and both drivers share a loop here.
    assert statistics.median(waits) < 0.1
