"""Tokens per second of stagemesh against transformers' generate, on the same weights, in one run.

    (a) transformers in one process, 2 threads: one stream, and a batch of 8
    (b) stagemesh, 1 and 2 stages of 2 threads each: one stream (the stages take turns)
    (c) stagemesh, 2 stages of 1 thread each: 8 streams

All processes live through the whole run and only one set works at a time; each round measures all
of them one after the other, so a ratio compares neighbours in time. tokens/s is new tokens by the
wall time of the whole request, its short prefill included. stagemesh is measured at the
coordinator's engine, which is what the HTTP API calls: scheduling, gRPC and the node processes are
in it.
"""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any, cast

from benchmarks.report import Floor, at_least, median, parser, report
from coordinator.config import CoordinatorConfig, DeploymentConfig, Dtype
from coordinator.generation import GenerationRequest
from coordinator.local_cluster import LocalCluster, LocalClusterConfig, local_cluster, wait_ready
from coordinator.runtime import StepStats
from stagemesh.steps import SamplingParams

_PROMPT_TOKENS = 32
_START_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A stagemesh configuration to measure."""

    name: str
    num_stages: int
    threads: int
    streams: int


SETUPS = (
    Setup(name="(b) stagemesh, 1 stage x 2 threads", num_stages=1, threads=2, streams=1),
    Setup(name="(b) stagemesh, 2 stages x 2 threads", num_stages=2, threads=2, streams=1),
    Setup(name="(c) stagemesh, 2 stages x 1 thread", num_stages=2, threads=1, streams=8),
)


def prompts(count: int) -> list[list[int]]:
    """Different prompts of one length, away from the special tokens."""
    return [[1000 + 97 * i + 31 * j for j in range(_PROMPT_TOKENS)] for i in range(count)]


class Peer:
    """The transformers process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ask(self, count: int, new_tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds and tokens for a batch of `count`."""
        assert self._process.stdin is not None
        request = {"prompts": prompts(count), "new_tokens": new_tokens}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        answer = await self.read()
        return answer["seconds"], answer["tokens"]

    async def read(self) -> dict[str, Any]:
        """One answer."""
        assert self._process.stdout is not None
        async with asyncio.timeout(_START_SECONDS):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("the transformers process ended; its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.asynccontextmanager
async def peer(dtype: str, threads: int, model: str) -> AsyncGenerator[Peer, None]:
    """Start transformers and end it with the block."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.transformers_peer", dtype, str(threads), model),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=2**24,
    )
    try:
        running = Peer(process)
        await running.read()
        yield running
    finally:
        process.terminate()
        await process.wait()


@contextlib.asynccontextmanager
async def cluster(setup: Setup, dtype: str, model: str) -> AsyncGenerator[LocalCluster, None]:
    """Start a local cluster for a setup and end it with the block."""
    deployment = DeploymentConfig(
        model=model,
        dtype=cast(Dtype, dtype),
        max_context_tokens=1024,
        concurrency=8,
    )
    config = LocalClusterConfig(
        coordinator=CoordinatorConfig(
            deployments=(deployment,), http_port=None, rpc_bind="127.0.0.1:0"
        ),
        num_nodes=setup.num_stages,
        threads=setup.threads,
        memory_bytes=4 * 2**30,
    )
    async with local_cluster(config) as running:
        await wait_ready(running.coordinator, nodes=running.nodes, timeout_seconds=_START_SECONDS)
        yield running


async def measure(
    running: LocalCluster, count: int, new_tokens: int
) -> tuple[float, list[list[int]]]:
    """Seconds and tokens for `count` sequences at once."""
    engine = running.coordinator.cluster
    model = next(iter(engine.deployments))

    async def one(prompt: list[int]) -> list[int]:
        request = GenerationRequest(
            request_id="benchmark",
            model=model,
            prompt_token_ids=tuple(prompt),
            max_tokens=new_tokens,
            sampling=SamplingParams(),
        )
        return [t.token_id async for t in engine.generate(request) if t.token_id is not None]

    started = time.perf_counter()
    tokens = await asyncio.gather(*(one(prompt) for prompt in prompts(count)))
    return time.perf_counter() - started, list(tokens)


def stats_of(running: LocalCluster) -> StepStats:
    """A copy of the runtime's counters."""
    deployment = next(iter(running.coordinator.cluster.deployments.values()))
    assert deployment.runtime is not None
    stats = deployment.runtime.stats
    return replace(
        stats, queue_nanos=dict(stats.queue_nanos), compute_nanos=dict(stats.compute_nanos)
    )


