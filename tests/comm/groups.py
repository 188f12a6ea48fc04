"""Groups of ranks in this process, over either transport."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from stagemesh.comm.async_group import AsyncGroup
from stagemesh.comm.local import LocalNetwork
from tests.comm.daemons import daemons, join

TRANSPORTS = ("local", "reordering", "grpc")


@contextlib.asynccontextmanager
async def groups(
    transport: str, size: int, *, timeout_seconds: float = 5.0, **sizes: int
) -> AsyncIterator[list[AsyncGroup]]:
    """One group per rank; `sizes` are direct_bytes and chunk_bytes."""
    if transport == "grpc":
        async with daemons(size) as started:
            await join(started, timeout_seconds=timeout_seconds)
            ranks = [daemon.servicer.group("g") for daemon in started]
            for group in ranks:
                group._direct_bytes = sizes.get("direct_bytes", group._direct_bytes)
                group._chunk_bytes = sizes.get("chunk_bytes", group._chunk_bytes)
            yield ranks
        return
    order = random.Random(size) if transport == "reordering" else None
    network = LocalNetwork(size=size, order=order)
    ranks = [
        AsyncGroup(network.join(rank), group_id="g", timeout_seconds=timeout_seconds, **sizes)
        for rank in range(size)
    ]
    try:
        yield ranks
    finally:
        for group in ranks:
            await group.close()


async def on_ranks(ranks: Sequence[AsyncGroup], run: Callable[[AsyncGroup], Any]) -> list[Any]:
    """What `run` gives on each rank: its result, or the error it raised."""
    return await asyncio.wait_for(
        asyncio.gather(*(run(group) for group in ranks), return_exceptions=True), 30
    )
