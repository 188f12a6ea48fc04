"""Training steps of stagemesh against those of torch.distributed on Gloo, in one run.

Two processes a side, one compute thread each. The sides of a strategy are torch's peer, stagemesh
over backend gloo and stagemesh over backend grpc; all make the same steps from the same start, and
the run fails if their losses part. All live through the strategy's rounds and only one side works
at a time; a round measures one after the other, so that a ratio compares neighbours in time. Ratios
are medians over rounds of what the slower rank saw (itself a median over the steps of the round).

    time ratio     stagemesh's step time by the peer's: less is better
    cpu ms         of all threads of a rank: tells apart who works and who waits
    peak MB        most memory of a rank, the larger of the two, beyond an interpreter with torch
"""

import asyncio
import contextlib
import math
import sys
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from benchmarks.collectives import RankProcess, end_process
from benchmarks.report import Floor, at_most, median, parser, report
from benchmarks.training_rank import Answer
from benchmarks.training_strategies import STRATEGIES, Strategy

SIDES = ("peer", "gloo", "grpc")
RANKS = 2
_WARM_UP_STEPS = 3
_STEPS = 5
_LOSS_TOLERANCE = 1e-3


@contextlib.asynccontextmanager
async def side_of(name: str, side: str) -> AsyncGenerator[list[RankProcess], None]:
    """Start the ranks of a side, and end them with the block."""
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "benchmarks.training_rank"),
                *(name, side, str(rank), str(RANKS), folder),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            for rank in range(RANKS)
        ]
        running = [RankProcess(process) for process in processes]
        try:
            yield running
        finally:
            for process in processes:
                await end_process(process)


async def steps(running: Sequence[RankProcess], count: int) -> list[Answer]:
    """Let the ranks of a side make some steps."""
    for each in running:
        each.tell(count)
    return [Answer(**told) for told in await asyncio.gather(*(each.read() for each in running))]


async def measure(name: str, rounds: int) -> dict[str, list[list[Answer]]]:
    """By side and round, the ranks' answers."""
    answers: dict[str, list[list[Answer]]] = {side: [] for side in SIDES}
    async with contextlib.AsyncExitStack() as stack:
        running = {}
        for side in SIDES:
            running[side] = await stack.enter_async_context(side_of(name, side))
        for ranks in running.values():
            for each in ranks:
                await each.read()
        for ranks in running.values():
            await steps(ranks, _WARM_UP_STEPS)
        for _ in range(rounds):
            for side, ranks in running.items():
                answers[side].append(await steps(ranks, _STEPS))
            check_losses(name, {side: told[-1] for side, told in answers.items()})
    return answers


def check_losses(name: str, answers: Mapping[str, Sequence[Answer]]) -> None:
    """Make sure that what was measured trains the same model.

    Raises:
        RuntimeError: a side's loss is another than the peer's.
    """
    losses = {
        side: [told.loss for told in ranks if told.loss is not None]
        for side, ranks in answers.items()
    }
    for side, values in losses.items():
        pairs = zip(values, losses["peer"], strict=True)
        if not all(math.isclose(*pair, rel_tol=_LOSS_TOLERANCE) for pair in pairs):
            raise RuntimeError(
                f"{name}: losses {values} over {side}, the peer has {losses['peer']}"
            )


def summary(
    strategy: Strategy, answers: Mapping[str, Sequence[Sequence[Answer]]]
) -> tuple[list[dict[str, Any]], list[Floor]]:
    """A row for each side, and the floor."""
    seconds = {
        side: [max(told.seconds for told in ranks) for ranks in rounds]
        for side, rounds in answers.items()
    }
    rows = []
    floors = []
    for side in SIDES:
        title = f"stagemesh {strategy.title}, {side}"
        if side == "peer":
            title = f"torch {strategy.peer_title}, gloo"
        pairs = zip(seconds[side], seconds["peer"], strict=True)
        ratio = median([ours / theirs for ours, theirs in pairs])
        peak = max(told.peak_bytes for told in answers[side][-1])
        cpu = median([max(told.cpu_seconds for told in ranks) for ranks in answers[side]])
        row = {"what": title, "ms": median(seconds[side]) * 1e3, "time ratio": ratio}
        rows.append({**row, "cpu ms": cpu * 1e3, "peak MB": peak / 1e6})
        if side == "gloo":
            name = f"step time of {title} / torch {strategy.peer_title}"
            floors.append(at_most(name, ratio, strategy.floor))
    return rows, floors


async def run(arguments: Any) -> None:
    """Measure and print."""
    rows: list[dict[str, Any]] = []
    floors: list[Floor] = []
    for name in arguments.strategies.split(","):
        answers = await measure(name, arguments.rounds)
        more_rows, more_floors = summary(STRATEGIES[name], answers)
        rows += more_rows
        floors += more_floors
    report(f"training, {RANKS} ranks", rows, floors, as_json=arguments.json)


def main() -> None:
    """Parse the command line and run."""
    options = parser(__doc__ or "")
    options.add_argument("--strategies", default=",".join(STRATEGIES), help="separated by commas")
    asyncio.run(run(options.parse_args()))


if __name__ == "__main__":
    main()
