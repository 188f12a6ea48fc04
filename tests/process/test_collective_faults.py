"""Ranks in processes of their own that die or hang in a collective, and what the others see."""

import asyncio
import contextlib
import json
import re
import signal
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from tests.process.children import Child, Children, stopped

TIMEOUT_SECONDS = 3.0
LARGE = 8 * 2**20  # elements: 32 MiB, so that there is a middle to be in


def tell(child: Child, **order: Any) -> None:
    assert child.process.stdin is not None
    child.process.stdin.write(json.dumps(order).encode() + b"\n")
    child.process.stdin.flush()


async def all_say(ranks: list[Child], event: str) -> list[dict[str, Any]]:
    return [await rank.next_event(event) for rank in ranks]


@contextlib.asynccontextmanager
async def world(processes: Children, folder: Path, size: int) -> AsyncGenerator[list[Child], None]:
    """Ranks that have met and have reduced once."""
    arguments = ("tests.support.rank_process", str(folder), "grpc", str(TIMEOUT_SECONDS))
    ranks = [processes.start(*arguments) for _ in range(size)]
    await all_say(ranks, "started")
    await join(ranks, name="world", incarnation=1)
    await reduce_all(ranks, name="world", numel=4)
    yield ranks


async def join(ranks: list[Child], *, name: str, incarnation: int) -> None:
    for rank, child in enumerate(ranks):
        tell(child, do="join", name=name, rank=rank, size=len(ranks), incarnation=incarnation)
    await all_say(ranks, "joined")


async def reduce_all(ranks: list[Child], *, name: str, numel: int) -> None:
    """All of them reduce, and it works."""
    for child in ranks:
        tell(child, do="all_reduce", name=name, numel=numel)
    for result in await all_say(ranks, "reduced"):
        assert result["first"] == result["last"] == len(ranks)


async def check_failed(survivors: list[Child], lost: int) -> None:
    """Each raised in time, and named the operation and the rank."""
    for result in await all_say(survivors, "failed"):
        assert result["error"] in ("PeerLost", "CollectiveTimeout"), result
        assert re.match(rf"all_reduce in group .*: (waiting for )?rank {lost}\b", result["text"]), (
            result
        )
        assert result["seconds"] < TIMEOUT_SECONDS + 2.0, result


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_survivors_name_the_rank_and_go_on_in_a_fresh_group(
    number: signal.Signals, processes: Children, tmp_path: Path
) -> None:
    async with world(processes, tmp_path, 3) as ranks, contextlib.AsyncExitStack() as stack:
        survivors, lost = ranks[:2], ranks[2]
        for child in ranks:
            tell(child, do="all_reduce", name="world", numel=LARGE)
        await asyncio.sleep(0.02)
        if number == signal.SIGKILL:
            lost.kill()
        else:
            await stack.enter_async_context(stopped(lost))
        await check_failed(survivors, 2)
        await join(survivors, name="fresh", incarnation=2)
        await reduce_all(survivors, name="fresh", numel=LARGE)


async def test_a_rank_that_ends_before_the_first_call_of_a_new_subgroup(
    processes: Children, tmp_path: Path
) -> None:
    async with world(processes, tmp_path, 3) as ranks:
        for child in ranks:
            tell(child, do="subgroup", ranks=[2, 0, 1])
        await all_say(ranks, "made")
        tell(ranks[2], do="exit")
        assert await ranks[2].wait() == 3
        survivors = ranks[:2]
        for child in survivors:
            tell(child, do="all_reduce", name="sub", numel=4)
        # By its rank in the sub-group.
        await check_failed(survivors, 0)


async def test_without_a_fault_all_of_it_works(processes: Children, tmp_path: Path) -> None:
    """Negative control: the same steps, but nobody is lost."""
    async with world(processes, tmp_path, 3) as ranks:
        await reduce_all(ranks, name="world", numel=LARGE)
        for child in ranks:
            tell(child, do="subgroup", ranks=[2, 0, 1])
        await all_say(ranks, "made")
        await reduce_all(ranks, name="sub", numel=4)
