"""The manifest of a checkpoint: which elements of what are in which file. Pure data, as JSON.

    checkpoint.json
      format, version       what this is
      parameters            name: {shape, pieces: [{file, offset, numel}]}
      buffers               name: shape; all in the first model file
      model_files           one for each rank that wrote; tensors by their names
      optimizer             null, or
        files               as model_files; tensors as KEY/NAME
        state               name: {keys: [...], numbers: {key: number}}
        groups              the optimizer's settings, with names under "params"
      extra                 the caller's

A piece's `file` is its index in both lists of files. A file with whole parameters keeps their
shapes; cut ones are [numel].
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from stagemesh.checkpoint.json_file import read_json_object
from stagemesh.errors import CheckpointError

MANIFEST_NAME = "checkpoint.json"
FORMAT = "stagemesh-fsdp"
VERSION = 1

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float64, torch.int32, torch.int64)
}


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and check it.

    Raises:
        CheckpointError: it is not there, not JSON, or not of this format.
    """
    path = folder / MANIFEST_NAME
    manifest = read_json_object(path)
    if (manifest.get("format"), manifest.get("version")) != (FORMAT, VERSION):
        raise CheckpointError(
            f"{path}: must be {FORMAT} version {VERSION}, got {manifest.get('format')!r} version "
            f"{manifest.get('version')!r}"
        )
    try:
        _check(manifest)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a whole manifest: {error!r}") from error
    return manifest


def commit_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Make the checkpoint the folder's: from one moment to the next, also if power fails."""
    path = folder / MANIFEST_NAME
    new = path.with_suffix(".new")
    with new.open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    sync_path(folder)


def sync_path(path: Path) -> None:
    """Have the disk keep a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def number_to_json(value: Any, *, name: str) -> Any:
    """A number, None, flag, text or list of such, or a 0-d tensor, as JSON.

    Raises:
        CheckpointError: it is something else.
    """
    if isinstance(value, torch.Tensor) and not value.dim():
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype in _DTYPES:
            return {"dtype": dtype, "value": value.item()}
    elif value is None or isinstance(value, bool | int | float | str):
        return value
    elif isinstance(value, list | tuple):
        return [number_to_json(item, name=name) for item in value]
    raise CheckpointError(f"{name} cannot be saved: {type(value).__name__} is no number or text")


def number_from_json(value: Any) -> Any:
    """The opposite of `number_to_json`; tuples come back as lists."""
    if isinstance(value, dict):
        return torch.tensor(value["value"], dtype=_DTYPES[value["dtype"]])
    if isinstance(value, list):
        return [number_from_json(item) for item in value]
    return value


def _check(manifest: Mapping[str, Any]) -> None:
    optimizer = manifest["optimizer"]
    num_files = len(manifest["model_files"])
    dict(manifest["extra"])
    for name in (*manifest["model_files"], *(optimizer["files"] if optimizer else ())):
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{name!r} is no plain name of a file")
    if optimizer and len(optimizer["files"]) != num_files:
        raise ValueError("there must be as many files of the optimizer as of the model")
    for name, entry in manifest["parameters"].items():
        size = torch.Size(entry["shape"]).numel()
        end = 0
        for piece in entry["pieces"]:
            if piece["offset"] != end or not 0 <= piece["file"] < num_files or piece["numel"] < 1:
                raise ValueError(f"the pieces of {name} do not follow each other: {piece}")
            end += piece["numel"]
        if end != size:
            raise ValueError(f"the pieces of {name} have {end} elements, its shape {size}")
    for shape in manifest["buffers"].values():
        torch.Size(shape)
    if optimizer:
        for name, entry in optimizer["state"].items():
            if name not in manifest["parameters"]:
                raise ValueError(f"there is optimizer state of {name}, but no such parameter")
            list(entry["keys"])
            dict(entry["numbers"])
        for group in optimizer["groups"]:
            list(group["params"])
