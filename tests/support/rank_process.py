"""A rank as a process: `-m tests.support.rank_process FOLDER BACKEND TIMEOUT`.

It meets the others in the folder, says so, and then does what each line of its input says: JSON
with `do` and its arguments. It answers each with a line of JSON.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from stagemesh.comm.backends import GroupConfig, init_process_group
from stagemesh.comm.comm_loop import CommLoop
from stagemesh.comm.process_group import ProcessGroup
from stagemesh.comm.rendezvous import SharedFolder
from stagemesh.errors import CommError


def say(**event: Any) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def all_reduce(group: ProcessGroup, numel: int) -> None:
    start = time.monotonic()
    try:
        total = group.all_reduce(torch.full((numel,), 1.0))
    except CommError as error:
        say(
            event="failed",
            error=type(error).__name__,
            text=str(error),
            seconds=time.monotonic() - start,
        )
    else:
        say(event="reduced", first=total[0].item(), last=total[-1].item())


def main(folder: str, backend: Any, timeout_seconds: float) -> None:
    groups: dict[str, ProcessGroup] = {}
    torch.set_num_threads(1)
    with CommLoop() as loop:

        def join(name: str, new_rank: int, new_size: int, incarnation: int) -> ProcessGroup:
            config = GroupConfig(
                backend=backend,
                rendezvous=SharedFolder(path=Path(folder), incarnation=incarnation),
                rank=new_rank,
                world_size=new_size,
                # To come takes the others as long as their interpreters take to start.
                timeout_seconds=timeout_seconds,
            )
            return groups.setdefault(name, init_process_group(config, loop=loop))

        say(event="started")
        for line in sys.stdin:
            order = json.loads(line)
            match order["do"]:
                case "join":
                    join(order["name"], order["rank"], order["size"], order["incarnation"])
                    say(event="joined")
                case "all_reduce":
                    all_reduce(groups[order["name"]], order["numel"])
                case "subgroup":
                    made = groups["world"].subgroup(order["ranks"])
                    assert made is not None
                    groups["sub"] = made
                    say(event="made")
                case "exit":
                    os._exit(3)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
