"""A tiny Llama, its batches, and what one process makes of them."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.parallel.mesh import open_mesh
from stagemesh.topology import Topology
from stagemesh.training.config import TrainConfig
from stagemesh.training.train_step import StepReport, TrainStep
from stagemesh.training.weights import EMBEDDING, HEAD, FreshWeights

MODEL: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
TIED = {**MODEL, "tie_word_embeddings": True}
FP32 = 1e-5


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Momentum without Adam's division, which makes noise of gradients that are nearly 0."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def make_config(
    dp: int = 1, pp: int = 1, tp: int = 1, *, fsdp: bool = False, **changes: Any
) -> TrainConfig:
    settings: dict[str, Any] = {
        "batch_size": 8,
        "sequence_length": 12,
        "num_microbatches": 2,
        "learning_rate": 0.2,
        "warmup_steps": 4,
        "total_steps": 20,
        "max_grad_norm": 0.5,
    }
    return TrainConfig(topology=Topology(dp=dp, pp=pp, tp=tp), fsdp=fsdp, **{**settings, **changes})


def batch_of(step: int, config: TrainConfig) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    shape = (config.batch_size, config.sequence_length + 1)
    # Skewed, so that there is something to learn.
    ids = (torch.rand(shape, generator=generator) ** 2 * MODEL["vocab_size"]).long()
    return ids[:, :-1], ids[:, 1:]


@dataclass(kw_only=True)
class Trained:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    evaluated: float = 0.0


def whole_model(model: dict[str, Any], *, seed: int = 0) -> Any:
    """The model of transformers with the weights that FreshWeights gives."""
    config = AutoConfig.for_model(**copy.deepcopy(model))
    config._attn_implementation = "sdpa"
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    source = FreshWeights(model, seed=seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(source.read(name, tuple(parameter.shape)))
    return made


def train_alone(
    model: dict[str, Any],
    *,
    num_steps: int = 20,
    config: TrainConfig | None = None,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    dtype: torch.dtype = torch.float32,
) -> Trained:
    """Plain PyTorch and transformers: nothing of ours but the learning rate's formula."""
    config = config or make_config()
    whole = whole_model(model).to(dtype)
    optimizer = make_optimizer(whole.parameters())
    found = Trained()

    def loss_of(step: int) -> torch.Tensor:
        inputs, targets = batch_of(step, config)
        logits = whole(inputs, use_cache=False).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    for step in range(num_steps):
        optimizer.zero_grad()
        loss = loss_of(step)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(whole.parameters(), config.max_grad_norm or 1e9)
        optimizer.param_groups[0]["lr"] = config.learning_rate_at(step)
        optimizer.step()
        found.losses.append(loss.item())
        found.norms.append(norm.item())
    found.weights = {name: p.detach().clone() for name, p in whole.named_parameters()}
    with torch.no_grad():
        found.evaluated = loss_of(1000).item()
    return found


def run_steps(step: TrainStep, *, first: int, last: int) -> list[StepReport]:
    return [step.step(*batch_of(number, step.config), step=number) for number in range(first, last)]


def train_on(
    world: ProcessGroup,
    model: dict[str, Any],
    config: TrainConfig,
    *,
    num_steps: int = 20,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
) -> Trained:
    """One rank's part; the weights are those that this rank writes, whole."""
    with open_mesh(world, config.topology) as mesh:
        step = TrainStep(
            model,
            mesh=mesh,
            config=config,
            weights=FreshWeights(model, seed=0),
            make_optimizer=make_optimizer,
        )
        reports = run_steps(step, first=0, last=num_steps)
        weights: dict[str, torch.Tensor] = {}
        for replica in step.replicas:
            weights |= replica.gather_parameters()
        evaluated = step.evaluate(*batch_of(1000, config))
        step.close()
    return Trained(
        losses=[report.loss for report in reports],
        norms=[report.grad_norm for report in reports],
        weights=weights,
        evaluated=evaluated,
    )


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def assert_same(ranks: list[Trained], alone: Trained, *, relative: float = FP32) -> None:
    """Losses, norms and all weights, as far as any rank has them."""
    weights: dict[str, torch.Tensor] = {}
    for rank in ranks:
        weights |= rank.weights
        for ours, theirs in (
            (rank.losses, alone.losses),
            (rank.norms, alone.norms),
            ([rank.evaluated], [alone.evaluated]),
        ):
            error = relative_error(torch.tensor(ours), torch.tensor(theirs))
            assert error < relative, (error, ours, theirs)
    extra = {HEAD} if HEAD not in alone.weights else set()
    assert weights.keys() - extra == alone.weights.keys()
    for name, ours in weights.items():
        theirs = alone.weights[EMBEDDING if name in extra else name]
        assert relative_error(ours, theirs) < relative, name
