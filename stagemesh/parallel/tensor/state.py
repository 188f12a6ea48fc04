"""What of a whole tensor a rank holds, and the way between whole state dicts and the ranks' parts.

A parameter that is sharded over the tensor-parallel group carries a TensorShard in its attribute
`tensor_shard`; one without it is replicated: the same values and gradients on each rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import CheckpointError
from stagemesh.parallel.tensor.operators import gather_from_group
from stagemesh.parallel.tensor.shards import shard_span

_ATTRIBUTE = "tensor_shard"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShard:
    """How a whole tensor is cut over the ranks of a tensor-parallel group."""

    dim: int
    """Dim along which it is cut."""
    sizes: tuple[int, ...]
    """What each rank holds of that dim."""
    full_shape: tuple[int, ...]
    """Shape of the whole tensor."""

    def shape_on(self, rank: int) -> tuple[int, ...]:
        """Shape of a rank's part."""
        shape = list(self.full_shape)
        shape[self.dim] = self.sizes[rank]
        return tuple(shape)

    def view_on(self, rank: int, *, full: torch.Tensor) -> torch.Tensor:
        """A rank's part of the whole tensor, in the same memory."""
        start, end = shard_span(self.sizes, rank=rank)
        return full.narrow(self.dim, start, end - start)


def tensor_shard_of(tensor: torch.Tensor) -> TensorShard | None:
    """How a parameter is cut; None for one that is replicated."""
    shard: TensorShard | None = getattr(tensor, _ATTRIBUTE, None)
    return shard


def shard_parameter(
    parameter: torch.Tensor, *, dim: int, sizes: Sequence[int], rank: int
) -> nn.Parameter:
    """A rank's part of a whole parameter, in memory of its own; the same one in a group of one.

    Shapes:
        parameter: [..., n, ...], where n is the sum of the sizes.
        result: [..., sizes[rank], ...].
    """
    shard = TensorShard(dim=dim, sizes=tuple(sizes), full_shape=tuple(parameter.shape))
    if len(sizes) == 1:
        part = parameter if isinstance(parameter, nn.Parameter) else nn.Parameter(parameter)
    else:
        own = shard.view_on(rank, full=parameter.detach()).clone(
            memory_format=torch.contiguous_format
        )
        part = nn.Parameter(own, requires_grad=parameter.requires_grad)
    setattr(part, _ATTRIBUTE, shard)
    return part


def gather_tensor(
    local: torch.Tensor,
    *,
    shard: TensorShard,
    process_group: ProcessGroup,
    dst: int | None = None,
) -> torch.Tensor | None:
    """The whole of a sharded tensor (a parameter, or its optimizer state).

    Args:
        local: this rank's part.
        shard: how the whole is cut.
        process_group: the tensor-parallel ranks; all of them call it.
        dst: the one rank that gets it, None on the others; all of them if left out.
    """
    local = local.detach()
    if dst is None or process_group.size == 1:
        return gather_from_group(
            local, process_group=process_group, dim=shard.dim, sizes=shard.sizes
        )
    parts = process_group.gather_variable(local.movedim(shard.dim, 0), dst=dst)
    if parts is None:
        return None
    return torch.cat([part.movedim(0, shard.dim) for part in parts], shard.dim)


def gather_full_state_dict(
    module: nn.Module, *, process_group: ProcessGroup, dst: int | None = None
) -> dict[str, torch.Tensor]:
    """The state dict that the module would have if nothing of it were sharded.

    What is replicated is in it as it is in `state_dict()`: it shares memory with the module.

    Args:
        module: with layers of this package anywhere in it.
        process_group: the tensor-parallel ranks; all of them call it.
        dst: the one rank that gets it, {} on the others; all of them if left out.
    """
    is_receiver = dst is None or process_group.rank == dst
    gathered: dict[int, torch.Tensor | None] = {}
    full: dict[str, torch.Tensor] = {}
    for name, value in _entries(module).items():
        shard = tensor_shard_of(value)
        # Tied parameters travel once.
        if id(value) not in gathered:
            gathered[id(value)] = (
                value.detach()
                if shard is None
                else gather_tensor(value, shard=shard, process_group=process_group, dst=dst)
            )
        whole = gathered[id(value)]
        if is_receiver and whole is not None:
            full[name] = whole
    return full


def load_full_state_dict(
    module: nn.Module, state_dict: Mapping[str, torch.Tensor], *, process_group: ProcessGroup
) -> None:
    """Load the whole weights: each rank copies its own parts. Nothing is sent.

    A tied parameter may be there under one of its names only.

    Args:
        module: with layers of this package anywhere in it.
        state_dict: as `gather_full_state_dict` gives it, or as an unsharded module does.
        process_group: the tensor-parallel ranks.

    Raises:
        CheckpointError: names are missing or unknown, or a shape does not fit. Nothing was loaded.
    """
    entries = _entries(module)
    given = {id(value) for name, value in entries.items() if name in state_dict}
    missing = [name for name, value in entries.items() if id(value) not in given]
    unknown = [name for name in state_dict if name not in entries]
    if missing or unknown:
        raise CheckpointError(
            f"the state dict does not fit the module: missing {missing}, unknown {unknown}"
        )
    for name, full in state_dict.items():
        expected = _full_shape(entries[name])
        if tuple(full.shape) != expected:
            raise CheckpointError(
                f"{name} has shape {list(full.shape)} in the state dict, the whole parameter has "
                f"{list(expected)}"
            )
    with torch.no_grad():
        for name, full in state_dict.items():
            shard = tensor_shard_of(entries[name])
            part = full if shard is None else shard.view_on(process_group.rank, full=full)
            entries[name].copy_(part)


def _full_shape(value: torch.Tensor) -> tuple[int, ...]:
    shard = tensor_shard_of(value)
    return tuple(value.shape) if shard is None else shard.full_shape


def _entries(module: nn.Module) -> dict[str, torch.Tensor]:
    # With keep_vars the parameters themselves are in it, not views without their attributes.
    entries: dict[str, Any] = module.state_dict(keep_vars=True)
    return {name: value for name, value in entries.items() if isinstance(value, torch.Tensor)}
