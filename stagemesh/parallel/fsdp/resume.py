"""Loading checkpoints: each rank reads the elements that it holds, and no others."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from stagemesh.errors import CheckpointError
from stagemesh.parallel.fsdp.checkpoint import together
from stagemesh.parallel.fsdp.flat_parameter import FlatParameter
from stagemesh.parallel.fsdp.fsdp import Fsdp
from stagemesh.parallel.fsdp.full_state import check_shapes, persistent_buffers
from stagemesh.parallel.fsdp.manifest import number_from_json, read_manifest
from stagemesh.parallel.fsdp.optimizer_state import (
    SlotState,
    check_groups,
    write_groups,
    write_state,
)


def load_checkpoint(
    model: Fsdp, *, folder: Path, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Take parameters, buffers and optimizer state out of a checkpoint. A collective.

    It may have been saved by any number of ranks, with any strategy, units and layout.

    Args:
        model: changed in place.
        folder: of `save_checkpoint`.
        optimizer: over the model's shards; without it the checkpoint's is left alone.

    Returns:
        What was given as `extra`.

    Raises:
        CheckpointError: on all ranks, if on any the checkpoint is not there, damaged, or does not
            fit. A model that it does not fit by names and shapes was not changed.
    """
    found: dict[str, Any] = {}

    def check() -> None:
        found.update(read_manifest(folder))
        check_shapes(model, _shapes(found))
        if optimizer is not None:
            if found["optimizer"] is None:
                raise CheckpointError("it has no optimizer state; load it without optimizer")
            check_groups(model.flat_parameters, optimizer, found["optimizer"]["groups"])
        for name in _files(found, with_optimizer=optimizer is not None):
            if not (folder / name).is_file():
                raise CheckpointError(f"{name} is missing")

    def load() -> None:
        _load_model(model, folder, found)
        if optimizer is not None:
            _load_optimizer(model, optimizer, folder, found)

    together(model.process_group, f"{folder}: the checkpoint cannot be loaded", check)
    together(model.process_group, f"{folder}: the checkpoint was not loaded", load)
    return dict(found["extra"])


class _PieceReader:
    """Reads elements of parameters, wherever the checkpoint has cut them."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._paths = [folder / name for name in names]
        self._open: dict[int, Any] = {}

    def read(self, key: str, entry: Mapping[str, Any], *, offset: int, numel: int) -> torch.Tensor:
        """Elements [offset, offset + numel) of a parameter. Shapes: result [numel]."""
        parts = []
        for piece in entry["pieces"]:
            first = max(offset, piece["offset"])
            last = min(offset + numel, piece["offset"] + piece["numel"])
            if first < last:
                whole = self.tensor(key, file=piece["file"]).reshape(-1)
                if whole.numel() != piece["numel"]:
                    raise CheckpointError(
                        f"{key} has {whole.numel()} elements in {self._paths[piece['file']].name}, "
                        f"the manifest says {piece['numel']}"
                    )
                parts.append(whole[first - piece["offset"] : last - piece["offset"]])
        return torch.cat(parts) if parts else torch.empty(0)

    def tensor(self, key: str, *, file: int) -> torch.Tensor:
        """A tensor of a file."""
        path = self._paths[file]
        try:
            if file not in self._open:
                self._open[file] = safe_open(path, framework="pt")
            tensor: torch.Tensor = self._open[file].get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path.name}: {key}: {error}") from error
        return tensor


def _shapes(manifest: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    parameters = {name: tuple(entry["shape"]) for name, entry in manifest["parameters"].items()}
    return parameters | {name: tuple(shape) for name, shape in manifest["buffers"].items()}


def _files(manifest: Mapping[str, Any], *, with_optimizer: bool) -> list[str]:
    """Names of the files that pieces are in, and the first, which has the buffers."""
    used = {piece["file"] for e in manifest["parameters"].values() for piece in e["pieces"]} | {0}
    names = [manifest["model_files"][index] for index in sorted(used)]
    if with_optimizer:
        names += [manifest["optimizer"]["files"][index] for index in sorted(used)]
    return names


def _load_model(model: Fsdp, folder: Path, manifest: Mapping[str, Any]) -> None:
    reader = _PieceReader(folder, manifest["model_files"])
    for flat in model.flat_parameters:
        for slot in range(len(flat.members)):
            name, entry = _entry(manifest, flat, slot)
            piece = flat.layout.pieces[flat.rank][slot]
            flat.write_local(slot, reader.read(name, entry, offset=piece.offset, numel=piece.numel))
    with torch.no_grad():
        for name, buffer in persistent_buffers(model.module).items():
            buffer.copy_(reader.tensor(name, file=0))


def _load_optimizer(
    model: Fsdp, optimizer: torch.optim.Optimizer, folder: Path, manifest: Mapping[str, Any]
) -> None:
    saved = manifest["optimizer"]
    reader = _PieceReader(folder, saved["files"])
    for flat in model.flat_parameters:
        states = []
        for slot in range(len(flat.members)):
            name, entry = _entry(manifest, flat, slot)
            piece = flat.layout.pieces[flat.rank][slot]
            state = saved["state"].get(name, {"keys": (), "numbers": {}})
            states.append(
                SlotState(
                    pieces={
                        key: reader.read(
                            f"{key}/{name}", entry, offset=piece.offset, numel=piece.numel
                        )
                        for key in state["keys"]
                    },
                    numbers={key: number_from_json(v) for key, v in state["numbers"].items()},
                )
            )
        write_state(flat, optimizer, states)
    groups = [
        {key: value if key == "params" else number_from_json(value) for key, value in group.items()}
        for group in saved["groups"]
    ]
    write_groups(model.flat_parameters, optimizer, groups)


def _entry(
    manifest: Mapping[str, Any], flat: FlatParameter, slot: int
) -> tuple[str, Mapping[str, Any]]:
    name = next(name for name in flat.members[slot].names if name in manifest["parameters"])
    return name, manifest["parameters"][name]
