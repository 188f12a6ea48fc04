"""What sums between two nodes take: they become ranks of a group for a moment, and add up.

Group, thread and connections are those of a stage that the two would share (`node.stage_group`). So
where their threads cannot connect, the sums go through the group here too, and cost what they will.

    products, and the same with a small sum behind each    seconds of a sum: what it adds
    some large sums, one after the other                   bytes per second, beyond that

The ranks of a stage add up between products of some hundred microseconds, of which now one and now
the other takes longer: each sum waits for the slower one. Sums one after the other show nothing of
it, and are the least that a sum can take.

Both ranks must do all of this equally often, and do not know how fast the other one is: how often
follows from the slower one's first tries, which the two agree on.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch

from node.executor import ComputeThread
from stagemesh.comm.comm_loop import CommLoop
from stagemesh.comm.direct_group import DirectGroup
from stagemesh.comm.peer_link import PeerAddress
from stagemesh.comm.process_group import ProcessGroup
from stagemesh.comm.reduce import ReduceOp
from stagemesh.comm.service import CommServicer
from stagemesh.errors import ConfigError

_INCARNATION = 1
_SMALL_ELEMENTS = 576
_LARGE_ELEMENTS = 2**18
_FIRST_SUMS = 8
_SMALL_SUMS = (8, 96)
_LARGE_SUMS = (1, 5)
_SECONDS = 0.05
"""About how long all small sums take, and all large ones."""

# 3.4 MiB, more than a core's own cache, times four: a layer's weights are not in it either.
_PRODUCT_SHAPE = (1536, 576)
_MATRICES = 4
_FIRST_WORK = 4
_WORK = (2, 16)
_BLOCKS = 9
_BLOCK_SECONDS = 0.01
"""About how long the work of a block takes, without sums."""

_LEAST_SECONDS = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class SumTimes:
    """What adding up takes two ranks."""

    sum_seconds: float
    """One sum of a small tensor."""
    bytes_per_second: float
    """Of a large one, beyond that."""


async def probe_sums(
    comm: CommServicer,
    *,
    group_id: str,
    rank: int,
    members: Sequence[PeerAddress],
    timeout_seconds: float,
) -> SumTimes:
    """Add up with another node, which is asked for the same as the other rank.

    Args:
        comm: of this node.
        group_id: of a group that nobody else is in.
        rank: this node's.
        members: the two, in rank order.
        timeout_seconds: of each wait for the other.

    Raises:
        ConfigError: there are not two members, or the group is there already.
        CommError: the other one does not come, or is lost.
    """
    if len(members) != 2:
        raise ConfigError(f"sums are probed between two nodes, got {len(members)}")
    async with contextlib.AsyncExitStack() as stack:
        compute = ComputeThread(f"compute-{group_id}")
        stack.callback(compute.close)
        group = await comm.open_group(
            group_id=group_id,
            rank=rank,
            members=members,
            incarnation=_INCARNATION,
            timeout_seconds=timeout_seconds,
        )
        stack.push_async_callback(comm.leave_group, group)
        process_group = ProcessGroup(
            group, loop=CommLoop(loop=asyncio.get_running_loop()), opener=comm, members=members
        )
        sums = DirectGroup(process_group)
        stack.callback(sums.close)
        return await compute.run(lambda: _measure(sums))


@torch.inference_mode()
def _measure(sums: DirectGroup) -> SumTimes:
    sums.connect()
    small, large = torch.zeros(_SMALL_ELEMENTS), torch.zeros(_LARGE_ELEMENTS)
    first = median(_times(sums, small, _FIRST_SUMS))
    few = _times(sums, small, _agreed(sums, first, _SMALL_SUMS))
    seconds = max(median(few), added_to_work(sums, small, _products()), _LEAST_SECONDS)
    once = _times(sums, large, 1)[0]
    many = median(_times(sums, large, _agreed(sums, once, _LARGE_SUMS)))
    num_bytes = large.numel() * large.element_size()
    return SumTimes(
        sum_seconds=seconds,
        bytes_per_second=num_bytes / max(many - seconds, 0.05 * many, _LEAST_SECONDS),
    )


def added_to_work(sums: DirectGroup, small: torch.Tensor, work: Callable[[int], object]) -> float:
    """Seconds that a sum adds to the work before it; the same on both ranks.

    Of several blocks the median, as other work on a host disturbs some of them.

    Args:
        sums: between the two ranks, both of which call this.
        small: to add up; its values do not matter.
        work: what this rank does before each sum, told how often it has.
    """

    def run(count: int, *, with_sums: bool) -> float:
        sums.all_reduce(small)  # both begin together
        started = time.perf_counter()
        for i in range(count):
            work(i)
            if with_sums:
                sums.all_reduce(small)
        return time.perf_counter() - started

    once = run(_FIRST_WORK, with_sums=False) / _FIRST_WORK
    count = _agreed(sums, once, _WORK, total_seconds=_BLOCK_SECONDS)
    added = []
    for _ in range(_BLOCKS):
        # Of the rank that is slower without sums: the other one waits in each for its larger share.
        alone = _slower(sums, run(count, with_sums=False))
        added.append((_slower(sums, run(count, with_sums=True)) - alone) / count)
    return median(added)


def _products() -> Callable[[int], object]:
    """One row by a matrix of a small layer, which was not used just before."""
    matrices = [torch.ones(_PRODUCT_SHAPE) for _ in range(_MATRICES)]
    row = torch.ones(_PRODUCT_SHAPE[1])
    return lambda i: torch.mv(matrices[i % _MATRICES], row)


def _times(sums: DirectGroup, tensor: torch.Tensor, count: int) -> list[float]:
    """Seconds of so many sums."""
    times = [time.perf_counter()]
    for _ in range(count):
        sums.all_reduce(tensor)
        times.append(time.perf_counter())
    return [after - before for before, after in pairwise(times)]


def _agreed(
    sums: DirectGroup,
    seconds: float,
    limits: tuple[int, int],
    *,
    total_seconds: float = _SECONDS,
) -> int:
    """How often to do what takes so many seconds: the same on both ranks."""
    least, most = limits
    return min(most, max(least, int(total_seconds / max(_slower(sums, seconds), _LEAST_SECONDS))))


def _slower(sums: DirectGroup, seconds: float) -> float:
    """The larger of both ranks' seconds."""
    return float(sums.all_reduce(torch.tensor([seconds]), op=ReduceOp.MAX)[0])