def breakdown(before: StepStats, after: StepStats) -> dict[str, float]:
    """Where a step's time goes, in milliseconds."""
    steps = max(after.num_steps - before.num_steps, 1)

    def per_step(nanos: float) -> float:
        return nanos / steps / 1e6

    compute = per_step(sum(after.compute_nanos.values()) - sum(before.compute_nanos.values()))
    queue = per_step(sum(after.queue_nanos.values()) - sum(before.queue_nanos.values()))
    latency = per_step(after.latency_nanos - before.latency_nanos)
    return {
        "compute ms": compute,
        "queue ms": queue,
        "wire ms": latency - compute - queue,
        "scheduling ms": per_step(after.turnaround_nanos - before.turnaround_nanos),
    }


async def run_dtype(
    dtype: str, *, model: str, rounds: int, new_tokens: int
) -> tuple[list[dict[str, Any]], list[Floor]]:
    """All measurements of one dtype."""
    async with contextlib.AsyncExitStack() as stack:
        reference = await stack.enter_async_context(peer(dtype, 2, model))
        running = [await stack.enter_async_context(cluster(s, dtype, model)) for s in SETUPS]
        await reference.ask(1, 4)
        await reference.ask(8, 4)
        for setup, each in zip(SETUPS, running, strict=True):
            await measure(each, setup.streams, 4)
        befores = [stats_of(each) for each in running]
        speeds: dict[str, list[float]] = {}
        same = total = 0
        for _ in range(rounds):
            for count in (1, 8):
                seconds, expected = await reference.ask(count, new_tokens)
                name = f"(a) transformers, batch of {count}, 2 threads"
                speeds.setdefault(name, []).append(count * new_tokens / seconds)
                for setup, each in zip(SETUPS, running, strict=True):
                    if setup.streams != count:
                        continue
                    seconds, tokens = await measure(each, count, new_tokens)
                    speeds.setdefault(setup.name, []).append(count * new_tokens / seconds)
                    same += sum(a == b for a, b in zip(tokens, expected, strict=True))
                    total += count
        parts = [breakdown(b, stats_of(each)) for b, each in zip(befores, running, strict=True)]
    return _summary(dtype, speeds, parts, same=same, total=total)


def _summary(
    dtype: str,
    speeds: dict[str, list[float]],
    parts: list[dict[str, float]],
    *,
    same: int,
    total: int,
) -> tuple[list[dict[str, Any]], list[Floor]]:
    rows: list[dict[str, Any]] = []
    floors = []
    empty = dict.fromkeys(parts[0], "")
    for count in (1, 8):
        reference = f"(a) transformers, batch of {count}, 2 threads"
        rows.append(
            {
                "what": f"{dtype} {reference}",
                "tokens/s": median(speeds[reference]),
                "ratio": 1.0,
                **empty,
                "same answers": "",
            }
        )
        for setup, part in zip(SETUPS, parts, strict=True):
            if setup.streams != count:
                continue
            pairs = zip(speeds[setup.name], speeds[reference], strict=True)
            ratio = median([ours / theirs for ours, theirs in pairs])
            rows.append(
                {
                    "what": f"{dtype} {setup.name}, {count} stream{'s' if count > 1 else ''}",
                    "tokens/s": median(speeds[setup.name]),
                    "ratio": ratio,
                    **part,
                    "same answers": f"{same}/{total}",
                }
            )
            floors.append(at_least(f"{dtype} {setup.name}, {count} streams / (a)", ratio, 1.0))
    return rows, floors


async def run(arguments: Any) -> None:
    """Measure each dtype and print."""
    rows: list[dict[str, Any]] = []
    floors: list[Floor] = []
    for dtype in arguments.dtypes.split(","):
        more_rows, more_floors = await run_dtype(
            dtype,
            model=arguments.model,
            rounds=arguments.rounds,
            new_tokens=arguments.new_tokens,
        )
        rows += more_rows
        floors += more_floors
    report("decode: stagemesh against transformers", rows, floors, as_json=arguments.json)


def main() -> None:
    """Parse the command line and run."""
    options = parser(__doc__ or "")
    options.add_argument("--model", default="smollm2-135m-instruct")
    options.add_argument("--dtypes", default="float32,bfloat16")
    options.add_argument("--new-tokens", type=int, default=64)
    asyncio.run(run(options.parse_args()))


if __name__ == "__main__":
    main()
