"""What sharing a stage takes two nodes: they become ranks of a group for a moment, and run one.

Group, thread and connections are those of a stage that the two would share (`node.stage_group`). So
where their threads cannot connect, the sums go through the group here too, and cost what they will.

    a small stage of one token: alone, both nodes at once,     how much slower they read weights
    and shared by the two                                      at once; what each sum adds to that
    some large sums, one after the other                       bytes per second, beyond that

A stage that is shared reads half of the weights on each node. What it takes beyond that is due to
its sums: their messages, the wait of each for the slower rank, calls, and smaller matrices. Nodes
of one machine share its memory as well; that grows with the weights, so it is counted on its own.

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
from node.free_memory import give_back_freed_memory
from node.other_memory import OtherMemory
from node.trial_stage import TrialStage, trial_shares
from stagemesh.comm.comm_loop import CommLoop
from stagemesh.comm.direct_group import DirectGroup
from stagemesh.comm.peer_link import PeerAddress
from stagemesh.comm.process_group import ProcessGroup
from stagemesh.comm.reduce import ReduceOp
from stagemesh.comm.service import CommServicer
from stagemesh.errors import ConfigError
from stagemesh.models.tensor_group import TensorGroup

_INCARNATION = 1
_SMALL_ELEMENTS = 576
_LARGE_ELEMENTS = 2**18
_LARGE_SUMS = (1, 5)
_LARGE_SECONDS = 0.05
"""About how long all large ones take."""

_NUM_LAYERS, _HIDDEN_SIZE = 4, 576
_ROUNDS = (1, 7)
_ROUNDS_SECONDS = 0.5
"""About how long all rounds of steps take."""
_MOST_SLOWDOWN = 4.0
"""What more than that was is no sharing of memory or cores, but something else that ran."""
_LEAST_SHARE = 0.1
"""Of a step, what reading weights takes at least, however much the overheads seem to be."""

_LEAST_SECONDS = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class SumTimes:
    """What sharing a stage takes two ranks."""

    sum_seconds: float
    """What each small sum adds."""
    bytes_per_second: float
    """Of a large one, beyond that."""
    slowdown: float
    """How many times longer the two read weights when both do at once; at least 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSteps:
    """Steps of one rank, each of one token."""

    narrow: Callable[[], None]
    """Of a stage with next to no weights."""
    whole: Callable[[], None]
    """Of one with weights."""
    shared: Callable[[], None]
    """Of the same one, shared by the ranks."""
    flush: Callable[[], None]
    """Empties the caches."""
    num_sums: int
    """In the shared one."""


async def probe_sums(
    comm: CommServicer,
    *,
    device: torch.device,
    group_id: str,
    rank: int,
    members: Sequence[PeerAddress],
    timeout_seconds: float,
) -> SumTimes:
    """Share a stage with another node, which is asked for the same as the other rank.

    Args:
        comm: of this node.
        device: what this node computes on.
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
        shares = trial_shares(_HIDDEN_SIZE, num_ranks=len(members))
        tensor_group = TensorGroup(process_group, shares)
        stack.callback(tensor_group.sums.close)
        times = await compute.run(lambda: _measure(tensor_group, device))
        await compute.run(give_back_freed_memory)
        return times


@torch.inference_mode()
def _measure(group: TensorGroup, device: torch.device) -> SumTimes:
    group.sums.connect()
    seconds, slowdown = measure_steps(group.sums, _trial_steps(group, device))
    large = torch.zeros(_LARGE_ELEMENTS)
    once = _times(group.sums, large, 1)[0]
    count = _agreed(group.sums, once, _LARGE_SUMS, total_seconds=_LARGE_SECONDS)
    many = median(_times(group.sums, large, count))
    small = median(_times(group.sums, torch.zeros(_SMALL_ELEMENTS), count))
    num_bytes = large.numel() * large.element_size()
    return SumTimes(
        sum_seconds=seconds,
        bytes_per_second=num_bytes / max(many - small, 0.05 * many, _LEAST_SECONDS),
        slowdown=slowdown,
    )


def _trial_steps(group: TensorGroup, device: torch.device) -> TrialSteps:
    narrow = TrialStage(_NUM_LAYERS, device=device)
    whole = TrialStage(_NUM_LAYERS, device=device, hidden_size=_HIDDEN_SIZE)
    shared = TrialStage(_NUM_LAYERS, device=device, hidden_size=_HIDDEN_SIZE, tensor_group=group)
    for stage in (narrow, whole, shared):
        stage.decode()
    return TrialSteps(
        narrow=narrow.decode,
        whole=whole.decode,
        shared=shared.decode,
        flush=OtherMemory(device).read,
        # After attention and MLP of each layer, of the token's row, and to draw the next one.
        num_sums=2 * _NUM_LAYERS + 2,
    )


def measure_steps(sums: DirectGroup, steps: TrialSteps) -> tuple[float, float]:
    """Seconds that a sum adds, and the slowdown: the same on both ranks.

    Medians over rounds, as other work on a host disturbs some of them.

    Args:
        sums: between the two ranks, both of which call this.
        steps: what this rank does.
    """

    def timed(step: Callable[[], None], *, by: int | None = None) -> float:
        """Seconds of the slower rank, or of rank `by` while the other one waits."""
        mine = by is None or by == sums.rank
        if mine:
            steps.flush()
        _slower(sums, 0.0)  # both begin together
        started = time.perf_counter()
        if mine:
            step()
        return _slower(sums, time.perf_counter() - started if mine else 0.0)

    def one_round() -> tuple[float, float]:
        fixed = [timed(steps.narrow, by=rank) for rank in range(sums.size)]
        whole = [timed(steps.whole, by=rank) for rank in range(sums.size)]
        reads = [
            max(w - f, _LEAST_SHARE * w, _LEAST_SECONDS) for f, w in zip(fixed, whole, strict=True)
        ]
        at_once = timed(steps.whole)
        slowest = max(range(sums.size), key=whole.__getitem__)
        slowdown = (at_once - fixed[slowest]) / reads[slowest]
        slowdown = min(max(slowdown, 1.0), _MOST_SLOWDOWN)
        parts = [f + slowdown * r / sums.size for f, r in zip(fixed, reads, strict=True)]
        return (timed(steps.shared) - max(parts)) / steps.num_sums, slowdown

    started = time.perf_counter()
    one_round()  # warms up
    count = _agreed(sums, time.perf_counter() - started, _ROUNDS, total_seconds=_ROUNDS_SECONDS)
    rounds = [one_round() for _ in range(count)]
    seconds = max(median(seconds for seconds, _ in rounds), _LEAST_SECONDS)
    return seconds, median(slowdown for _, slowdown in rounds)


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
    total_seconds: float,
) -> int:
    """How often to do what takes so many seconds: the same on both ranks."""
    least, most = limits
    return min(most, max(least, int(total_seconds / max(_slower(sums, seconds), _LEAST_SECONDS))))


def _slower(sums: DirectGroup, seconds: float) -> float:
    """The larger of both ranks' seconds."""
    return float(sums.all_reduce(torch.tensor([seconds]), op=ReduceOp.MAX)[0])
