"""One served model over its life: waits for nodes, places, loads, runs, and starts over on a loss.

The decisions are `coordinator.reconcile.decide`; this is what carries them out.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass

from coordinator.config import DeploymentConfig, Limits
from coordinator.generation import GeneratedToken, GenerationRequest, ServedModel
from coordinator.kv_budget import kv_capacity_tokens
from coordinator.load_book import LoadBook
from coordinator.load_order import LoadOrder, LoadProgress
from coordinator.membership import NodeInfo
from coordinator.model_cost import NodeCapacity
from coordinator.node_link import NodeLink
from coordinator.pipeline import Pipeline, load_stages
from coordinator.placing import Placement, place
from coordinator.planner.plan import PlanResult
from coordinator.planner.profiles import ClusterProfile
from coordinator.planning_thread import off_the_loop
from coordinator.reconcile import Abandon, DeploymentView, Phase, Place, Wait, decide
from coordinator.runtime import Runtime
from coordinator.scheduler import Scheduler
from coordinator.scheduler_config import SchedulerConfig
from stagemesh.errors import (
    CommError,
    ConfigError,
    NotReady,
    PeerLost,
    PlacementError,
    StagemeshError,
)
from stagemesh.layout import Plan
from stagemesh.model_spec import ModelSpec

logger = logging.getLogger(__name__)

_FIRST_RETRY_SECONDS = 0.5
_LAST_RETRY_SECONDS = 5.0
_UNLOAD_SECONDS = 2.0
_GROUP_SHARE = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """What a deployment needs to know of the nodes."""

    nodes: tuple[NodeInfo, ...]
    """Nodes that can take work."""
    seconds_since_join: float
    """Since the last one joined."""
    measuring: str = ""
    """Nodes and links that are still to be measured."""


class Deployment:
    """A served model.

    Args:
        deployment_id: unique in the cluster.
        config: what is asked for.
        spec: the model.
        limits: deadlines.
        token: the cluster's token.
        membership: the nodes, now.
        profile: some nodes as they were measured; None when none was.
        on_change: called after each change of phase.
    """

    def __init__(
        self,
        deployment_id: str,
        config: DeploymentConfig,
        spec: ModelSpec,
        *,
        limits: Limits,
        token: str | None,
        membership: Callable[[], Membership],
        profile: Callable[[Sequence[NodeInfo]], ClusterProfile | None],
        on_change: Callable[["Deployment"], None],
    ) -> None:
        self.deployment_id = deployment_id
        self.config = config
        self.spec = spec
        self.created = int(time.time())
        self.phase: Phase = "waiting"
        self.detail = "starting"
        self.plan: Plan | None = None
        self.planned: PlanResult | None = None
        self.runtime: Runtime | None = None
        self._book = LoadBook()
        self._limits = limits
        self._token = token
        self._membership = membership
        self._profile = profile
        self._on_change = on_change
        self._changed = asyncio.Event()
        self._incarnation = 0
        self._used: dict[str, str] = {}
        self._was_ready = False
        self._failed_with: frozenset[str] = frozenset()
        # Doubled before each use.
        self._retry_seconds = _FIRST_RETRY_SECONDS / 2
        # Why the last plan was given up, until another one is ready.
        self._lost = ""
        self._work: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """What clients call the model."""
        return self.config.name or self.spec.name

    @property
    def loads(self) -> Mapping[tuple[int, int], LoadProgress]:
        """How far the ranks of the plan are with loading, by stage and rank."""
        return self._book.progress

    def notify(self) -> None:
        """The nodes have changed: decide again."""
        self._changed.set()

    def served_model(self) -> ServedModel:
        """The deployment as the API shows it."""
        context = (
            self.spec.max_context_tokens if self.plan is None else self.plan.max_context_tokens
        )
        return ServedModel(
            name=self.name,
            spec=self.spec,
            created=self.created,
            max_context_tokens=context,
            is_ready=self.phase == "ready",
            detail=self.detail,
        )

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GeneratedToken, None]:
        """Run one sequence; see `coordinator.generation.Engine.generate`."""
        if self.phase != "ready" or self.runtime is None:
            raise NotReady(f"model {self.name} is not ready ({self.phase}): {self.detail}")
        async with contextlib.aclosing(self.runtime.generate(request)) as tokens:
            async for token in tokens:
                yield token

    async def run(self) -> None:
        """Keep the deployment as it should be, until cancelled."""
        try:
            while True:
                self._changed.clear()
                wait_seconds = await self._reconcile()
                with contextlib.suppress(TimeoutError):
                    # Without a limit only a change of membership or of our own work goes on.
                    async with asyncio.timeout(wait_seconds):
                        await self._changed.wait()
        finally:
            await self._tear_down(NotReady(f"model {self.name} is being unloaded"))

    async def _reconcile(self) -> float | None:
        """Decide and act once; returns when to decide again without a change."""
        membership = self._membership()
        view = DeploymentView(
            phase=self.phase,
            nodes=membership.nodes,
            used=self._used,
            min_nodes=self.config.min_nodes,
            was_ready=self._was_ready,
            seconds_since_join=membership.seconds_since_join,
            settle_seconds=self._limits.settle_seconds,
            failed_with=self._failed_with,
            measuring=membership.measuring if self.config.is_planned else "",
            measure_seconds=self._limits.measure_seconds,
        )
        match decide(view):
            case Wait(detail, seconds):
                self._enter("waiting", self._with_reason(detail))
                return seconds
            case Abandon(detail):
                self._lost = detail
                await self._tear_down(PeerLost(f"{self.name}: {detail}"))
                self._enter("waiting", detail)
                return 0.0
            # Work that has ended but still frees its memory tells when it is through.
            case Place(nodes) if self._work is None:
                if view.measuring:
                    logger.warning(
                        "%s is placed before these are measured: %s", self.name, view.measuring
                    )
                await self._place(nodes)
        return None

    async def _place(self, nodes: tuple[NodeInfo, ...]) -> None:
        """Plan, and start to load in the background: a lost node must interrupt it."""
        capacities = [NodeCapacity(node_id=n.node_id, memory_bytes=n.memory_bytes) for n in nodes]
        profile = self._profile(nodes)
        try:
            # Some seconds for hundreds of nodes: not on the loop, where heartbeats arrive.
            placement: Placement = await off_the_loop(
                lambda: place(self.config, self.spec, capacities, profile=profile)
            )
        except (PlacementError, ConfigError) as error:
            self._fail(self._with_reason(str(error)))
            return
        plan, self.planned = placement.plan, placement.result
        by_id = {node.node_id: node for node in nodes}
        self.plan = plan
        self._used = {node_id: by_id[node_id].start_id for node_id in plan.node_ids}
        self._incarnation += 1
        self._book.begin()
        stages = "1 stage" if plan.num_stages == 1 else f"{plan.num_stages} stages"
        self._enter("loading", self._with_reason(f"loading {stages}"))
        self._work = asyncio.create_task(
            self._work_on(plan, by_id),
            name=f"deployment-{self.deployment_id}",
        )

    async def _work_on(self, plan: Plan, nodes: Mapping[str, NodeInfo]) -> None:
        """Load and run a plan until it breaks or is cancelled; then free what it took."""
        links = [
            [NodeLink(nodes[node_id], token=self._token) for node_id in stage.node_ids]
            for stage in plan.stages
        ]
        try:
            await self._load_and_run(plan, links)
        except StagemeshError as error:
            was_ready = self.runtime is not None
            self._break(error)
            if was_ready or isinstance(error, CommError | NotReady):
                # A lost node may be back in a moment, or the registry not know of its loss yet.
                logger.warning("pipeline lost: %s", error)
                self._retry_seconds = min(2 * self._retry_seconds, _LAST_RETRY_SECONDS)
            else:  # who refused to load would refuse again
                self._fail(str(error))
        except Exception as error:  # root of this task: nobody else would hear of it
            logger.exception("deployment broke", extra={"model": self.name})
            broken = StagemeshError(f"{self.name}: internal error ({type(error).__name__})")
            self._break(broken)
            self._fail(f"{broken}; the coordinator's log has the traceback")
        finally:
            # Before the next plan: its stages have the same deployment id.
            await asyncio.gather(*(self._unload(link) for ranks in links for link in ranks))
        if self.phase == "waiting":
            await asyncio.sleep(self._retry_seconds)
        self._work = None
        self._used = {}
        self.notify()

    async def _load_and_run(self, plan: Plan, links: Sequence[Sequence[NodeLink]]) -> None:
        order = self._order(plan)
        await load_stages(
            plan,
            links,
            order,
            stall_seconds=self._limits.load_stall_seconds,
            on_progress=lambda stage, rank, done: self._book.note(self.plan, stage, rank, done),
        )
        runtime = Runtime(self._scheduler(plan), step_seconds=self._limits.step_seconds)
        runtime.pipeline = Pipeline(
            links, order, on_result=runtime.on_result, on_broken=runtime.fail
        )
        try:
            await runtime.pipeline.open(timeout_seconds=self._limits.link_seconds)
            self.runtime = runtime
            self._was_ready = True
            self._retry_seconds = _FIRST_RETRY_SECONDS / 2
            self._lost = ""
            self._enter("ready", "")
            await runtime.run()
        finally:
            await runtime.pipeline.close()

    def _order(self, plan: Plan) -> LoadOrder:
        return LoadOrder(
            deployment_id=self.deployment_id,
            incarnation=self._incarnation,
            model_name=self.name,
            model_path=str(self.spec.path.absolute()),
            model_reference=self.config.model,
            fingerprint=self.spec.fingerprint,
            num_stages=plan.num_stages,
            dtype=plan.dtype,
            max_context_tokens=plan.max_context_tokens,
            tensor_backend=self.config.tp_backend,
            # Less than a step may take, so that the rank that waits says for whom.
            group_seconds=_GROUP_SHARE * self._limits.step_seconds,
            weight_peers=self._book.weight_peers(self._membership().nodes),
            quantize=self.config.quantize,
            compile=self.config.compile,
        )

    def _scheduler(self, plan: Plan) -> Scheduler:
        return Scheduler(
            SchedulerConfig(
                num_stages=plan.num_stages,
                kv_capacity_tokens=kv_capacity_tokens(plan),
                max_context_tokens=plan.max_context_tokens,
                max_step_tokens=self.config.max_step_tokens,
            )
        )

    def _with_reason(self, detail: str) -> str:
        """The detail and why the last plan was given up: who asks meanwhile shall hear it."""
        return f"{detail} ({self._lost})" if self._lost else detail

    def _break(self, error: StagemeshError) -> None:
        """End what runs with `error`."""
        runtime, self.runtime = self.runtime, None
        if runtime is not None:
            runtime.fail(error)
        self._lost = self._lost or str(error)
        self._enter("waiting", str(error))

    def _fail(self, detail: str) -> None:
        self._failed_with = frozenset(n.start_id for n in self._membership().nodes)
        self._used = {}
        self._enter("failed", detail)

    def _enter(self, phase: Phase, detail: str) -> None:
        if (phase, detail) == (self.phase, self.detail):
            return
        self.phase, self.detail = phase, detail
        log = logger.warning if phase == "failed" else logger.info
        log("deployment %s: %s", phase, detail or self.name, extra={"model": self.name})
        self._on_change(self)

    async def _tear_down(self, error: StagemeshError) -> None:
        """End what runs with `error` and wait, within bounds, until its memory is freed."""
        self.plan = self.planned = None
        self._break(error)
        work, self._work = self._work, None
        self._used = {}
        if work is not None:
            work.cancel()
            await asyncio.wait({work}, timeout=5.0)

    async def _unload(self, link: NodeLink) -> None:
        try:
            async with asyncio.timeout(_UNLOAD_SECONDS):
                await link.unload_stage(self.deployment_id)
        except (StagemeshError, TimeoutError) as error:
            # A node that does not answer is gone, or frees its stage with the next load.
            logger.info("could not unload %s: %s", link, error)
        finally:
            await link.close()
