"""Checkpoints on disk: of model and optimizer, whole or sharded, for any number of ranks.

    save_checkpoint(model, folder=path, optimizer=optimizer, extra={"step": 100})
    extra = load_checkpoint(model, folder=path, optimizer=optimizer)

Tensors are in safetensors, the rest in checkpoint.json (see `manifest`); nothing is pickled. A file
gets a name that no other save has given, and the manifest that names them all is replaced last, in
one step. So the folder holds one whole checkpoint at any time: the one before, or this one. Files
that no manifest names any more are removed by the save that comes next.

Ranks write their own pieces (sharded) or rank 0 writes all (whole); the folder must be one that all
ranks see. All of this are collectives.
"""

import json
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import CheckpointError
from stagemesh.parallel.fsdp.fsdp import Fsdp
from stagemesh.parallel.fsdp.full_state import (
    STATE,
    full_optimizer_state,
    full_state_dict,
    persistent_buffers,
)
from stagemesh.parallel.fsdp.manifest import (
    FORMAT,
    VERSION,
    commit_manifest,
    number_to_json,
    sync_path,
)
from stagemesh.parallel.fsdp.optimizer_state import GROUP_MEMBERS, read_groups, read_state

CheckpointKind = Literal["sharded", "full"]

_PREFIX = "fsdp-"
_Tensors = dict[str, torch.Tensor]


