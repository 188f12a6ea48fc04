"""How fast a node daemon answers its health call while a large tensor moves between two of them.

Two daemons and the driver that moves 256 MiB from one to the other, again and again, are processes
of their own. Meanwhile this one asks both daemons for their health, a call every few milliseconds,
and reports how long the answers took. On few cores that includes waiting for one.
"""

import asyncio
import contextlib
import socket
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from benchmarks.report import at_most, parser, report
from stagemesh.rpc.channels import open_channel, wait_ready

NUM_BYTES = 256 * 2**20
HEALTH_FLOOR_MS = 100.0
MIN_CALLS = 200

_PAUSE_SECONDS = 0.005
_CALL_SECONDS = 10.0
_START_SECONDS = 60.0
_TRANSFER_SECONDS = 120.0
_END_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was seen while tensors moved."""

    latencies: list[float]
    """Seconds of each health call, of both daemons."""
    transfers: list[float]
    """Seconds of each transfer."""

    def percentile(self, percent: int) -> float:
        """Seconds within which so many per cent of the calls were answered."""
        return statistics.quantiles(self.latencies, n=100, method="inclusive")[percent - 1]


@contextlib.asynccontextmanager
async def child(module: str, *arguments: str) -> AsyncGenerator[asyncio.subprocess.Process, None]:
    """A process of ours, which ends with its input; killed when it does not."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    try:
        yield process
    finally:
        process.stdin.close()
        try:
            async with asyncio.timeout(_END_SECONDS):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


@contextlib.asynccontextmanager
async def node(name: str) -> AsyncGenerator[tuple[asyncio.subprocess.Process, str], None]:
    """A node daemon that answers, without a coordinator; its process and address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    arguments = ("--node-id", name, "--bind", address, "--device", "cpu", "--threads", "1")
    limits = ("--memory", "1GiB", "--log-level", "warning", "--exit-with-parent")
    async with child("node", *arguments, *limits) as process:
        channel = open_channel(address, token=None, kind="control")
        try:
            await wait_ready(channel, address=address, timeout_seconds=_START_SECONDS)
        finally:
            await channel.close()
        yield process, address


async def ask_until(done: asyncio.Event, address: str) -> list[float]:
    """Ask a daemon for its health until the event is set; seconds of each call."""
    latencies = []
    async with open_channel(address, token=None, kind="control") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        await wait_ready(channel, address=address, timeout_seconds=_START_SECONDS)
        while not done.is_set():
            started = time.perf_counter()
            reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_CALL_SECONDS)
            latencies.append(time.perf_counter() - started)
            if reply.status != health_pb2.HealthCheckResponse.SERVING:
                raise RuntimeError(f"{address} says {reply}")
            await asyncio.sleep(_PAUSE_SECONDS)
    return latencies


async def _line(process: asyncio.subprocess.Process, *, seconds: float) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(seconds):
        line = await process.stdout.readline()
    if not line:
        raise RuntimeError("the mover ended; its error is above")
    return line.decode().strip()


async def measure(*, num_bytes: int = NUM_BYTES, transfers: int) -> Measured:
    """Move the tensor so often, and ask all the while."""
    async with contextlib.AsyncExitStack() as stack:
        nodes = [await stack.enter_async_context(node(f"n{rank}")) for rank in range(2)]
        addresses = [address for _, address in nodes]
        mover = await stack.enter_async_context(
            child("benchmarks.health_mover", str(num_bytes), *addresses)
        )
        await _line(mover, seconds=_START_SECONDS)
        return await _ask_while_moving(mover, addresses, transfers=transfers)


async def _ask_while_moving(
    mover: asyncio.subprocess.Process, addresses: Sequence[str], *, transfers: int
) -> Measured:
    assert mover.stdin is not None
    done = asyncio.Event()
    asking = [asyncio.ensure_future(ask_until(done, address)) for address in addresses]
    seconds = []
    try:
        for _ in range(transfers):
            mover.stdin.write(b"\n")
            seconds.append(float(await _line(mover, seconds=_TRANSFER_SECONDS)))
    finally:
        done.set()
        answers = await asyncio.gather(*asking)
    return Measured(latencies=[each for answer in answers for each in answer], transfers=seconds)


async def run(*, rounds: int, as_json: bool) -> None:
    """Measure and print."""
    measured = await measure(transfers=rounds)
    if len(measured.latencies) < MIN_CALLS:
        raise RuntimeError(
            f"only {len(measured.latencies)} calls were made, not {MIN_CALLS}: use more --rounds"
        )
    p50, p99 = (1e3 * measured.percentile(percent) for percent in (50, 99))
    row = {
        "what": f"health of 2 daemons, {rounds} x 256 MiB between them",
        "calls": len(measured.latencies),
        "p50 ms": p50,
        "p99 ms": p99,
        "max ms": 1e3 * max(measured.latencies),
        "MB/s": NUM_BYTES / statistics.median(measured.transfers) / 1e6,
    }
    floor = at_most("p99 of health while 256 MiB moves", p99, HEALTH_FLOOR_MS, unit=" ms")
    report("health calls under load", [row], [floor], as_json=as_json)


def main() -> None:
    """Parse the command line and run."""
    arguments = parser(__doc__ or "").parse_args()
    asyncio.run(run(rounds=arguments.rounds, as_json=arguments.json))


if __name__ == "__main__":
    main()
