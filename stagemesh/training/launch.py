"""How the processes of a training become ranks: started by torchrun, by `launch_ranks`, or alone.

`launch_ranks` starts copies of a program on this machine. They end with it, however it ends: each
holds the other end of a pipe, and looks at it between steps.
"""

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from stagemesh.comm.backends import Backend, GroupConfig, init_process_group
from stagemesh.comm.local_hub import LocalHub
from stagemesh.comm.process_group import ProcessGroup
from stagemesh.comm.rendezvous import SharedFolder
from stagemesh.comm.tcp_store import torchrun_meeting
from stagemesh.errors import ConfigError, NotReady

MEETING_VARIABLE = "STAGEMESH_MEETING"
"""Set for the ranks that `launch_ranks` starts: the folder where they meet."""

_POLL_SECONDS = 0.05
_END_SECONDS = 10.0


def launch_ranks(
    arguments: Sequence[str], *, num_ranks: int, grace_seconds: float = 60.0
) -> list[int]:
    """Run a Python program as so many ranks on this machine, to their end.

    Args:
        arguments: of the interpreter: a script or "-m" and a module, and what follows.
        num_ranks: processes to start.
        grace_seconds: how long the others may take to end by themselves once one has failed.

    Returns:
        Exit statuses by rank; negative for a signal's number.

    Raises:
        ConfigError: num_ranks is below 1.
    """
    if num_ranks < 1:
        raise ConfigError(f"the number of ranks to launch must be at least 1, got {num_ranks}")
    children: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(num_ranks):
                environment = _environment(rank, num_ranks, folder)
                children.append(
                    subprocess.Popen(
                        [sys.executable, *arguments], stdin=subprocess.PIPE, env=environment
                    )
                )
            return _wait(children, grace_seconds=grace_seconds)
        finally:
            _end(children)


def describe_failures(statuses: Sequence[int]) -> str:
    """Which ranks failed, and how; empty if none did."""
    told = []
    for rank, status in enumerate(statuses):
        if status < 0:
            told.append(f"rank {rank} was ended by {signal.Signals(-status).name}")
        elif status:
            told.append(f"rank {rank} ended with status {status}")
    return ", ".join(told)


@contextmanager
def join_world(
    environ: Mapping[str, str], *, backend: Backend, timeout_seconds: float
) -> Iterator[ProcessGroup]:
    """The group of all ranks, by the variables of `launch_ranks` or torchrun; alone without.

    Off this machine STAGEMESH_BIND, STAGEMESH_ADVERTISE and STAGEMESH_TOKEN say how a rank is
    reached.

    Raises:
        ConfigError: the variables do not fit together.
        CommError: ranks did not come.
    """
    if MEETING_VARIABLE in environ:
        config = GroupConfig(
            backend=backend,
            rendezvous=SharedFolder(path=Path(environ[MEETING_VARIABLE])),
            rank=int(environ["RANK"]),
            world_size=int(environ["WORLD_SIZE"]),
            timeout_seconds=timeout_seconds,
            reduce_in_place=True,
        )
    elif "RANK" in environ:
        config = GroupConfig(
            backend=backend,
            rendezvous=torchrun_meeting(environ),
            timeout_seconds=timeout_seconds,
            reduce_in_place=True,
            bind=environ.get("STAGEMESH_BIND"),
            advertise=environ.get("STAGEMESH_ADVERTISE"),
            token=environ.get("STAGEMESH_TOKEN"),
        )
    else:
        hub = LocalHub()
        with (
            hub,
            init_process_group(
                GroupConfig(
                    backend="local",
                    rendezvous=hub,
                    rank=0,
                    world_size=1,
                    timeout_seconds=timeout_seconds,
                )
            ) as group,
        ):
            yield group
        return
    with init_process_group(config) as group:
        yield group


def world_size_of(environ: Mapping[str, str]) -> int:
    """Ranks that there will be in `join_world`.

    Raises:
        ConfigError: WORLD_SIZE is no number.
    """
    text = environ.get("WORLD_SIZE", "1") if "RANK" in environ else "1"
    if not text.isdecimal():
        raise ConfigError(f"WORLD_SIZE must be a number, got {text!r}")
    return int(text)


def local_device(device: str, environ: Mapping[str, str]) -> torch.device:
    """Where this rank computes: of "cuda" without a number, the ranks of a host take one each.

    Raises:
        ConfigError: there is no such device here.
    """
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device {device!r} is none that torch knows: {error}") from error
    if found.type != "cuda":
        return found
    count = torch.cuda.device_count()
    index = found.index
    if index is None:
        index = int(environ.get("LOCAL_RANK", "0"))
    if index >= count:
        raise ConfigError(f"there is no device cuda:{index} here: torch sees {count} of them")
    return torch.device("cuda", index)


def check_parent(environ: Mapping[str, str]) -> None:
    """Raise once the process that launched this one is gone; for ranks that were not launched: no.

    Raises:
        NotReady: it is.
    """
    if MEETING_VARIABLE not in environ:
        return
    readable, _, _ = select.select([sys.stdin.fileno()], [], [], 0)
    if readable and not os.read(sys.stdin.fileno(), 4096):
        raise NotReady("the process that launched this rank is gone")


def _environment(rank: int, num_ranks: int, folder: str) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        MEETING_VARIABLE: folder,
    }


def _wait(children: Sequence[subprocess.Popen[bytes]], *, grace_seconds: float) -> list[int]:
    deadline: float | None = None
    while True:
        statuses = [child.poll() for child in children]
        if all(status is not None for status in statuses):
            return [status for status in statuses if status is not None]
        if any(statuses) and deadline is None:
            deadline = time.monotonic() + grace_seconds
        if deadline is not None and time.monotonic() > deadline:
            _end(children)
        time.sleep(_POLL_SECONDS)


def _end(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask those that still run to end, then make them."""
    running = [child for child in children if child.poll() is None]
    for child in running:
        child.terminate()
    deadline = time.monotonic() + _END_SECONDS
    for child in running:
        try:
            child.wait(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    for child in children:
        if child.stdin is not None:
            child.stdin.close()
