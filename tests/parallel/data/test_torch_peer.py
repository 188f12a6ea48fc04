"""The same training as torch's DistributedDataParallel, in processes over Gloo."""

import asyncio
import contextlib

import pytest

from benchmarks.training import side_of, steps


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_losses_are_those_of_distributed_data_parallel() -> None:
    async with contextlib.AsyncExitStack() as stack:
        sides = {
            side: await stack.enter_async_context(side_of("dp", side)) for side in ("peer", "gloo")
        }
        await asyncio.gather(*(rank.read() for ranks in sides.values() for rank in ranks))
        losses = {
            side: [told.loss for _ in range(3) for told in await steps(ranks, 2)]
            for side, ranks in sides.items()
        }
    assert losses["gloo"] == pytest.approx(losses["peer"], rel=1e-5)
    # Negative control: each rank has a loss of its own, and so has each step.
    assert len({round(loss or 0, 4) for loss in losses["peer"]}) == 6
