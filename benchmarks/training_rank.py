"""One rank of the training benchmark: STRATEGY SIDE RANK SIZE FOLDER.

SIDE is peer (torch over Gloo), or the backend of stagemesh: gloo or grpc.

It says when it is ready. Then each line of its input asks for that many steps, and is answered with
one line of JSON, an `Answer`. It ends with its input.
"""

import json
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import cast

import psutil
import torch
import torch.distributed as dist

from benchmarks.training_strategies import STRATEGIES, Strategy, Trainer
from stagemesh.comm.backends import Backend, GroupConfig, init_process_group
from stagemesh.comm.rendezvous import SharedFolder

_TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What some steps cost this rank."""

    seconds: float
    """Median of one step."""
    cpu_seconds: float
    """Mean of one step, of all threads."""
    peak_bytes: int
    """Most memory of the process so far, less what it had before it made a model."""
    loss: float | None
    """Of the last step, where this rank knows it."""


@contextmanager
def trainer_of(
    strategy: Strategy, side: str, *, rank: int, size: int, folder: Path
) -> Iterator[Trainer]:
    """Join the group of a side, and make its trainer."""
    if side == "peer":
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'store'}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=_TIMEOUT_SECONDS),
        )
        try:
            yield strategy.make_peer()
        finally:
            dist.destroy_process_group()
        return
    config = GroupConfig(
        backend=cast(Backend, side),
        rendezvous=SharedFolder(path=folder),
        rank=rank,
        world_size=size,
        timeout_seconds=_TIMEOUT_SECONDS,
        # As runs of training do, and as torch's own wrappers: after a failure a step is lost.
        reduce_in_place=True,
    )
    with init_process_group(config) as group:
        yield strategy.make(group)


def measure(trainer: Trainer, *, first: int, count: int, base_bytes: int) -> Answer:
    """Make some steps."""
    seconds = []
    loss = None
    cpu_started = time.process_time()
    for index in range(first, first + count):
        started = time.perf_counter()
        loss = trainer.step(index)
        seconds.append(time.perf_counter() - started)
    cpu_seconds = (time.process_time() - cpu_started) / count
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Answer(
        seconds=statistics.median(seconds),
        cpu_seconds=cpu_seconds,
        peak_bytes=peak - base_bytes,
        loss=loss,
    )


def main(name: str, side: str, rank: int, size: int, folder: Path) -> None:
    """Serve until standard input ends."""
    torch.set_num_threads(1)
    base_bytes = psutil.Process().memory_info().rss
    with trainer_of(STRATEGIES[name], side, rank=rank, size=size, folder=folder) as trainer:
        print(json.dumps("ready"), flush=True)
        done = 0
        for line in sys.stdin:
            count = int(line)
            answer = measure(trainer, first=done, count=count, base_bytes=base_bytes)
            done += count
            print(json.dumps(asdict(answer)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
