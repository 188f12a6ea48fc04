"""Collectives between processes of this machine: stagemesh over TCP and unix sockets, and Gloo.

Two and four processes; all live through the whole run and only those of one measurement work at a
time. A round measures every backend one after the other, so that a ratio compares neighbours in
time; ratios are medians over rounds of what rank 0 saw (itself a median over the operations of the
round). stagemesh runs in its asyncio form, Gloo in torch's blocking one, one compute thread each.

    time ratio         stagemesh's time by Gloo's, of small tensors: less is better
    bandwidth ratio    stagemesh's bytes a second by Gloo's, of large ones: more is better
"""

import asyncio
import contextlib
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.collectives_rank import Request
from benchmarks.report import Floor, at_least, at_most, median, parser, report

BACKENDS = ("tcp", "unix", "gloo")
SMALL = {2304: "2.3 KB", 65536: "64 KB"}
LARGE = {2**20: "1 MB", 16 * 2**20: "16 MB", 64 * 2**20: "64 MB"}
# Long enough for a median, short enough for neighbours in time.
_BYTES_PER_MEASUREMENT = 48 * 2**20
_MOST_ITERATIONS = 200
_FEWEST_ITERATIONS = 3

SMALL_TIME_FLOOR = 0.8
LARGE_BANDWIDTH_FLOOR = 0.3

_ANSWER_SECONDS = 120.0
_END_SECONDS = 10.0


class RankProcess:
    """A process of benchmarks.collectives_rank."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    def tell(self, message: Any) -> None:
        """Write one line."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def read(self) -> Any:
        """Read one line."""
        assert self._process.stdout is not None
        async with asyncio.timeout(_ANSWER_SECONDS):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("a rank ended; its error is above")
        return json.loads(line)


@contextlib.asynccontextmanager
async def ranks(count: int) -> AsyncGenerator[list[RankProcess], None]:
    """Start the processes, join them, and end them with the block."""
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.collectives_rank", str(rank)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        for rank in range(count)
    ]
    running = [RankProcess(process) for process in processes]
    try:
        with tempfile.TemporaryDirectory() as folder:
            members = [await each.read() for each in running]
            for each in running:
                each.tell({"members": members, "store": str(Path(folder) / "store")})
            for each in running:
                await each.read()
            yield running
    finally:
        for process in processes:
            await end_process(process)


async def end_process(process: asyncio.subprocess.Process) -> None:
    """Let a rank end with its input, so that it removes its socket."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(_END_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def measure(running: Sequence[RankProcess], request: Request) -> float:
    """Seconds of one operation, as rank 0 saw it."""
    taking_part = running[: request.size]
    for each in taking_part:
        each.tell(asdict(request))
    return float((await asyncio.gather(*(each.read() for each in taking_part)))[0])


def requests(sizes: Sequence[int]) -> list[Request]:
    """What a round measures, for each backend."""
    result = []
    for size in sizes:
        for operation in ("all_reduce", "send"):
            if operation == "send" and size > 2:
                continue
            for num_bytes in (*SMALL, *LARGE):
                iterations = max(_FEWEST_ITERATIONS, _BYTES_PER_MEASUREMENT // num_bytes)
                result.append(
                    Request(
                        backend="",
                        operation=operation,
                        size=size,
                        num_bytes=num_bytes,
                        iterations=min(iterations, _MOST_ITERATIONS),
                    )
                )
    return result


async def run(arguments: Any) -> None:
    """Measure and print."""
    sizes = [int(size) for size in arguments.ranks.split(",")]
    asked = requests(sizes)
    seconds: defaultdict[tuple[Request, str], list[float]] = defaultdict(list)
    async with ranks(max(sizes)) as running:
        for _ in range(arguments.rounds):
            for request in asked:
                for backend in BACKENDS:
                    value = await measure(running, replace(request, backend=backend))
                    seconds[request, backend].append(value)
    rows, floors = summary(asked, seconds)
    report("collectives: stagemesh against Gloo", rows, floors, as_json=arguments.json)


def summary(
    asked: Sequence[Request], seconds: dict[tuple[Request, str], list[float]]
) -> tuple[list[dict[str, Any]], list[Floor]]:
    """A row for each request and backend, and the floors."""
    rows = []
    floors = []
    for request in asked:
        for backend in BACKENDS:
            values = seconds[request, backend]
            pairs = zip(values, seconds[request, "gloo"], strict=True)
            time_ratio = median([ours / theirs for ours, theirs in pairs])
            is_small = request.num_bytes in SMALL
            label = (SMALL if is_small else LARGE)[request.num_bytes]
            row = {
                "what": f"{request.operation}, {request.size} ranks, {label}, {backend}",
                "ms": median(values) * 1e3,
                "MB/s": request.num_bytes / median(values) / 1e6,
                "time ratio": time_ratio,
                "bandwidth ratio": 1 / time_ratio,
            }
            rows.append(row)
            if backend == "gloo" or request.operation != "all_reduce" or request.size != 2:
                continue
            if is_small:
                name = f"time of {row['what']} / gloo"
                floors.append(at_most(name, time_ratio, SMALL_TIME_FLOOR))
            elif request.num_bytes == max(LARGE):
                name = f"bandwidth of {row['what']} / gloo"
                floors.append(at_least(name, 1 / time_ratio, LARGE_BANDWIDTH_FLOOR))
    return rows, floors


def main() -> None:
    """Parse the command line and run."""
    options = parser(__doc__ or "")
    options.add_argument("--ranks", default="2,4", help="group sizes, separated by commas")
    asyncio.run(run(options.parse_args()))


if __name__ == "__main__":
    main()
