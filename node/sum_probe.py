"""What sums between two nodes take: they become ranks of a group for a moment, and add up.

Group, thread and connections are those of a stage that the two would share (`node.stage_group`). So
where their threads cannot connect, the sums go through the group here too, and cost what they will.

    some small sums, one after the other      seconds of a sum, their median
    some large ones                           bytes per second, beyond that

Both ranks must add up equally often, and do not know how fast the other one is: how often follows
from the slower one's first sums, which the two agree on.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
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
    seconds = max(median(few), _LEAST_SECONDS)
    once = _times(sums, large, 1)[0]
    many = median(_times(sums, large, _agreed(sums, once, _LARGE_SUMS)))
    num_bytes = large.numel() * large.element_size()
    return SumTimes(
        sum_seconds=seconds,
        bytes_per_second=num_bytes / max(many - seconds, 0.05 * many, _LEAST_SECONDS),
    )


def _times(sums: DirectGroup, tensor: torch.Tensor, count: int) -> list[float]:
    """Seconds of so many sums."""
    times = [time.perf_counter()]
    for _ in range(count):
        sums.all_reduce(tensor)
        times.append(time.perf_counter())
    return [after - before for before, after in pairwise(times)]


def _agreed(sums: DirectGroup, seconds: float, limits: tuple[int, int]) -> int:
    """How many sums of so many seconds to time: the same on both ranks."""
    slower = float(sums.all_reduce(torch.tensor([seconds]), op=ReduceOp.MAX)[0])
    least, most = limits
    return min(most, max(least, int(_SECONDS / max(slower, _LEAST_SECONDS))))
