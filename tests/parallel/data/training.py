"""A small model, its data and a training loop that the tests of this folder share."""

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 11
BATCH = 12
LENGTH = 5


class TinyLm(nn.Module):
    """Embedding tied to the head, a norm, an MLP, and a bias that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.up = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.down = nn.Linear(16, 8)
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.spare = nn.Parameter(torch.full((3,), 2.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        hidden = hidden + self.down(F.gelu(self.norm(self.up(hidden))))
        logits: torch.Tensor = self.head(hidden)
        return logits


def make_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> TinyLm:
    """The same values for a seed, also while other threads draw from torch's own generator."""
    generator = torch.Generator().manual_seed(seed)
    model = TinyLm()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter is not model.spare:
                parameter.normal_(std=0.3, generator=generator)
    return model.to(dtype)


def data(step: int) -> torch.Tensor:
    """The whole batch of a step. [BATCH, LENGTH]"""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def part(tokens: torch.Tensor, index: int, count: int) -> torch.Tensor:
    return tokens.tensor_split(count)[index]


def train(
    model: nn.Module,
    backward: Callable[[torch.Tensor], None],
    *,
    num_steps: int = 20,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    to_none: bool = True,
) -> dict[str, torch.Tensor]:
    """Parameters after some steps; `backward` gets the whole batch of each."""
    steps = optimizer(model.parameters(), lr=0.01)
    for step in range(num_steps):
        steps.zero_grad(set_to_none=to_none)
        backward(data(step))
        steps.step()
    return {
        name.removeprefix("module."): parameter.detach().clone()
        for name, parameter in model.named_parameters()
    }


def reference(
    *,
    dtype: torch.dtype = torch.float32,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    num_steps: int = 20,
) -> dict[str, torch.Tensor]:
    """What one process gets from the whole batches."""
    model = make_model(dtype=dtype)
    return train(
        model,
        lambda tokens: loss_of(model, tokens).backward(),
        optimizer=optimizer,
        num_steps=num_steps,
    )


def distance(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> float:
    """The largest relative difference of a tensor's norm."""
    assert ours.keys() == theirs.keys()
    return max(
        float((ours[name].detach().double() - value).norm() / value.norm())
        for name, value in ((name, value.detach().double()) for name, value in theirs.items())
    )
