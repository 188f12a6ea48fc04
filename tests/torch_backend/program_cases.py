"""PyTorch's own ways to train over several processes, each with what it leaves on this rank."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.torch_backend.collective_cases import Tensors, values

STEPS = 3


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def train(module: nn.Module, rank: int) -> Tensors:
    """A few steps on a batch of this rank; the losses."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        inputs = values(rank + 10 * step, 4, 8) / 8
        loss = module(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses)}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def parameters(module: nn.Module) -> Tensors:
    return {name: whole(tensor) for name, tensor in module.named_parameters()}


def distributed_data_parallel(rank: int, size: int) -> Tensors:
    # Another seed per rank: the wrapper must bring the parameters of rank 0 to all.
    wrapped = DistributedDataParallel(model(seed=rank), bucket_cap_mb=1)
    return train(wrapped, rank) | parameters(wrapped)


def data_parallel_with_hooks(rank: int, size: int) -> Tensors:
    found: Tensors = {}
    for name in ("fp16", "powersgd"):
        wrapped = DistributedDataParallel(model())
        if name == "fp16":
            wrapped.register_comm_hook(None, fp16_compress_hook)
        else:
            # Its callbacks start further collectives and wait for them.
            state = PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
            wrapped.register_comm_hook(state, powerSGD_hook)
        train(wrapped, rank)
        found |= {f"{name} {key}": value for key, value in parameters(wrapped).items()}
    return found


def loader_workers(rank: int, size: int) -> Tensors:
    """Data from forked processes, while this one has gRPC's threads."""
    data = TensorDataset(values(0, 32, 8))
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(
        data, batch_size=4, sampler=sampler, num_workers=2, multiprocessing_context="fork"
    )
    wrapped = DistributedDataParallel(model())
    for (inputs,) in loader:
        wrapped(inputs).square().mean().backward()
    return {name: tensor.grad.clone() for name, tensor in wrapped.named_parameters()}


def fully_sharded(rank: int, size: int) -> Tensors:
    mesh = init_device_mesh("cpu", (size,))
    sharded = model()
    fully_shard(sharded[0], mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    return train(sharded, rank) | parameters(sharded)


def tensor_parallel(rank: int, size: int) -> Tensors:
    mesh = init_device_mesh("cpu", (size,))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallel = parallelize_module(model(), mesh, plan)
    inputs = values(0, 4, 8).requires_grad_()
    output = parallel(inputs)
    output.square().sum().backward()
    gradients = {
        f"gradient {name}": whole(tensor.grad) for name, tensor in parallel.named_parameters()
    }
    return {"output": output.detach(), "inputs": inputs.grad, **gradients}


def sequence_parallel(rank: int, size: int) -> Tensors:
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(1)
    norm = parallelize_module(nn.LayerNorm(8), mesh, SequenceParallel(use_local_output=False))
    output = norm(values(0, 2, 4, 8))
    output.sum().full_tensor().backward()
    return {"output": whole(output), "gradient": whole(norm.weight.grad)}


def pipelines(rank: int, size: int) -> Tensors:
    found: Tensors = {}
    for schedule_class in (ScheduleGPipe, Schedule1F1B):
        layers = model()
        part = layers[:2] if rank == 0 else layers[2:]
        stage = PipelineStage(part, rank, size, torch.device("cpu"))
        schedule = schedule_class(stage, n_microbatches=4, loss_fn=nn.MSELoss())
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(values(0, 8, 8))
        else:
            output = schedule.step(target=values(1, 8, 8), losses=losses)
            found[f"{schedule_class.__name__} output"] = output.detach()
            found[f"{schedule_class.__name__} losses"] = torch.stack(losses).detach()
        for name, tensor in part.named_parameters():
            found[f"{schedule_class.__name__} {name}"] = tensor.grad.clone()
    return found


def checkpoint(rank: int, size: int) -> Tensors:
    mesh = init_device_mesh("cpu", (size,))
    saved, loaded = model(), model(seed=5)
    for module in (saved, loaded):
        fully_shard(module, mesh=mesh)
    train(saved, rank)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, src=0)
    dcp.save(get_model_state_dict(saved), checkpoint_id=folder[0])
    state = get_model_state_dict(loaded)
    dcp.load(state, checkpoint_id=folder[0])
    set_model_state_dict(loaded, state)
    dist.barrier()
    assert list(Path(folder[0]).glob("*.distcp"))
    equal = [
        torch.equal(a, b)
        for a, b in zip(parameters(saved).values(), parameters(loaded).values(), strict=True)
    ]
    return {"equal": torch.tensor(equal), **parameters(loaded)}


CASES: dict[str, Callable[[int, int], Tensors]] = {
    case.__name__: case
    for case in (
        distributed_data_parallel,
        data_parallel_with_hooks,
        loader_workers,
        fully_sharded,
        tensor_parallel,
        sequence_parallel,
        pipelines,
        checkpoint,
    )
}
