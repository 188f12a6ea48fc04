"""TrainConfig: how a model is trained, checked before anything is built."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from stagemesh.errors import ConfigError, UnsupportedModel
from stagemesh.schedule.builders import build_schedule
from stagemesh.topology import Topology

Precision = Literal["float32", "mixed", "bfloat16"]

SETTINGS = (
    "batch_size",
    "sequence_length",
    "learning_rate",
    "warmup_steps",
    "total_steps",
    "precision",
    "seed",
)
"""Names of what checkpoints say of a TrainConfig."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The same on all ranks."""

    topology: Topology = field(default_factory=Topology)
    """Degrees of the axes."""
    fsdp: bool = False
    """The dp axis shares parameters, gradients and optimizer state (ZeRO-3), instead of holding
    copies of them."""
    schedule: str = "one_f_one_b"
    """How micro-batches pass the stages of the pp axis."""
    num_microbatches: int = 1
    """Parts of a replica's batch."""
    batch_size: int = 16
    """Sequences of an optimizer step, over all replicas."""
    sequence_length: int = 128
    """Tokens of a sequence."""
    learning_rate: float = 1e-3
    """At the end of the warm-up."""
    warmup_steps: int = 20
    """Steps in which the rate rises from 0."""
    total_steps: int = 300
    """Steps until the rate has fallen to a tenth, along a cosine."""
    weight_decay: float = 0.01
    """Of AdamW."""
    max_grad_norm: float | None = 1.0
    """Gradients are scaled so that their norm over all axes is at most this; None: never."""
    precision: Precision = "float32"
    """mixed: computes in bfloat16; parameters, sums of gradients and optimizer are float32.
    bfloat16: they are bfloat16, too. Half the memory, but small updates are rounded away."""
    checkpoint_activations: bool = False
    """Hold only inputs of stages between forward and backward, and compute forwards twice."""
    seed: int = 0
    """Of fresh weights and the order of the data."""

    def __post_init__(self) -> None:
        for name in ("num_microbatches", "batch_size", "sequence_length", "total_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.precision not in get_args(Precision):
            raise ConfigError(
                f"precision must be one of {', '.join(get_args(Precision))}, got {self.precision!r}"
            )
        if not self.learning_rate > 0 or self.warmup_steps < 0:
            raise ConfigError("learning_rate must be positive, and warmup_steps not negative")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm must be positive, got {self.max_grad_norm}")
        self._check_batch()
        self._check_schedule()

    @property
    def parameter_dtype(self) -> Literal["float32", "bfloat16"]:
        """Of the parameters, and so of the optimizer's state and of checkpoints."""
        return "bfloat16" if self.precision == "bfloat16" else "float32"

    @property
    def settings(self) -> dict[str, int | float | str]:
        """What a run has to keep, under any topology, to go on as it would have."""
        return {name: getattr(self, name) for name in SETTINGS}

    @property
    def stages_per_rank(self) -> int:
        """Pipeline stages that each rank has."""
        return 2 if self.schedule == "interleaved" else 1

    @property
    def num_stages(self) -> int:
        """Pipeline stages of the model."""
        return self.topology.pp * self.stages_per_rank

    def learning_rate_at(self, step: int) -> float:
        """The rate of a step, counted from 0: a function of it alone, so that it can be resumed."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        rest = max(1, self.total_steps - self.warmup_steps)
        done = min(1.0, (step - self.warmup_steps) / rest)
        return self.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))

    def _check_batch(self) -> None:
        dp = self.topology.dp
        if self.batch_size % dp:
            raise ConfigError(
                f"batch_size {self.batch_size} cannot be cut evenly over {dp} data-parallel ranks"
            )
        if self.batch_size // dp < self.num_microbatches:
            raise ConfigError(
                f"{self.num_microbatches} micro-batches need as many sequences on each of {dp} "
                f"data-parallel ranks, batch_size {self.batch_size} gives {self.batch_size // dp}"
            )

    def _check_schedule(self) -> None:
        build_schedule(
            self.schedule,
            num_ranks=self.topology.pp,
            num_microbatches=self.num_microbatches,
            stages_per_rank=self.stages_per_rank,
        )
        if self.schedule == "interleaved" and self.topology.pp == 1:
            raise ConfigError("schedule interleaved needs pp of at least 2")


def check_model(model: Mapping[str, Any], config: TrainConfig) -> None:
    """Refuse a model that cannot be cut as the topology says, in words about both.

    Args:
        model: content of a config.json.
        config: how it is to be trained.

    Raises:
        UnsupportedModel: it is no Llama.
        ConfigError: layers, heads or positions do not fit.
    """
    if model.get("model_type") != "llama":
        raise UnsupportedModel(
            f"models of type {model.get('model_type')!r} cannot be cut for training; llama can"
        )
    layers, tp = model["num_hidden_layers"], config.topology.tp
    if layers < config.num_stages:
        raise ConfigError(
            f"the model has {layers} layers, too few for {config.num_stages} pipeline stages "
            f"(pp {config.topology.pp}, schedule {config.schedule})"
        )
    heads = model["num_attention_heads"]
    sizes = {
        "attention heads": heads,
        "key/value heads": model.get("num_key_value_heads") or heads,
        "features between the layers of its MLP": model["intermediate_size"],
    }
    for what, size in sizes.items():
        if size % tp:
            fitting = [n for n in range(1, size + 1) if all(s % n == 0 for s in sizes.values())]
            raise ConfigError(
                f"the model has {size} {what}, which tp {tp} does not divide; "
                f"tp can be {', '.join(map(str, fitting))}"
            )
    positions = model.get("max_position_embeddings")
    if positions is not None and config.sequence_length > positions:
        raise ConfigError(
            f"sequence_length {config.sequence_length} is over the model's {positions} positions"
        )
