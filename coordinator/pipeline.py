"""An open pipeline: the streams of one incarnation of a deployment.

    coordinator --steps--> stage 0 --activations--> stage 1 --> ... --> stage p-1
         ^                    | failures              | failures           | tokens, failures
         `--------------------+-----------------------+--------------------'

Activations never come by here.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from coordinator.node_link import LoadOrder, NodeLink, StepStream
from stagemesh.errors import PeerLost, StagemeshError
from stagemesh.layout import Plan
from stagemesh.steps import Step, StepResult

logger = logging.getLogger(__name__)


class Pipeline:
    """Sends steps in and hands results out.

    Args:
        links: the stages' nodes in pipeline order.
        order: what the nodes have loaded.
        on_result: awaited with each result, in the order of arrival.
        on_broken: called once, with the error, when a stream breaks.
    """

    def __init__(
        self,
        links: Sequence[NodeLink],
        order: LoadOrder,
        *,
        on_result: Callable[[StepResult], Awaitable[None]],
        on_broken: Callable[[StagemeshError], None],
    ) -> None:
        self._links = tuple(links)
        self._order = order
        self._on_result = on_result
        self._on_broken = on_broken
        self._steps: StepStream | None = None
        self._watchers: list[asyncio.Task[None]] = []
        self._is_broken = False

    async def open(self, *, timeout_seconds: float) -> None:
        """Link the stages, watch each of them and open the stream to the first.

        Raises:
            StagemeshError: a hop does not work; the text names both its nodes.
        """
        for link, following in zip(self._links, self._links[1:], strict=False):
            await link.link_stage(
                self._order.deployment_id, following.node, timeout_seconds=timeout_seconds
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
        self._steps = await self._links[0].open_steps(self._order)

    async def send(self, step: Step) -> None:
        """Send a step to the first stage; a stream that breaks here is reported as any other."""
        if self._steps is None or self._is_broken:
            return
        try:
            await self._steps.send(step)
        except StagemeshError as error:
            self._broke(error)

    async def close(self) -> None:
        """Close all streams; the stages stay loaded."""
        self._is_broken = True
        for task in self._watchers:
            task.cancel()
        if self._watchers:
            await asyncio.wait(self._watchers, timeout=5.0)
        self._watchers.clear()
        if self._steps is not None:
            self._steps.close()
            self._steps = None

    async def _watch(self, link: NodeLink, accepted: asyncio.Future[None]) -> None:
        try:
            async with contextlib.aclosing(link.watch_results(self._order)) as results:
                async for result in results:
                    if result is None:
                        accepted.set_result(None)
                    else:
                        await self._on_result(result)
        except StagemeshError as error:
            if not accepted.done():
                accepted.set_exception(error)
            else:
                self._broke(error)

    def _broke(self, error: StagemeshError) -> None:
        if not self._is_broken:
            self._is_broken = True
            self._on_broken(error)


async def load_stages(
    plan: Plan,
    links: Mapping[str, NodeLink],
    order: LoadOrder,
    *,
    stall_seconds: float,
    on_progress: Callable[[int, int, int], None],
) -> None:
    """Load all stages at once; the first failure cancels the others.

    Args:
        plan: the placement.
        links: the plan's nodes by id.
        order: what to load.
        stall_seconds: a node that loads no byte for this long is given up.
        on_progress: called with (stage, loaded bytes, total bytes).

    Raises:
        StagemeshError: a node could not load its stage.
    """

    async def load(index: int) -> None:
        assignment = plan.stages[index]
        progress = links[assignment.node_id].load_stage(
            order, assignment, stall_seconds=stall_seconds
        )
        async with contextlib.aclosing(progress) as events:
            async for event in events:
                on_progress(index, event.loaded_bytes, event.total_bytes)

    try:
        async with asyncio.TaskGroup() as tasks:
            for index in range(plan.num_stages):
                tasks.create_task(load(index), name=f"load-stage-{index}")
    except ExceptionGroup as group:
        ours, rest = group.split(StagemeshError)
        if rest is not None or ours is None:
            raise
        raise ours.exceptions[0] from group
