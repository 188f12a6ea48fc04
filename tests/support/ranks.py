"""Ranks as threads of the test's process, each with a blocking group."""

import random
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from stagemesh.comm.backends import GroupConfig, init_process_group
from stagemesh.comm.comm_loop import CommLoop
from stagemesh.comm.local_hub import LocalHub
from stagemesh.comm.process_group import ProcessGroup
from stagemesh.comm.rendezvous import SharedFolder

BACKENDS = ("local", "grpc", "gloo")

JOIN_SECONDS = 40.0


def run_ranks(
    world_size: int,
    run: Callable[[ProcessGroup], Any],
    *,
    backend: str = "local",
    timeout_seconds: float = 10.0,
    order: random.Random | None = None,
    **settings: Any,
) -> list[Any]:
    """What `run(group)` gives on each rank.

    The first failure aborts the group and is raised, with the tracebacks of all ranks as notes.

    Args:
        world_size: number of ranks.
        run: called once per rank, each in a thread of its own.
        backend: one of BACKENDS, or nccl.
        timeout_seconds: of the group.
        order: local only: lets messages overtake each other.
        settings: others of the GroupConfig.
    """
    with ExitStack() as stack:
        make = stack.enter_context(
            _local(world_size, timeout_seconds, order, settings)
            if backend == "local"
            else _on_one_loop(backend, world_size, timeout_seconds, settings)
        )
        return _run_on_threads(world_size, make, run)


@contextmanager
def _local(
    world_size: int, timeout_seconds: float, order: random.Random | None, settings: dict[str, Any]
) -> Iterator[Callable[[int], ProcessGroup]]:
    with LocalHub(order=order) as hub:
        yield lambda rank: init_process_group(
            GroupConfig(
                backend="local",
                rendezvous=hub,
                rank=rank,
                world_size=world_size,
                timeout_seconds=timeout_seconds,
                **settings,
            )
        )


@contextmanager
def _on_one_loop(
    backend: Any, world_size: int, timeout_seconds: float, settings: dict[str, Any]
) -> Iterator[Callable[[int], ProcessGroup]]:
    with tempfile.TemporaryDirectory() as folder, CommLoop() as loop:

        def make(rank: int) -> ProcessGroup:
            if backend == "nccl":
                torch.cuda.set_device(rank)
            config = GroupConfig(
                backend=backend,
                rendezvous=SharedFolder(path=Path(folder)),
                rank=rank,
                world_size=world_size,
                timeout_seconds=timeout_seconds,
                **settings,
            )
            return init_process_group(config, loop=loop)

        yield make


def _run_on_threads(
    world_size: int, make: Callable[[int], ProcessGroup], run: Callable[[ProcessGroup], Any]
) -> list[Any]:
    results: list[Any] = [None] * world_size
    groups: list[ProcessGroup] = []
    failures: list[tuple[int, BaseException]] = []

    def work(rank: int) -> None:
        try:
            group = make(rank)
            groups.append(group)
            # A backward of this thread stays in it: on one device all ranks would share autograd's
            # thread, and a collective in there would wait for itself.
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = run(group)
        except BaseException as error:
            failures.append((rank, error))
            for group in groups:
                if group.rank == rank:
                    group.abort(f"rank {rank} failed: {error}")

    threads = [
        threading.Thread(target=work, args=(rank,), name=f"rank-{rank}", daemon=True)
        for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_SECONDS)
    stuck = [thread.name for thread in threads if thread.is_alive()]
    for group in groups:
        group.close()
    assert not stuck, f"{stuck} did not end in {JOIN_SECONDS:g} s"
    if failures:
        _, first = failures[0]
        for rank, error in failures:
            first.add_note(f"rank {rank}: " + "".join(traceback.format_exception(error))[-2000:])
        raise first
    return results
