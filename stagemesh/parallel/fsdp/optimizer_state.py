"""The state of an optimizer over the shards, by the names of the original parameters.

An optimizer keeps, for each shard, tensors with one number per element (moments: sharded as the
parameter is) and single numbers (steps: the same on all ranks). An optimizer that keeps anything
else, as rows and columns of a matrix, cannot work on shards and is refused here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stagemesh.errors import CheckpointError, ConfigError
from stagemesh.parallel.fsdp.flat_parameter import FlatParameter, ShardSlice

GROUP_MEMBERS = "params"
"""Key of an optimizer's group that holds its parameters; all others are settings."""


@dataclass(slots=True, kw_only=True)
class SlotState:
    """What the optimizer knows of one original parameter, on one rank."""

    pieces: dict[str, torch.Tensor] = field(default_factory=dict)
    """By key: [elements of the rank's piece]."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """By key: what there is one of: a number, None or a 0-d tensor."""


def read_state(flat: FlatParameter, optimizer: torch.optim.Optimizer) -> list[SlotState]:
    """The state of each member, as views; empty for those that have none yet.

    Raises:
        CheckpointError: the optimizer keeps something that is not elementwise.
    """
    states = []
    for slot, piece in enumerate(flat.layout.pieces[flat.rank]):
        shard = shard_of(flat, slot)
        found = SlotState()
        for key, value in optimizer.state.get(shard.parameter, {}).items():
            if not isinstance(value, torch.Tensor) or not value.dim():
                found.numbers[key] = value
            elif value.shape == shard.parameter.shape:
                start = piece.start - shard.start
                found.pieces[key] = value.detach()[start : start + piece.numel]
            else:
                raise CheckpointError(
                    f"optimizer state {key!r} of {flat.members[slot].names[0]!r} has shape "
                    f"{list(value.shape)}, its shard {list(shard.parameter.shape)}: only "
                    "elementwise state can be cut and joined"
                )
        states.append(found)
    return states


def write_state(
    flat: FlatParameter, optimizer: torch.optim.Optimizer, states: Sequence[SlotState]
) -> None:
    """Replace the state of the flat parameter's shards.

    Raises:
        CheckpointError: members of one flat shard have different numbers or keys.
    """
    for shard in flat.shards:
        slots = [slot for slot in range(len(flat.members)) if shard_of(flat, slot) is shard]
        first = states[slots[0]]
        for slot in slots[1:]:
            _check_alike(flat, slots[0], slot, first, states[slot])
        if not first.pieces and not first.numbers:
            optimizer.state.pop(shard.parameter, None)
            continue
        state = {key: _copied(value) for key, value in first.numbers.items()}
        for key in first.pieces:
            # Without the empty ones, whose dtype nobody knows.
            pieces = [states[slot].pieces[key] for slot in slots]
            joined = [piece for piece in pieces if piece.numel()]
            state[key] = (
                torch.cat(joined).to(shard.parameter.device)
                if joined
                else torch.empty_like(shard.parameter.detach())
            )
        optimizer.state[shard.parameter] = state


def shard_of(flat: FlatParameter, slot: int) -> ShardSlice:
    """The parameter of the optimizer that a member's piece is in."""
    return flat.shards[slot if len(flat.shards) == len(flat.members) else 0]


def read_groups(
    flats: Sequence[FlatParameter], optimizer: torch.optim.Optimizer
) -> list[dict[str, Any]]:
    """The optimizer's groups, with names of original parameters under GROUP_MEMBERS.

    Raises:
        ConfigError: a parameter of the optimizer is no shard of the model.
    """
    names: dict[int, list[str]] = {}
    for flat in flats:
        for slot, member in enumerate(flat.members):
            names.setdefault(id(shard_of(flat, slot).parameter), []).append(member.names[0])
    groups = []
    for group in optimizer.param_groups:
        unknown = [p for p in group[GROUP_MEMBERS] if id(p) not in names]
        if unknown:
            raise ConfigError(
                f"{len(unknown)} parameters of the optimizer are no shards of this Fsdp; make the "
                "optimizer from its parameters(), after wrapping"
            )
        groups.append(
            {
                **{key: value for key, value in group.items() if key != GROUP_MEMBERS},
                GROUP_MEMBERS: [name for p in group[GROUP_MEMBERS] for name in names[id(p)]],
            }
        )
    return groups


def write_groups(
    flats: Sequence[FlatParameter],
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Mapping[str, Any]],
) -> None:
    """Replace the settings of the optimizer's groups; see `check_groups`."""
    check_groups(flats, optimizer, groups)
    for target, source in zip(optimizer.param_groups, groups, strict=True):
        for key, value in source.items():
            if key != GROUP_MEMBERS:
                # JSON knows no tuples.
                is_tuple = isinstance(target.get(key), tuple)
                target[key] = tuple(value) if is_tuple else _copied(value)


def check_groups(
    flats: Sequence[FlatParameter],
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Mapping[str, Any]],
) -> None:
    """Refuse groups that are not of the same parameters as the optimizer's.

    Raises:
        CheckpointError: with the first difference.
    """
    own = read_groups(flats, optimizer)
    if len(own) != len(groups):
        raise CheckpointError(
            f"the checkpoint has {len(groups)} groups of optimizer parameters, the optimizer has "
            f"{len(own)}"
        )
    for index, (ours, theirs) in enumerate(zip(own, groups, strict=True)):
        different = set(ours[GROUP_MEMBERS]) ^ set(theirs[GROUP_MEMBERS])
        if different:
            raise CheckpointError(
                f"group {index} of the optimizer has other parameters than the checkpoint's: "
                f"{_first(sorted(different))}"
            )


def _check_alike(
    flat: FlatParameter, slot: int, other_slot: int, one: SlotState, other: SlotState
) -> None:
    if one.pieces.keys() == other.pieces.keys() and one.numbers == other.numbers:
        return
    names = [flat.members[index].names[0] for index in (slot, other_slot)]
    raise CheckpointError(
        f"{names[0]!r} and {names[1]!r} share a flat parameter, but the checkpoint has different "
        "optimizer numbers for them (steps); load it with flatten_parameters=False"
    )


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _first(names: Sequence[str], *, limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
