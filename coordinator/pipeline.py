"""An open pipeline: the streams of one incarnation of a deployment.

    coordinator --steps--> stage 0 --activations--> stage 1 --> ... --> stage p-1
         ^                    | failures              | failures           | tokens, failures
         `--------------------+-----------------------+--------------------'

Activations never come by here. Where ranks share a stage, each is sent the steps: the first stage's
from here, rank j of a later one's by rank j % n of the n before it, so that an activation crosses
once for each rank that needs it. Rank 0 of the last stage tells the tokens, each rank its failures.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise

from coordinator.load_order import LoadClock, LoadOrder, LoadProgress
from coordinator.node_link import NodeLink, StepStream
from stagemesh.errors import CommError, PeerLost, StagemeshError
from stagemesh.layout import Plan
from stagemesh.steps import Step, StepResult

logger = logging.getLogger(__name__)

_FAILURES_KEPT = 1024
_CAUSE_SECONDS = 1.0


class Pipeline:
    """Sends steps in and hands results out.

    Args:
        links: by stage, the nodes of its ranks.
        order: what the nodes have loaded.
        on_result: awaited with each result, in the order of arrival.
        on_broken: called once, with the error, when a stream breaks.
    """

    def __init__(
        self,
        links: Sequence[Sequence[NodeLink]],
        order: LoadOrder,
        *,
        on_result: Callable[[StepResult], Awaitable[None]],
        on_broken: Callable[[StagemeshError], None],
    ) -> None:
        self._stages = tuple(tuple(ranks) for ranks in links)
        self._links = tuple(link for ranks in links for link in ranks)
        self._order = order
        self._on_result = on_result
        self._on_broken = on_broken
        self._steps: list[StepStream] = []
        self._failed_steps: deque[int] = deque(maxlen=_FAILURES_KEPT)
        self._watchers: list[asyncio.Task[None]] = []
        self._is_broken = False

    async def open(self, *, timeout_seconds: float) -> None:
        """Link the stages, watch each of them and open the stream to the first.

        Raises:
            StagemeshError: a hop does not work; the text names both its nodes.
        """
        for senders, receivers in pairwise(self._stages):
            for rank, receiver in enumerate(receivers):
                await senders[rank % len(senders)].link_stage(
                    self._order.deployment_id,
                    receiver.node,
                    next_tensor_rank=rank,
                    timeout_seconds=timeout_seconds,
                )
        loop = asyncio.get_running_loop()
        accepted: list[asyncio.Future[None]] = [loop.create_future() for _ in self._links]
        for link, ready in zip(self._links, accepted, strict=True):
            self._watchers.append(
                asyncio.create_task(self._watch(link, ready), name=f"results-{link.node.node_id}")
            )
        done, waiting = await asyncio.wait(
            accepted, timeout=timeout_seconds, return_when=asyncio.FIRST_EXCEPTION
        )
        errors = [error for future in done if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        if waiting:
            silent = next(
                link for link, f in zip(self._links, accepted, strict=True) if f in waiting
            )
            raise PeerLost(
                f"{silent} did not accept a watcher within {timeout_seconds:.1f} s",
                node_id=silent.node.node_id,
            )
        for rank, link in enumerate(self._stages[0]):
            self._steps.append(await link.open_steps(self._order, tensor_rank=rank))

    async def send(self, step: Step) -> None:
        """Send a step to the first stage; a stream that breaks here is reported as any other."""
        if self._is_broken:
            return
        sends = [stream.send(step) for stream in self._steps]
        if len(sends) == 1:
            try:
                await sends[0]
            except StagemeshError as error:
                self._broke(error)
            return
        # All are tried: a write that is cut off would end that rank's stream.
        for outcome in await asyncio.gather(*sends, return_exceptions=True):
            if isinstance(outcome, StagemeshError):
                self._broke(outcome)
            elif isinstance(outcome, BaseException):
                raise outcome

    async def close(self) -> None:
        """Close all streams; the stages stay loaded."""
        self._is_broken = True
        for task in self._watchers:
            task.cancel()
        if self._watchers:
            await asyncio.wait(self._watchers, timeout=5.0)
        self._watchers.clear()
        for stream in self._steps:
            stream.close()
        self._steps.clear()

    async def _watch(self, link: NodeLink, accepted: asyncio.Future[None]) -> None:
        try:
            async with contextlib.aclosing(link.watch_results(self._order)) as results:
                async for result in results:
                    if result is None:
                        accepted.set_result(None)
                    elif self._is_news(result):
                        await self._on_result(result)
        except StagemeshError as error:
            if not accepted.done():
                accepted.set_exception(error)
            else:
                self._broke(error)

    def _is_news(self, result: StepResult) -> bool:
        """Whether no other rank has told of the same failure: what all refuse, each reports."""
        if result.failure is None:
            return True
        is_known = result.step_id in self._failed_steps
        self._failed_steps.append(result.step_id)
        return not is_known

    def _broke(self, error: StagemeshError) -> None:
        if not self._is_broken:
            self._is_broken = True
            self._on_broken(error)


async def load_stages(
    plan: Plan,
    links: Sequence[Sequence[NodeLink]],
    order: LoadOrder,
    *,
    stall_seconds: float,
    on_progress: Callable[[int, int, LoadProgress], None],
) -> None:
    """Load all ranks of all stages at once; the first failure cancels the others.

    Args:
        plan: the placement.
        links: by stage, the nodes of its ranks.
        order: what to load.
        stall_seconds: a stage of which no byte is loaded for this long is given up.
        on_progress: called with (stage, rank, progress).

    Raises:
        StagemeshError: a node could not load its stage.
    """

    clocks = [LoadClock() for _ in plan.stages]

    async def load(stage: int, rank: int) -> None:
        progress = links[stage][rank].load_stage(
            order,
            plan.stages[stage],
            rank=rank,
            members=[link.node for link in links[stage]],
            clock=clocks[stage],
            stall_seconds=stall_seconds,
        )
        try:
            async with contextlib.aclosing(progress) as events:
                async for event in events:
                    on_progress(stage, rank, event)
        except CommError:
            if len(links[stage]) > 1:
                # Perhaps another rank failed, which says why; its error cancels this wait.
                await asyncio.sleep(_CAUSE_SECONDS)
            raise

    try:
        async with asyncio.TaskGroup() as tasks:
            for stage, ranks in enumerate(links):
                for rank in range(len(ranks)):
                    tasks.create_task(load(stage, rank), name=f"load-stage-{stage}-{rank}")
    except ExceptionGroup as group:
        ours, rest = group.split(StagemeshError)
        if rest is not None or ours is None:
            raise
        raise ours.exceptions[0] from group
