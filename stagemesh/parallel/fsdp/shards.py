"""What of each parameter a rank holds, for people and checkpoints to look at."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMetadata:
    """Where a rank's piece of a parameter lies."""

    owner_rank: int
    """The rank that holds it, in the Fsdp group."""
    start: int
    """First element in the flat parameter (with `flatten_parameters=False`: in the parameter)."""
    end: int
    """One after the last; equal to `start` for an empty piece."""
    offset: int
    """First element in the original parameter, in row-major order."""

    @property
    def numel(self) -> int:
        """Elements of the piece."""
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedParameter:
    """A parameter, and this rank's piece of it."""

    name: str
    """In the original module; the first of its names if it is tied."""
    local_shard: torch.Tensor
    """[elements]: a view of the memory that the optimizer updates."""
    full_shape: tuple[int, ...]
    """Of the original parameter."""
    metadata: ShardMetadata
    """Of this rank's piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpShard:
    """What a parameter of a wrapped module says about itself, as its attribute `fsdp_shard`."""

    is_sharded: bool
    """Whether other ranks hold other elements of it."""
    is_tensor_sharded: bool
    """Whether the originals were themselves shards of tensor-parallel layers."""
