"""What the tests of tensor parallelism share: references, small models, how close is equal."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.parallel.tensor.state import gather_full_state_dict
from tests.support.ranks import run_ranks

FP32_TOLERANCE = 1e-5

_DRAWING = threading.Lock()


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    assert actual.shape == expected.shape
    difference = (actual.double() - expected.double()).norm()
    scale = expected.double().norm()
    return float(difference if scale == 0 else difference / scale)


def worst_error(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert actual.keys() == expected.keys()
    return max(relative_error(actual[name], expected[name]) for name in expected)


def seeded(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


class Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Attention(nn.Module):
    """Counts its heads by the width that it finds."""

    def __init__(self, hidden: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


def built(make: Callable[[], nn.Module], *, seed: int = 0) -> nn.Module:
    """A module drawn from a seed. Ranks that are threads have one random state: one at a time."""
    with _DRAWING, torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def train(
    model: nn.Module,
    loss_of: Callable[[nn.Module, int], torch.Tensor],
    *,
    num_steps: int,
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    **options: Any,
) -> list[float]:
    stepper = optimizer(model.parameters(), **options)  # type: ignore[call-arg]
    losses = []
    for step in range(num_steps):
        stepper.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        stepper.step()
        losses.append(loss.item())
    return losses


def trained_on_ranks(
    model: nn.Module,
    cut: Callable[[nn.Module, ProcessGroup], nn.Module],
    loss_of: Callable[[nn.Module, int], torch.Tensor],
    *,
    world_size: int,
    backend: str = "local",
    **options: Any,
) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """Each rank's losses, and the whole weights after training."""

    def run(group: ProcessGroup) -> Any:
        own = cut(copy.deepcopy(model), group)
        losses = train(own, loss_of, **options)
        return losses, gather_full_state_dict(own, process_group=group)

    return run_ranks(world_size, run, backend=backend)


class CountedGroup:
    """A group that notes the names of its collectives; for counting only."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._group, name)
        if callable(value):
            self.calls.append(name)
        return value
