"""What the planner predicts against what this machine does: tokens per second and memory.

speed: four node daemons, two of two threads and two of one (the slowed ones), serve the sample
model in several plans at once, all loaded; only one works at a time. Each round measures the nodes
and links anew, predicts every plan from that, and decodes with every plan, one after the other, so
that a ratio compares neighbours in time. One more plan is the planner's own choice. It is compared
with the fastest by all runs of its nodes and layers: where it is one of the others, by those too.

memory: for the sample and two random checkpoints of other families, two stages each. The caches are
filled by sequences of the full context, then the processes' resident memory is read.
"""

import asyncio
import contextlib
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import Floor, at_least, at_most, median, parser, report
from coordinator.config import CoordinatorConfig, DeploymentConfig, Limits
from coordinator.deployment import Deployment
from coordinator.generation import GenerationRequest
from coordinator.local_cluster import LocalCluster, LocalClusterConfig, local_cluster, wait_ready
from coordinator.placing import best_plan
from coordinator.planner.plan import PlanResult
from coordinator.planner.profiles import ClusterProfile
from stagemesh.steps import SamplingParams
from tests.support.checkpoints import write_byte_tokenizer, write_tiny_checkpoint

_START_SECONDS = 240.0
_MEASURE_SECONDS = 60.0
_PROMPT_TOKENS = 32
_THREADS = (2, 2, 1, 1)
_NODES = ("node-1", "node-2", "node-3", "node-4")
_CHOICE = "the planner's choice"
_MOST_RANKS = 2
"""Nodes that the planner may let share a stage."""
_SAMPLE = "smollm2-135m-instruct"
_MEMORY_CONTEXT, _MEMORY_STREAMS = 1024, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A plan to measure, over the four nodes."""

    name: str
    layers: dict[str, tuple[int, int]]
    """By node; nodes of one range share the stage."""

    @property
    def most_ranks(self) -> int:
        """Nodes of the stage that the most share."""
        return max(Counter(self.layers.values()).values(), default=1)


LAYOUTS = (
    Layout(name="1 stage x 2 threads", layers={"node-1": (0, 30)}),
    Layout(name="1 stage x 1 thread", layers={"node-3": (0, 30)}),
    Layout(name="2 stages x 2 threads", layers={"node-1": (0, 15), "node-2": (15, 30)}),
    Layout(name="2 stages, second slowed", layers={"node-1": (0, 15), "node-3": (15, 30)}),
    Layout(name="2 stages, slowed one small", layers={"node-1": (0, 25), "node-3": (25, 30)}),
    Layout(
        name="3 stages, middle slowed",
        layers={"node-1": (0, 10), "node-3": (10, 20), "node-2": (20, 30)},
    ),
    Layout(
        name="4 stages, two slowed",
        layers={"node-1": (0, 8), "node-2": (8, 16), "node-3": (16, 23), "node-4": (23, 30)},
    ),
    Layout(name="1 stage, two slowed share it", layers={"node-3": (0, 30), "node-4": (0, 30)}),
)


def deployment_of(layout: Layout | None, *, dtype: str, context: int) -> DeploymentConfig:
    """What is asked of the coordinator; None leaves it to the planner."""
    pinned = {} if layout is None else layout.layers
    return DeploymentConfig(
        model=_SAMPLE,
        name=_CHOICE if layout is None else layout.name,
        dtype=dtype,  # type: ignore[arg-type]  # the parser has checked the choice
        max_context_tokens=context,
        concurrency=1,
        objective="latency",
        prompt_tokens=_PROMPT_TOKENS,
        pinned=pinned,
        max_tp=_MOST_RANKS if layout is None else layout.most_ranks,
        excluded=frozenset(_NODES) - set(pinned) if pinned else frozenset(),
    )


@contextlib.asynccontextmanager
async def serving(
    deployments: tuple[DeploymentConfig, ...], *, threads: tuple[int, ...]
) -> AsyncGenerator[LocalCluster, None]:
    """A local cluster that serves them all, once they are ready."""
    config = LocalClusterConfig(
        coordinator=CoordinatorConfig(
            deployments=deployments,
            http_port=None,
            rpc_bind="127.0.0.1:0",
            limits=Limits(measure_seconds=_START_SECONDS / 2),
        ),
        num_nodes=len(threads),
        threads=threads,
        memory_bytes=4 * 2**30,
    )
    async with local_cluster(config) as running:
        await wait_ready(running.coordinator, nodes=running.nodes, timeout_seconds=_START_SECONDS)
        yield running


async def profile_now(running: LocalCluster) -> ClusterProfile:
    """Nodes and links, measured anew."""
    cluster = running.coordinator.cluster
    await cluster.measurer.measure_again([], timeout_seconds=_MEASURE_SECONDS)
    profile = cluster.measurements.cluster_profile(
        sorted(cluster.registry.ready_nodes(), key=lambda node: node.node_id)
    )
    assert profile is not None, "the nodes measure themselves"
    return profile


async def decode(running: LocalCluster, model: str, new_tokens: int) -> tuple[float, float]:
    """Seconds to the first token, and seconds per token after it."""
    request = GenerationRequest(
        request_id="benchmark",
        model=model,
        prompt_token_ids=tuple(range(1000, 1000 + _PROMPT_TOKENS)),
        max_tokens=new_tokens,
        sampling=SamplingParams(),
    )
    started = time.perf_counter()
    times = [time.perf_counter() async for _ in running.coordinator.cluster.generate(request)]
    return times[0] - started, (times[-1] - times[0]) / (len(times) - 1)


def predicted(deployment: Deployment, profile: ClusterProfile) -> PlanResult:
    """The prediction for the plan that a deployment runs."""
    assert deployment.plan is not None
    pinned = {
        rank.node_id: (stage.start_layer, stage.end_layer)
        for stage in deployment.plan.stages
        for rank in stage.ranks
    }
    layout = Layout(name=deployment.name, layers=pinned)
    config = deployment_of(
        layout, dtype=deployment.plan.dtype, context=deployment.plan.max_context_tokens
    )
    return best_plan(config, deployment.spec, profile)[0]


async def run_speed(
    plans: Sequence[Layout], *, dtype: str, rounds: int, new_tokens: int
) -> tuple[list[dict[str, Any]], list[Floor]]:
    """Predicted and measured tokens per second of each plan."""
    context = _PROMPT_TOKENS + new_tokens
    layouts = (*plans, None)
    configs = tuple(deployment_of(each, dtype=dtype, context=context) for each in layouts)
    expected: dict[str, list[float]] = {str(c.name): [] for c in configs}
    measured: dict[str, list[float]] = {str(c.name): [] for c in configs}
    firsts: dict[str, list[tuple[float, float]]] = {str(c.name): [] for c in configs}
    async with serving(configs, threads=_THREADS) as running:
        deployments = running.coordinator.cluster.deployments
        for name in deployments:
            await decode(running, name, 4)
        for _ in range(rounds):
            profile = await profile_now(running)
            for name, deployment in deployments.items():
                first, seconds = await decode(running, name, new_tokens)
                prediction = predicted(deployment, profile).prediction
                expected[name].append(1 / prediction.time_per_token_seconds)
                measured[name].append(1 / seconds)
                firsts[name].append((prediction.time_to_first_token_seconds, first))
        shapes = {name: _shape(d) for name, d in deployments.items()}
    rows, floors = [], []
    for name in expected:
        pairs = list(zip(expected[name], measured[name], strict=True))
        ratio = median([there / here for there, here in pairs])
        rows.append(
            {
                "what": f"{dtype} {name} ({shapes[name]})",
                "predicted tokens/s": median(expected[name]),
                "measured tokens/s": median(measured[name]),
                "predicted / measured": ratio,
                "first token, predicted ms": 1e3 * median([there for there, _ in firsts[name]]),
                "first token, measured ms": 1e3 * median([here for _, here in firsts[name]]),
            }
        )
        floors.append(at_most(f"{dtype} {name}: |predicted / measured - 1|", abs(ratio - 1), 0.25))
        first = median([there / here for there, here in firsts[name]])
        floors.append(at_most(f"{dtype} {name}: the same, first token", abs(first - 1), 0.5))
    by_shape: defaultdict[str, list[float]] = defaultdict(list)
    for name, rates in measured.items():
        by_shape[shapes[name]] += rates
    best = max(median(rates) for rates in by_shape.values())
    share = median(by_shape[shapes[_CHOICE]]) / best
    floors.append(at_least(f"{dtype} {_CHOICE} / the fastest measured", share, 0.9))
    return rows, floors


def _shape(deployment: Deployment) -> str:
    assert deployment.plan is not None
    return " + ".join(
        f"{'&'.join(rank.node_id for rank in s.ranks)}:{s.num_layers}"
        for s in deployment.plan.stages
    )


def memory_models(folder: Path) -> dict[str, str]:
    """The sample and random checkpoints of other families."""
    wide: dict[str, Any] = {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "head_dim": 64,
        "vocab_size": 8192,
    }
    heads: dict[str, Any] = {"num_attention_heads": 12, "num_key_value_heads": 4}
    long: dict[str, Any] = {"max_position_embeddings": _MEMORY_CONTEXT}
    qwen = write_tiny_checkpoint(folder / "qwen3", "qwen3", num_layers=10, **wide, **heads, **long)
    olmo2 = write_tiny_checkpoint(folder / "olmo2", "olmo2", num_layers=8, **wide, **heads, **long)
    for path in (qwen, olmo2):
        write_byte_tokenizer(path)  # a coordinator serves text
    return {"sample": _SAMPLE, "random qwen3": str(qwen), "random olmo2": str(olmo2)}


async def run_memory() -> tuple[list[dict[str, Any]], list[Floor]]:
    """Predicted and measured memory of each node, for three models."""
    rows: list[dict[str, Any]] = []
    floors: list[Floor] = []
    with tempfile.TemporaryDirectory(prefix="stagemesh-") as folder:
        for name, model in memory_models(Path(folder)).items():
            more_rows, more_floors = await _memory_of(name, model)
            rows += more_rows
            floors += more_floors
    return rows, floors


async def _memory_of(name: str, model: str) -> tuple[list[dict[str, Any]], list[Floor]]:
    config = DeploymentConfig(
        model=model,
        dtype="float32",
        max_context_tokens=_MEMORY_CONTEXT,
        concurrency=_MEMORY_STREAMS,
        objective="latency",
        num_stages=2,
    )
    rows, floors = [], []
    async with serving((config,), threads=(1, 1)) as running:
        (deployment,) = running.coordinator.cluster.deployments.values()
        assert deployment.planned is not None, "the planner has placed it"
        filling = asyncio.create_task(_fill(running, deployment.name))
        used = await _largest_rss(running, filling)
        for stage in deployment.planned.plan.replicas[0].stages:
            rank = stage.ranks[0]
            ratio = rank.memory.total / used[rank.node_id]
            rows.append(
                {
                    "what": f"{name}, layers {stage.start_layer}-{stage.end_layer - 1}",
                    "predicted MiB": rank.memory.total / 2**20,
                    "of it process MiB": rank.memory.overhead / 2**20,
                    "measured MiB": used[rank.node_id] / 2**20,
                    "predicted / measured": ratio,
                }
            )
            floors.append(
                at_most(f"memory of {rows[-1]['what']}: |ratio - 1|", abs(ratio - 1), 0.1)
            )
    return rows, floors


async def _fill(running: LocalCluster, model: str) -> None:
    """Sequences of the full context, as many at once as the cache is for."""

    async def one(first: int) -> None:
        request = GenerationRequest(
            request_id="benchmark",
            model=model,
            prompt_token_ids=tuple((first + 31 * i) % 4096 for i in range(_MEMORY_CONTEXT - 8)),
            max_tokens=8,
            sampling=SamplingParams(),
        )
        async for _ in running.coordinator.cluster.generate(request):
            pass

    await asyncio.gather(*(one(i) for i in range(_MEMORY_STREAMS)))


async def _largest_rss(running: LocalCluster, until: "asyncio.Task[None]") -> dict[str, int]:
    """The most that each node's process held until a task was done."""
    processes = {n: psutil.Process(p.pid) for n, p in running.nodes.processes.items()}
    largest = dict.fromkeys(processes, 0)
    while True:
        for name, process in processes.items():
            largest[name] = max(largest[name], process.memory_info().rss)
        if until.done():
            await until
            return largest
        await asyncio.sleep(0.02)


async def run(arguments: Any) -> None:
    """Measure and print."""
    if arguments.part in ("all", "speed"):
        rows: list[dict[str, Any]] = []
        floors: list[Floor] = []
        plans = [
            plan for plan in LAYOUTS if any(w in plan.name for w in arguments.plans.split(","))
        ]
        for dtype in arguments.dtypes.split(","):
            more_rows, more_floors = await run_speed(
                plans, dtype=dtype, rounds=arguments.rounds, new_tokens=arguments.new_tokens
            )
            rows += more_rows
            floors += more_floors
        report("predicted and measured speed", rows, floors, as_json=arguments.json)
    if arguments.part in ("all", "memory"):
        rows, floors = await run_memory()
        report("predicted and measured memory", rows, floors, as_json=arguments.json)


def main() -> None:
    """Parse the command line and run."""
    options = parser(__doc__ or "")
    options.add_argument("--part", choices=("all", "speed", "memory"), default="all")
    options.add_argument("--dtypes", default="float32,bfloat16")
    options.add_argument("--plans", default="stage", help="words in the names of plans to measure")
    options.add_argument("--new-tokens", type=int, default=64)
    asyncio.run(run(options.parse_args()))


if __name__ == "__main__":
    main()
