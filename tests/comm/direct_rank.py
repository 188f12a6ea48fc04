"""Rank 1 of a direct group in a process of its own: sums once, says how, and then does nothing."""

import sys
import time
from pathlib import Path

import torch

from stagemesh.comm.backends import GroupConfig, init_process_group
from stagemesh.comm.direct_group import DirectGroup
from stagemesh.comm.process_group import ProcessGroup
from stagemesh.comm.rendezvous import SharedFolder


def join(folder: str, rank: int) -> ProcessGroup:
    """A group of two that meets in a folder."""
    config = GroupConfig(
        backend="grpc",
        rendezvous=SharedFolder(path=Path(folder)),
        rank=rank,
        world_size=2,
        timeout_seconds=20.0,
    )
    return init_process_group(config)


def main(folder: str) -> None:
    """Until it is killed."""
    with join(folder, 1) as group:
        direct = DirectGroup(group)
        direct.connect()
        with torch.inference_mode():
            total = direct.all_reduce(torch.ones(3))
        sys.stdout.write(f"{type(direct.links).__name__} {total.tolist()}\n")
        sys.stdout.flush()
        time.sleep(60)


if __name__ == "__main__":
    main(sys.argv[1])
