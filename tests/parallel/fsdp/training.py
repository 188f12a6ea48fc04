"""A small model, its data and a training loop that the tests of this folder share."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.parallel.fsdp.config import FsdpConfig, ShardingStrategy
from stagemesh.parallel.fsdp.fsdp import Fsdp

VOCABULARY = 17
WIDTH = 12
NUM_LAYERS = 4
BATCH = 12
LENGTH = 5
NUM_STEPS = 20

STRATEGIES = tuple(ShardingStrategy)

OPTIMIZERS: Mapping[str, Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 21)
        self.down = nn.Linear(21, WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.9))  # 0-d

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.scale * self.down(F.gelu(self.up(self.norm(hidden))))


class SmallLm(nn.Module):
    """Blocks in a ModuleList, a head tied to the embedding, a buffer."""

    def __init__(self, *, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(NUM_LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("temperature", torch.tensor([1.25]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden) / self.temperature


def make_model(seed: int = 0, *, block: type[nn.Module] = Block) -> SmallLm:
    """The same values for a seed, also while other threads draw from torch's own generator."""
    generator = torch.Generator().manual_seed(seed)
    model = SmallLm(block=block)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name and "scale" not in name:
                parameter.normal_(std=0.3, generator=generator)
    return model


def batches(num_steps: int = NUM_STEPS) -> list[torch.Tensor]:
    """Whole batches. Each [BATCH, LENGTH]."""
    generator = torch.Generator().manual_seed(1)
    return list(torch.randint(VOCABULARY, (num_steps, BATCH, LENGTH), generator=generator))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    data: Iterable[torch.Tensor],
    rank: int = 0,
    size: int = 1,
    max_norm: float | None = None,
) -> None:
    """Each rank takes its part of each batch."""
    for tokens in data:
        loss_of(model, tokens.tensor_split(size)[rank]).backward()
        if max_norm is not None and isinstance(model, Fsdp):
            model.clip_grad_norm_(max_norm=max_norm)
        elif max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()


def trained_alone(name: str, *, max_norm: float | None = None) -> dict[str, torch.Tensor]:
    """What one process gets from the whole batches."""
    model = make_model()
    train(model, OPTIMIZERS[name](model.parameters()), data=batches(), max_norm=max_norm)
    return {name: value.detach() for name, value in model.state_dict().items()}


def config(**changes: Any) -> FsdpConfig:
    """Exact arithmetic, and units as small as the model's."""
    return FsdpConfig(**({"mixed_precision": False, "min_param_size": 100} | changes))


def wrap(group: ProcessGroup, **changes: Any) -> Fsdp:
    # Other values on other ranks: all must get those of rank 0.
    return Fsdp(make_model(seed=group.rank), process_group=group, config=config(**changes))


def distance(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> float:
    """The largest relative difference of a tensor's norm."""
    assert ours.keys() == theirs.keys()
    assert all(ours[name].shape == theirs[name].shape for name in theirs)
    return max(
        float((ours[name].double() - value.double()).norm() / value.double().norm())
        for name, value in theirs.items()
    )
