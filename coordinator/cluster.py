"""The nodes and the deployments of a coordinator, and what runs between them."""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass

from coordinator.config import DeploymentConfig, Limits
from coordinator.deployment import Deployment, Membership
from coordinator.generation import GeneratedToken, GenerationRequest, ServedModel
from coordinator.measurements import MeasuredNode, Measurements
from coordinator.measuring import Measurer
from coordinator.membership import MembershipEvent, NodeInfo, NodeJoined
from coordinator.registry import Registry
from stagemesh.errors import ConfigError, ModelNotFound, StagemeshError
from stagemesh.model_spec import ModelSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEvent:
    """Something that happened to a sequence, for telemetry."""

    request_id: str
    model: str
    kind: str
    """"started", "finished", "failed" or "cancelled"."""
    num_prompt_tokens: int
    num_generated_tokens: int
    detail: str
    """The finish reason or the error."""


class Cluster:
    """Folds signs of life into the registry and keeps the deployments informed.

    This is also the `Engine` that the API runs requests on.

    Args:
        models: what to serve: configuration and headers of each.
        limits: deadlines.
        token: the cluster's token.
        on_deployment: called with each deployment that changed.
        on_request: called when a sequence starts and when it ends.
    """

    def __init__(
        self,
        models: Sequence[tuple[DeploymentConfig, ModelSpec]],
        *,
        limits: Limits,
        token: str | None,
        on_deployment: Callable[[Deployment], None],
        on_request: Callable[["RequestEvent"], None],
    ) -> None:
        self.coordinator_id = uuid.uuid4().hex
        self.limits = limits
        self.registry = Registry()
        self._on_request = on_request
        self._joined_at = time.monotonic()
        self.measurements = Measurements()
        self.measurer = Measurer(
            self.measurements,
            nodes=self.registry.ready_nodes,
            token=token,
            on_change=self._notify_deployments,
        )
        self.deployments: dict[str, Deployment] = {}
        for index, (config, spec) in enumerate(models):
            deployment = Deployment(
                f"{self.coordinator_id[:8]}-{index}",
                config,
                spec,
                limits=limits,
                token=token,
                membership=self._membership,
                profile=self.measurements.cluster_profile,
                on_change=on_deployment,
            )
            if deployment.name in self.deployments:
                raise ConfigError(
                    f"two models would be called {deployment.name!r}; give one another --name"
                )
            self.deployments[deployment.name] = deployment

    async def run(self) -> None:
        """Watch over the nodes and run the deployments, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._expire(), name="expire-nodes")
            tasks.create_task(self.measurer.run(), name="measure-links")
            for name, deployment in self.deployments.items():
                tasks.create_task(deployment.run(), name=f"deployment-{name}")

    def join(self, node: NodeInfo) -> None:
        """A node's heartbeat stream began.

        Raises:
            ConfigError: its name is taken.
        """
        self.apply(self.registry.join(node, now=time.monotonic()))

    def apply(self, events: Iterable[MembershipEvent]) -> None:
        """Spread membership events."""
        for event in events:
            if isinstance(event, NodeJoined):
                self._joined_at = time.monotonic()
            detail = getattr(event, "detail", "")
            logger.info(
                "%s: %s",
                type(event).__name__,
                detail or event.node_id,
                extra={"peer": event.node_id},
            )
            self._notify_deployments()
            self.measurer.notify()

    def measured(self, node: NodeInfo, measured: MeasuredNode) -> None:
        """A node's profile came with a beat."""
        if self.measurements.put_node(node.node_id, start_id=node.start_id, measured=measured):
            self.measurer.notify()
            self._notify_deployments()

    def _notify_deployments(self) -> None:
        for deployment in self.deployments.values():
            deployment.notify()

    def models(self) -> list[ServedModel]:
        """All models, ready or not."""
        return [deployment.served_model() for deployment in self.deployments.values()]

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GeneratedToken, None]:
        """Run one sequence; see `coordinator.generation.Engine.generate`."""
        deployment = self.deployments.get(request.model)
        if deployment is None:
            raise ModelNotFound(
                f"no model {request.model!r} is served; served: {', '.join(self.deployments)}"
            )
        count, kind, detail = 0, "cancelled", ""
        self._on_request(_event(request, "started"))
        try:
            async with contextlib.aclosing(deployment.generate(request)) as tokens:
                async for token in tokens:
                    count += token.token_id is not None
                    if token.finish_reason is not None:
                        kind, detail = "finished", token.finish_reason
                    yield token
        except StagemeshError as error:
            kind, detail = "failed", str(error)
            raise
        finally:
            self._on_request(_event(request, kind, num_generated=count, detail=detail))

    def _membership(self) -> Membership:
        return Membership(
            nodes=self.registry.ready_nodes(),
            seconds_since_join=time.monotonic() - self._joined_at,
            measuring=self.measurer.pending(),
        )

    async def _expire(self) -> None:
        pause = self.limits.heartbeat_seconds / 2
        while True:
            slept_at = time.monotonic()
            await asyncio.sleep(pause)
            if time.monotonic() - slept_at > pause + self.limits.heartbeat_seconds:
                # It was this process that stood still: the beats of meanwhile wait to be read.
                continue
            self.apply(
                self.registry.expire(
                    now=time.monotonic(), limit_seconds=self.limits.silence_seconds
                )
            )


def _event(
    request: GenerationRequest, kind: str, *, num_generated: int = 0, detail: str = ""
) -> RequestEvent:
    return RequestEvent(
        request_id=request.request_id,
        model=request.model,
        kind=kind,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_generated_tokens=num_generated,
        detail=detail,
    )
