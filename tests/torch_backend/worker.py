"""A rank of the comparison: runs all cases over one backend and saves what each left.

torchrun --nproc-per-node 2 -m tests.torch_backend.worker BACKEND FOLDER
"""

import sys
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor

import stagemesh.torch_backend
from tests.torch_backend import collective_cases, program_cases
from tests.torch_backend.collective_cases import Tensors

CASES = collective_cases.CASES | program_cases.CASES


def corrupt(group: stagemesh.torch_backend.MeshProcessGroup) -> None:
    """Let one bit of each reduction be wrong."""
    reduce = group.group.all_reduce

    async def all_reduce(tensor: torch.Tensor, **arguments: object) -> torch.Tensor:
        await reduce(tensor, **arguments)
        if tensor.is_floating_point() and tensor.numel():
            with torch.no_grad():
                first = tensor.view(-1)[:1]
                first.copy_(torch.nextafter(first, torch.full_like(first, torch.inf)))
        return tensor

    group.group.all_reduce = all_reduce


def plain(tensors: Tensors) -> Tensors:
    """Without torch's wrappers around results that are still under way."""
    return {
        name: (tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor).detach()
        for name, tensor in tensors.items()
    }


def main(backend: str, folder: str) -> None:
    # torch 2.13 renames some calls; the old names are those of most programs.
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    found: dict[str, object] = {}
    for name, case in CASES.items():
        try:
            found[name] = plain(case(rank, size))
        except Exception:
            # Reported by the test of this case, so that the others still run.
            found[name] = traceback.format_exc()
    if backend == "stagemesh":
        corrupt(dist.group.WORLD)
    found["corrupted"] = plain(collective_cases.all_reduce(rank, size))
    torch.save(found, Path(folder) / f"{backend}-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
