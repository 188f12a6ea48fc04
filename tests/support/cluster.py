"""A real cluster on one event loop: a coordinator and node daemons on loopback, all on port 0."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from coordinator.config import CoordinatorConfig, DeploymentConfig, Limits
from coordinator.deployment import Deployment
from coordinator.generation import GenerationRequest
from coordinator.local_cluster import wait_ready
from coordinator.server import Coordinator
from node.config import NodeConfig
from node.daemon import NodeDaemon
from stagemesh.steps import SamplingParams
from tests.support.checkpoints import write_byte_tokenizer, write_tiny_checkpoint

FAST_LIMITS = Limits(
    heartbeat_seconds=0.2,
    silence_seconds=2.0,
    load_stall_seconds=10.0,
    link_seconds=5.0,
    step_seconds=10.0,
    settle_seconds=0.2,
)
READY_SECONDS = 30.0


@dataclass(slots=True)
class RunningNode:
    """A daemon of the test's cluster."""

    daemon: NodeDaemon
    task: "asyncio.Task[None]"
    stack: contextlib.AsyncExitStack

    async def stop(self) -> None:
        """Stop it cleanly; one that has crashed is only tidied up."""
        self.task.cancel()
        await asyncio.wait({self.task}, timeout=5)
        await self.stack.aclose()

    async def crash(self) -> None:
        """End all its streams at once and without a word, as the end of its process would."""
        registration = self.daemon.registration
        assert registration is not None
        registration.joined.clear()  # then it has nobody to say goodbye to
        self.task.cancel()
        await self.daemon._server.stop(0)
        await self.stop()


@dataclass(slots=True)
class Cluster:
    """A running cluster."""

    coordinator: Coordinator
    config: CoordinatorConfig
    nodes: dict[str, RunningNode] = field(default_factory=dict)
    token: str | None = None

    @property
    def deployment(self) -> Deployment:
        """The first deployment."""
        return next(iter(self.coordinator.cluster.deployments.values()))

    @property
    def api_url(self) -> str:
        """Base URL of the API."""
        return self.coordinator.api_url

    async def add_node(self, node_id: str, **settings: Any) -> RunningNode:
        """Start a daemon in this process."""
        config = NodeConfig(
            node_id=node_id,
            coordinator=self.coordinator.rpc_address,
            device="cpu",
            num_threads=1,
            token=self.token,
            **{"memory_bytes": 2**30, "measure": False, **settings},
        )
        stack = contextlib.AsyncExitStack()
        daemon = await stack.enter_async_context(NodeDaemon(config))
        task = asyncio.create_task(daemon.run(), name=f"daemon-{node_id}")
        running = RunningNode(daemon, task, stack)
        self.nodes[node_id] = running
        return running

    async def restart_coordinator(self) -> None:
        """Stop the coordinator and start another one on the same ports."""
        http_port = httpx.URL(self.api_url).port
        config = replace(self.config, rpc_bind=self.coordinator.rpc_address, http_port=http_port)
        await self.coordinator.__aexit__(None, None, None)
        self.coordinator = await Coordinator(config).__aenter__()

    async def wait_ready(self, timeout_seconds: float = READY_SECONDS) -> None:
        """Wait until the models are served."""
        await wait_ready(self.coordinator, timeout_seconds=timeout_seconds)

    def kv_used_bytes(self) -> int:
        """KV memory that sessions hold on all nodes."""
        return sum(s.kv_used_bytes for s in self._stages())

    def num_sessions(self) -> int:
        """Sessions on all nodes."""
        return sum(s.num_sessions for s in self._stages())

    def num_steps(self) -> int:
        """Steps computed on all nodes."""
        return sum(s.num_steps for s in self._stages())

    def _stages(self) -> list[Any]:
        return [
            stage
            for node in self.nodes.values()
            for stage in node.daemon.servicer.node_status().stages
        ]

    async def generate(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        stop: frozenset[int] = frozenset(),
        **sampling: Any,
    ) -> list[int]:
        """Token ids of one sequence, straight from the engine."""
        request = GenerationRequest(
            request_id="test",
            model=self.deployment.name,
            prompt_token_ids=tuple(prompt),
            max_tokens=max_tokens,
            sampling=SamplingParams(**sampling),
            stop_token_ids=stop,
        )
        tokens = []
        async with contextlib.aclosing(self.coordinator.cluster.generate(request)) as events:
            async for event in events:
                assert event.token_id is not None
                tokens.append(event.token_id)
        return tokens

    def http(self) -> httpx.AsyncClient:
        """A client of the API."""
        return httpx.AsyncClient(base_url=self.api_url, timeout=30.0, trust_env=False)


def tiny_model(folder: Path, family: str = "llama", **config: Any) -> Path:
    """A tiny random checkpoint of 4 layers (write_tiny_checkpoint) with a byte-level tokenizer."""
    path = write_tiny_checkpoint(folder / "model", family, vocab_size=260, num_layers=4, **config)
    write_byte_tokenizer(path)
    return path


@contextlib.asynccontextmanager
async def start_cluster(
    model: str | Path,
    *,
    num_nodes: int = 2,
    wait: bool = True,
    limits: Limits = FAST_LIMITS,
    token: str | None = None,
    mqtt_url: str | None = None,
    node_settings: dict[str, Any] | None = None,
    **deployment: Any,
) -> AsyncGenerator[Cluster, None]:
    """Start a cluster that serves `model` in fp32; all of it is gone after the block.

    Args:
        model: what `coordinator serve --model` takes.
        num_nodes: daemons, named node-1 and on.
        wait: wait until the model is served.
        limits: deadlines; short by default.
        token: the cluster's token.
        mqtt_url: broker of the coordinator and the nodes.
        node_settings: more fields of each NodeConfig.
        **deployment: more fields of the DeploymentConfig.
    """
    config = CoordinatorConfig(
        deployments=(
            DeploymentConfig(
                **{
                    "model": str(model),
                    "dtype": "float32",
                    "min_nodes": num_nodes or None,
                    **deployment,
                }
            ),
        ),
        http_port=0,
        rpc_bind="127.0.0.1:0",
        limits=limits,
        token=token,
        mqtt_url=mqtt_url,
    )
    cluster = Cluster(await Coordinator(config).__aenter__(), config, token=token)
    try:
        for index in range(1, num_nodes + 1):
            await cluster.add_node(
                f"node-{index}", **{"mqtt_url": mqtt_url, **(node_settings or {})}
            )
        if wait and num_nodes:
            await cluster.wait_ready()
        yield cluster
    except TimeoutError:
        for task in asyncio.all_tasks():
            task.print_stack(limit=4, file=sys.stderr)
        raise
    finally:
        for node in cluster.nodes.values():
            await node.stop()
        await cluster.coordinator.__aexit__(None, None, None)
