"""What a user of Fsdp can choose."""

import enum
from dataclasses import dataclass

import torch
from torch import nn

from stagemesh.errors import ConfigError


class ShardingStrategy(enum.Enum):
    """What is split over the ranks. ZeRO: Rajbhandari et al., arXiv:1910.02054."""

    FULL_SHARD = "full_shard"
    """ZeRO-3: parameters, gradients and optimizer state. A unit's parameters are whole only while
    it computes."""
    SHARD_GRAD_OP = "shard_grad_op"
    """ZeRO-2: gradients and optimizer state. Parameters are whole from the forward to the end of
    the backward."""
    NO_SHARD = "no_shard"
    """Nothing: gradients are averaged over the ranks, as data parallelism does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPrecision:
    """Dtypes of what is not stored. The local shards, and so the optimizer, keep the module's."""

    param_dtype: torch.dtype | None = torch.bfloat16
    """Of gathered parameters and floating inputs of units, so of the computation; None: as they
    are."""
    reduce_dtype: torch.dtype | None = torch.float32
    """In which gradients are added up, over micro-steps and over ranks; None: that of the
    gradients."""
    buffer_dtype: torch.dtype | None = None
    """Of floating buffers, which are cast once, when the module is wrapped; None: as they are."""

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not dtype.is_floating_point:
                raise ConfigError(f"{name} must be a floating dtype or None, got {dtype}")


NO_MIXED_PRECISION = MixedPrecision(param_dtype=None, reduce_dtype=None, buffer_dtype=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpConfig:
    """Settings of Fsdp; the same on all ranks."""

    sharding_strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    """What is split over the ranks."""
    min_param_size: int = 1000
    """A module that `wrap_policy` chooses, but that has fewer elements of its own than this, is no
    unit: its parameters belong to the unit around it, and travel with that one's. The root is
    always a unit, however small."""
    cpu_offload: bool = False
    """Shards, their gradients and the optimizer state are kept in host memory; whole parameters and
    the computation stay on the device the module was on. Changes nothing for a module on the CPU.
    """
    mixed_precision: bool | MixedPrecision = True
    """True: `MixedPrecision()`, which computes in bfloat16. False: all is done in the module's
    dtypes."""
    flatten_parameters: bool = True
    """True: what a unit trains is one flat parameter, cut in R pieces; an optimizer sees a few long
    tensors. False: each parameter is cut in R pieces by itself and keeps its name, for optimizers
    that treat parameters differently; costs a copy of each unit's parameters per gather."""
    wrap_policy: tuple[type[nn.Module] | str, ...] | None = None
    """Which modules become units: classes, class names or names of modules. None: each child of the
    outermost ModuleLists. The root is a unit in any case."""

    def __post_init__(self) -> None:
        if self.min_param_size < 0:
            raise ConfigError(f"min_param_size must be at least 0, got {self.min_param_size}")

    @property
    def precision(self) -> MixedPrecision:
        """The dtypes that `mixed_precision` stands for."""
        if isinstance(self.mixed_precision, MixedPrecision):
            return self.mixed_precision
        return MixedPrecision() if self.mixed_precision else NO_MIXED_PRECISION
