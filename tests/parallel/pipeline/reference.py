"""One model in one process, and the same in a pipeline of ranks."""

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.parallel.pipeline import PipelineParallel, even_counts, split_sequential
from tests.support.ranks import run_ranks

WIDTH = 6
SCHEDULES = ("gpipe", "one_f_one_b", "interleaved", "zero_bubble")


def make_model(num_layers: int = 8, *, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Layers that differ, so that a wrong order shows."""
    generator = torch.Generator().manual_seed(7)
    layers: list[nn.Module] = []
    for index in range(num_layers):
        block = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Tanh() if index % 2 else nn.LayerNorm(WIDTH)
        )
        for parameter in block.parameters():
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
        layers.append(block)
    return nn.Sequential(*layers).to(dtype)


def make_batch(size: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randn(2, size, WIDTH, generator=generator).to(dtype)
    return inputs, targets


@dataclass(kw_only=True)
class Trained:
    """Where a model stands after some steps."""

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of the last step."""
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)


def train_alone(
    model: nn.Sequential, batches: Sequence[tuple[Any, Any]], *, lr: float = 0.05
) -> Trained:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    trained = Trained()
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        trained.losses.append(loss.item())
        trained.gradients = gradients_of(model)
        optimizer.step()
    trained.parameters = copied(model.state_dict())
    return trained


def train_in_pipeline(
    model: nn.Sequential,
    batches: Sequence[tuple[Any, Any]],
    *,
    num_ranks: int,
    num_microbatches: int,
    schedule: Any = "one_f_one_b",
    stages_per_rank: int = 1,
    counts: Sequence[int] | None = None,
    backend: str = "local",
    order: random.Random | None = None,
    lr: float = 0.05,
    loss_fn: Callable[..., torch.Tensor] = nn.functional.mse_loss,
    **options: Any,
) -> Trained:
    """The same training by ranks; what they have, put together."""
    num_stages = num_ranks * stages_per_rank
    counts = counts or even_counts(len(model), num_stages=num_stages)

    def run(group: ProcessGroup) -> Trained:
        stages = split_sequential(copy.deepcopy(model), counts=counts)[group.rank :: group.size]
        pipeline = PipelineParallel(
            stages,
            process_group=group,
            num_microbatches=num_microbatches,
            schedule=schedule,
            loss_fn=loss_fn,
            num_stages=num_stages,
            **options,
        )
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=lr, momentum=0.9)
        trained = Trained()
        for inputs, targets in batches:
            optimizer.zero_grad()
            result = pipeline.step(
                inputs if pipeline.is_first else None, targets if pipeline.is_last else None
            )
            assert (result.loss is not None) == pipeline.is_last
            if result.loss is not None:
                trained.losses.append(result.loss.item())
            trained.gradients = {n: g for stage in stages for n, g in gradients_of(stage).items()}
            optimizer.step()
        trained.parameters = {n: p for s in stages for n, p in copied(s.state_dict()).items()}
        return trained

    whole = Trained()
    for part in run_ranks(num_ranks, run, backend=backend, order=order):
        whole.losses += part.losses
        whole.gradients |= part.gradients
        whole.parameters |= part.parameters
    return whole


def gradients_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return copied({n: p.grad for n, p in module.named_parameters() if p.grad is not None})


def copied(tensors: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def assert_same(ours: Trained, reference: Trained, *, relative: float = 1e-5) -> None:
    """Losses, gradients and parameters; the difference relative to each tensor's largest value.

    A gradient below 1e-6 is a sum that has cancelled out: there an error of 1e-11 is rounding.
    """
    assert ours.gradients.keys() == reference.gradients.keys()
    assert ours.parameters.keys() == reference.parameters.keys()
    torch.testing.assert_close(ours.losses, reference.losses, rtol=relative, atol=0)
    for mine, theirs in (
        (ours.gradients, reference.gradients),
        (ours.parameters, reference.parameters),
    ):
        for name, right in theirs.items():
            difference = (mine[name] - right).abs().max().item()
            largest = max(right.abs().max().item(), 1e-6)
            assert difference <= relative * largest, (name, difference, largest)
