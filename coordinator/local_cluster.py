"""A whole cluster on this machine: coordinator here, node daemons as child processes."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace

from coordinator.config import CoordinatorConfig
from coordinator.deployment import Deployment
from coordinator.local_nodes import LocalNodes
from coordinator.server import Coordinator
from stagemesh.errors import NotReady

_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalClusterConfig:
    """What to start."""

    coordinator: CoordinatorConfig
    """The coordinator; each deployment waits for all nodes."""
    num_nodes: int
    """Node daemons to start."""
    threads: int | Sequence[int] | None = None
    """CPU threads of each node: one figure, or one per node."""
    memory_bytes: int | None = None
    """Memory that each node offers."""
    device: str = "auto"
    """Device of each node."""


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """A running one."""

    coordinator: Coordinator
    nodes: LocalNodes


@contextlib.asynccontextmanager
async def local_cluster(config: LocalClusterConfig) -> AsyncGenerator[LocalCluster, None]:
    """Start a cluster and end it with the block; every process that was started is gone after."""
    deployments = tuple(
        replace(d, min_nodes=d.min_nodes or config.num_nodes)
        for d in config.coordinator.deployments
    )
    async with Coordinator(replace(config.coordinator, deployments=deployments)) as coordinator:
        nodes = LocalNodes(
            config.num_nodes,
            coordinator=coordinator.rpc_address,
            threads=config.threads,
            memory_bytes=config.memory_bytes,
            device=config.device,
            token=config.coordinator.token,
            mqtt_url=config.coordinator.mqtt_url,
        )
        async with nodes:
            yield LocalCluster(coordinator, nodes)


async def wait_ready(
    coordinator: Coordinator,
    *,
    timeout_seconds: float | None = None,
    on_poll: Callable[[Deployment], None] | None = None,
    nodes: LocalNodes | None = None,
) -> None:
    """Wait until every deployment is ready.

    Args:
        coordinator: a running one.
        timeout_seconds: limit; None waits as long as loading makes progress (its own limits hold).
        on_poll: called some times a second with each deployment that is not ready.
        nodes: local nodes whose death ends the wait.

    Raises:
        NotReady: a deployment failed, a local node died, or the time is over.
    """
    watch = None if nodes is None else asyncio.create_task(nodes.watch(), name="watch-nodes")
    try:
        async with asyncio.timeout(timeout_seconds):
            while True:
                coordinator.raise_if_ended()
                waiting = [
                    d for d in coordinator.cluster.deployments.values() if d.phase != "ready"
                ]
                if not waiting:
                    return
                for deployment in waiting:
                    if on_poll is not None:
                        on_poll(deployment)
                    if deployment.phase == "failed":
                        raise NotReady(f"model {deployment.name}: {deployment.detail}")
                if watch is not None and watch.done():
                    watch.result()
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError as error:
        details = "; ".join(f"{d.name} ({d.phase}): {d.detail}" for d in waiting)
        raise NotReady(f"not ready after {timeout_seconds:.0f} s: {details}") from error
    finally:
        if watch is not None:
            watch.cancel()
