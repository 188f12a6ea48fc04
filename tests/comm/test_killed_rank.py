"""A rank in another process, killed while the others wait for it."""

import asyncio
import time

import grpc
import grpc.aio
import pytest
import torch

from tests.comm.daemons import all_reduce, child_daemon, daemons, join


@pytest.mark.parametrize("has_met", [True, False], ids=["in a later call", "before the first"])
async def test_the_survivor_names_a_killed_rank_within_the_timeout(has_met):
    async with daemons(1) as (survivor,), child_daemon("n1") as other:
        members = [survivor, other]
        await join(members, timeout_seconds=2.0)
        if has_met:
            results = await asyncio.gather(*(all_reduce(d, torch.ones(2)) for d in members))
            assert [result.tolist() for result in results] == [[2.0, 2.0]] * 2
            waiting = asyncio.ensure_future(all_reduce(survivor, torch.ones(2)))
            await asyncio.sleep(0.2)
            assert not waiting.done()
            other.process.kill()
        else:
            other.process.kill()
            await other.process.wait()
            waiting = asyncio.ensure_future(all_reduce(survivor, torch.ones(2)))
        start = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await waiting
        assert time.monotonic() - start < 4
        assert caught.value.code() in (
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.DEADLINE_EXCEEDED,
        )
        assert "rank 1" in caught.value.details()