def save_checkpoint(
    model: Fsdp,
    *,
    folder: Path,
    optimizer: torch.optim.Optimizer | None = None,
    kind: CheckpointKind = "sharded",
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint, in place of the one in the folder, if there is one. A collective.

    Args:
        model: its parameters and persistent buffers.
        folder: made if it is not there.
        optimizer: over the model's shards.
        kind: each rank its pieces, or rank 0 all of it (which it must have memory for).
        extra: anything that JSON can hold: counters, names of data. That of rank 0 counts.

    Raises:
        CheckpointError: on all ranks, if any could not write. The folder's checkpoint is as before.
    """
    group = model.process_group
    token = _common_token(group)
    manifest: dict[str, Any] = {}

    def write() -> None:
        json.dumps(extra)
        folder.mkdir(parents=True, exist_ok=True)
        tensors, optimizer_tensors = gathered
        names = _file_names(token, group.rank)
        if tensors or group.rank == 0:
            _write_tensors(folder / names[0], tensors)
            if optimizer is not None:
                _write_tensors(folder / names[1], optimizer_tensors)

    gather = _own_tensors if kind == "sharded" else _all_tensors
    gathered = gather(model, optimizer)
    together(group, f"{folder}: the checkpoint was not written", write)

    def commit() -> None:
        manifest.update(_manifest(model, optimizer, token, kind))
        commit_manifest(folder, {**manifest, "extra": dict(extra or {})})
        _remove_old(folder, manifest)

    together(
        group, f"{folder}: the checkpoint was not committed", commit if not group.rank else None
    )


def save_full_model(model: Fsdp, *, path: Path) -> None:
    """Write one safetensors file with whole parameters and buffers, at once. A collective.

    Tied parameters are there once, by their first names, as transformers does it.

    Raises:
        CheckpointError: on all ranks, if rank 0 could not write. A file at `path` is as before.
    """
    state, _ = _all_tensors(model, None)

    def write() -> None:
        new = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            _write_tensors(new, state)
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)

    together(
        model.process_group, f"{path}: not written", write if not model.process_group.rank else None
    )


def together(group: ProcessGroup, failure: str, work: Callable[[], None] | None) -> None:
    """Do something on some ranks, and raise on all if it fails on any.

    Raises:
        CheckpointError: with what each rank says.
    """
    text = ""
    cause: Exception | None = None
    if work is not None:
        try:
            work()
        except (OSError, ValueError, TypeError, SafetensorError, CheckpointError) as error:
            cause = error
            text = str(error) or type(error).__name__
    told = group.all_gather_variable(torch.tensor(list(text.encode()), dtype=torch.uint8))
    texts = [bytes(flat.tolist()).decode(errors="replace") for flat in told]
    problems = [f"rank {rank}: {said}" for rank, said in enumerate(texts) if said]
    if problems:
        raise CheckpointError(f"{failure}: {'; '.join(problems)}") from cause


def _own_tensors(model: Fsdp, optimizer: torch.optim.Optimizer | None) -> tuple[_Tensors, _Tensors]:
    """What this rank writes when each writes its own: pieces that are not empty."""
    tensors: _Tensors = {}
    optimizer_tensors: _Tensors = {}
    for flat in model.flat_parameters:
        if flat.layout.num_shards == 1 and model.process_group.rank:
            continue
        states = read_state(flat, optimizer) if optimizer is not None else []
        for slot, member in enumerate(flat.members):
            name = member.names[0]
            if not flat.local_piece(slot).numel():
                continue
            tensors[name] = flat.local_piece(slot)
            for key, piece in (states[slot].pieces if states else {}).items():
                optimizer_tensors[f"{key}/{name}"] = piece
    if model.process_group.rank == 0:
        tensors |= persistent_buffers(model.module)
    return tensors, optimizer_tensors


def _all_tensors(model: Fsdp, optimizer: torch.optim.Optimizer | None) -> tuple[_Tensors, _Tensors]:
    """What rank 0 writes when it writes all."""
    state = full_state_dict(model, only_rank=0)
    for flat in model.flat_parameters:
        for member in flat.members:
            for alias in member.names[1:]:
                state.pop(alias, None)
    if optimizer is None:
        return state, {}
    full = full_optimizer_state(model, optimizer, only_rank=0)
    keys = {
        member.names[0]: found.pieces.keys()
        for flat in model.flat_parameters
        for member, found in zip(flat.members, read_state(flat, optimizer), strict=True)
    }
    return state, {
        f"{key}/{name}": entry[key]
        for name, entry in full.get(STATE, {}).items()
        for key in keys[name]
    }


def _manifest(
    model: Fsdp, optimizer: torch.optim.Optimizer | None, token: str, kind: CheckpointKind
) -> dict[str, Any]:
    num_files = model.process_group.size if kind == "sharded" else 1
    names = [_file_names(token, rank) for rank in range(num_files)]
    parameters = {}
    for flat in model.flat_parameters:
        for slot, (member, shape) in enumerate(zip(flat.members, flat.layout.shapes, strict=True)):
            pieces = [
                {"file": rank, "offset": pieces[slot].offset, "numel": pieces[slot].numel}
                for rank, pieces in enumerate(flat.layout.pieces)
                if pieces[slot].numel
            ]
            if kind == "full" and pieces:
                pieces = [{"file": 0, "offset": 0, "numel": torch.Size(shape).numel()}]
            parameters[member.names[0]] = {"shape": list(shape), "pieces": pieces}
    buffers = persistent_buffers(model.module)
    return {
        "format": FORMAT,
        "version": VERSION,
        "parameters": parameters,
        "buffers": {name: list(buffer.shape) for name, buffer in buffers.items()},
        "model_files": [model_name for model_name, _ in names],
        "optimizer": _optimizer_entry(model, optimizer, [name for _, name in names]),
    }


def _optimizer_entry(
    model: Fsdp, optimizer: torch.optim.Optimizer | None, files: list[str]
) -> dict[str, Any] | None:
    if optimizer is None:
        return None
    state = {
        member.names[0]: {
            "keys": sorted(found.pieces),
            "numbers": {
                key: number_to_json(value, name=f"{key} of {member.names[0]}")
                for key, value in found.numbers.items()
            },
        }
        for flat in model.flat_parameters
        for member, found in zip(flat.members, read_state(flat, optimizer), strict=True)
        if found.pieces or found.numbers
    }
    groups = [
        {
            key: value if key == GROUP_MEMBERS else number_to_json(value, name=f"setting {key}")
            for key, value in group.items()
        }
        for group in read_groups(model.flat_parameters, optimizer)
    ]
    return {"files": files, "state": state, "groups": groups}


def _common_token(group: ProcessGroup) -> str:
    token = torch.tensor(list(uuid.uuid4().bytes), dtype=torch.uint8)
    group.broadcast(token, src=0)
    return bytes(token.tolist()).hex()


def _file_names(token: str, rank: int) -> tuple[str, str]:
    start = f"{_PREFIX}{token}-{rank:05}"
    return f"{start}-model.safetensors", f"{start}-optimizer.safetensors"


def _write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    # Copies: safetensors refuses views that share memory.
    save_file({name: value.detach().cpu().clone() for name, value in tensors.items()}, path)
    # It makes files for their owner alone; whoever may read the folder may read what is in it.
    path.chmod(path.parent.stat().st_mode & 0o666)
    sync_path(path)


def _remove_old(folder: Path, manifest: Mapping[str, Any]) -> None:
    kept = {*manifest["model_files"], *((manifest["optimizer"] or {}).get("files", ()))}
    for path in folder.glob(f"{_PREFIX}*.safetensors"):
        if path.name not in kept:
            path.unlink(missing_ok=True)
