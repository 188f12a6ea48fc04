"""One rank of PyTorch's own FSDP2: `-m tests.parallel.fsdp.torch_rank RANK SIZE FOLDER`.

Trains the shared model as `training.train` does; rank 0 leaves the whole parameters in the folder.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.parallel.fsdp.training import OPTIMIZERS, batches, make_model, train


def main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=size
    )
    model = make_model()
    # FSDP2 refuses 0-d parameters.
    for layer in model.layers:
        layer.scale = torch.nn.Parameter(layer.scale.detach().reshape(1))
    mesh = init_device_mesh("cpu", (size,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, OPTIMIZERS["adamw"](model.parameters()), data=batches(), rank=rank, size=size)
    whole = {name: value.full_tensor() for name, value in model.named_parameters()}
    if rank == 0:
        save_file(
            {name: value.detach().contiguous() for name, value in whole.items()},
            folder / "whole.safetensors",
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
