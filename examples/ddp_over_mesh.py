"""Data-parallel training over stagemesh: an ordinary DDP script with one more import.

    torchrun --nproc-per-node 2 examples/ddp_over_mesh.py

On several hosts: torchrun's own --nnodes, --node-rank and --rdzv-endpoint, and on each host
STAGEMESH_BIND=0.0.0.0:0, STAGEMESH_ADVERTISE=<its address> and one STAGEMESH_TOKEN for all.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stagemesh.torch_backend  # noqa: F401  # registers the backend

STEPS = 20


def main() -> None:
    """Fit a small network to a function; each rank sees other samples."""
    dist.init_process_group("stagemesh")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for step in range(STEPS):
        points = torch.rand(64, 2)
        target = (points[:, :1] * points[:, 1:]).sin()
        loss = (model(points) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean_loss = loss.detach().clone()
        dist.all_reduce(mean_loss, op=dist.ReduceOp.AVG)
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {mean_loss:.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
