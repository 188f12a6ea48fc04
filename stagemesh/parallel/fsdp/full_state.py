"""Whole state of a sharded model and its optimizer, in memory: gathered, and cut again.

    state = full_state_dict(model)                    as an unsharded module's state_dict()
    load_full_state_dict(model, state=state)
    state = full_optimizer_state(model, optimizer)    {"state": {name: {key: ...}}, "param_groups"}
    load_full_optimizer_state(model, optimizer=optimizer, state=state)

Nothing in it depends on the number of ranks, the strategy or the units.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from stagemesh.errors import CheckpointError
from stagemesh.parallel.fsdp.flat_parameter import FlatParameter
from stagemesh.parallel.fsdp.fsdp import Fsdp
from stagemesh.parallel.fsdp.optimizer_state import (
    SlotState,
    check_groups,
    read_groups,
    read_state,
    write_groups,
    write_state,
)

STATE = "state"
PARAM_GROUPS = "param_groups"


def full_state_dict(model: Fsdp, *, only_rank: int | None = None) -> dict[str, torch.Tensor]:
    """All parameters and persistent buffers, by their original names. A collective.

    Args:
        model: whose.
        only_rank: the others get an empty dict, and need no memory for it.
    """
    state: dict[str, torch.Tensor] = {}
    for flat in model.flat_parameters:
        wholes = gather_whole(model, flat, flat.local.detach(), only_rank=only_rank)
        for member, whole in zip(flat.members, wholes or (), strict=wholes is not None):
            state.update(dict.fromkeys(member.names, whole))
    if only_rank in (None, model.process_group.rank):
        state |= {name: value.clone() for name, value in persistent_buffers(model.module).items()}
    return state


def load_full_state_dict(model: Fsdp, *, state: Mapping[str, torch.Tensor]) -> None:
    """Take this rank's shards and all buffers out of a whole state. No collective.

    Args:
        model: changed in place.
        state: the same on all ranks.

    Raises:
        CheckpointError: names are missing or unknown, or a shape differs; nothing was changed.
    """
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    check_shapes(model, shapes)
    for flat in model.flat_parameters:
        for slot, member in enumerate(flat.members):
            whole = state[next(name for name in member.names if name in state)]
            flat.write_local(slot, _own_piece(flat, slot, whole))
    with torch.no_grad():
        for name, buffer in persistent_buffers(model.module).items():
            buffer.copy_(state[name])


def full_optimizer_state(
    model: Fsdp, optimizer: torch.optim.Optimizer, *, only_rank: int | None = None
) -> dict[str, Any]:
    """The optimizer's state by original names, in original shapes. A collective.

    Args:
        model: whose shards the optimizer updates.
        optimizer: elementwise (SGD, Adam and their kin).
        only_rank: the others get an empty dict.

    Returns:
        `state`: by name, by key: a tensor of the parameter's shape, or a number; and
        `param_groups`: the optimizer's, with names instead of parameters.

    Raises:
        CheckpointError: the optimizer's state is not elementwise.
    """
    named: dict[str, dict[str, Any]] = {}
    for flat in model.flat_parameters:
        states = read_state(flat, optimizer)
        for member, found in zip(flat.members, states, strict=True):
            if found.pieces or found.numbers:
                named[member.names[0]] = dict(found.numbers)
        for key in sorted({key for found in states for key in found.pieces}):
            wholes = gather_whole(model, flat, _join(flat, states, key), only_rank=only_rank)
            for slot, whole in enumerate(wholes or ()):
                if key in states[slot].pieces:
                    named[flat.members[slot].names[0]][key] = whole
    groups = read_groups(model.flat_parameters, optimizer)
    if only_rank not in (None, model.process_group.rank):
        return {}
    return {STATE: named, PARAM_GROUPS: groups}


def load_full_optimizer_state(
    model: Fsdp, *, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    """Take this rank's part out of a whole optimizer state. No collective.

    Raises:
        CheckpointError: groups, names or shapes differ from the optimizer's.
    """
    flats = model.flat_parameters
    check_groups(flats, optimizer, state[PARAM_GROUPS])
    for flat in flats:
        states = []
        for slot, member in enumerate(flat.members):
            found = SlotState()
            for key, value in state[STATE].get(member.names[0], {}).items():
                if _is_elementwise(value, flat.layout.shapes[slot], key):
                    found.pieces[key] = _own_piece(flat, slot, value)
                else:
                    found.numbers[key] = value
            states.append(found)
        write_state(flat, optimizer, states)
    write_groups(flats, optimizer, state[PARAM_GROUPS])


def gather_whole(
    model: Fsdp, flat: FlatParameter, local: torch.Tensor, *, only_rank: int | None
) -> list[torch.Tensor] | None:
    """The members' whole values out of the ranks' shards; None on ranks that are not asked.

    Shapes:
        local: [L], on each rank its shard of parameters, or of anything with one number for each.
    """
    group = model.process_group
    rows: Sequence[torch.Tensor] | None
    if flat.layout.num_shards == 1:
        rows = [local] if only_rank in (None, group.rank) else None
    elif only_rank is None:
        stacked = local.new_empty((group.size, local.numel()))
        rows = list(group.all_gather_tensor(stacked, local))
    else:
        rows = group.gather(local, dst=only_rank)
    if rows is None:
        return None
    wholes = [local.new_empty(shape) for shape in flat.layout.shapes]
    for row, pieces in zip(rows, flat.layout.pieces, strict=True):
        for piece in pieces:
            wholes[piece.slot].view(-1)[piece.offset : piece.offset + piece.numel].copy_(
                row[piece.start : piece.start + piece.numel]
            )
    return wholes


def check_shapes(model: Fsdp, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a state with other names or shapes than the model's.

    A tied parameter needs one of its names only.

    Raises:
        CheckpointError: with what is missing, unknown and different.
    """
    expected = {name: tuple(b.shape) for name, b in persistent_buffers(model.module).items()}
    known = set(expected)
    missing = [name for name in expected if name not in shapes]
    for flat in model.flat_parameters:
        for member, shape in zip(flat.members, flat.layout.shapes, strict=True):
            known |= set(member.names)
            expected |= dict.fromkeys(member.names, shape)
            if not any(name in shapes for name in member.names):
                missing.append(member.names[0])
    problems = [f"{name} is missing" for name in missing]
    problems += [f"{name} is unknown" for name in shapes if name not in known]
    problems += [
        f"{name} has shape {list(shape)} instead of {list(expected[name])}"
        for name, shape in shapes.items()
        if name in known and shape != expected[name]
    ]
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(f"the state does not fit the model: {'; '.join(problems[:5])}{more}")


def persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that belong into a state dict."""
    buffers = dict(module.named_buffers(remove_duplicate=False))
    return {name: buffers[name] for name in module.state_dict() if name in buffers}


def _own_piece(flat: FlatParameter, slot: int, whole: torch.Tensor) -> torch.Tensor:
    piece = flat.layout.pieces[flat.rank][slot]
    return whole.detach().reshape(-1)[piece.offset : piece.offset + piece.numel]


def _join(flat: FlatParameter, states: Sequence[SlotState], key: str) -> torch.Tensor:
    """A shard of one key of the optimizer's state. Shapes: result [L]."""
    dtype = next(found.pieces[key].dtype for found in states if key in found.pieces)
    joined = torch.zeros(flat.layout.shard_length, dtype=dtype, device=flat.local.device)
    for found, piece in zip(states, flat.layout.pieces[flat.rank], strict=True):
        if key in found.pieces:
            joined[piece.start : piece.start + piece.numel].copy_(found.pieces[key])
    return joined


def _is_elementwise(value: Any, shape: tuple[int, ...], key: str) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    # A 0-d parameter's moments look as numbers do; torch's optimizers, too, know "step" by name.
    if tuple(value.shape) == shape and (shape or key != "step"):
        return True
    if value.dim():
        raise CheckpointError(
            f"optimizer state {key!r} has shape {list(value.shape)}, its parameter {list(shape)}"
        )
    return False
