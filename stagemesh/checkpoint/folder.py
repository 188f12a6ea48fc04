"""A model folder in the layout of the Hugging Face hub. Torch-free.

    config.json
    generation_config.json         optional
    model.safetensors.index.json   names the shards; or, without it,
    model.safetensors              the only file of weights

Only files that the index names are read; other safetensors files in the folder are not looked at.
Pickled weights (pytorch_model.bin and the like) are never opened.

An index entry must be the plain name of a .safetensors file in the folder: no folder part, no
`..`, nothing absolute. Such a name may be a symbolic link that points elsewhere, because caches of
the hub consist of links to blobs; whoever can place links in a model folder can read the target
anyway, and a target that is no safetensors file is refused by its header.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagemesh.checkpoint.json_file import read_json_object
from stagemesh.checkpoint.safetensors_header import SafetensorsHeader, read_safetensors_header
from stagemesh.checkpoint.tensor_info import TensorInfo
from stagemesh.errors import CheckpointError

_LOG = logging.getLogger(__name__)

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """What a model folder holds, by its headers."""

    config: dict[str, Any]
    """Content of config.json."""
    generation_config: dict[str, Any]
    """Content of generation_config.json, empty when absent."""
    tensors: dict[str, TensorInfo]
    """All tensors by name."""
    file_sizes: dict[str, int]
    """Bytes of each file of weights, by its name."""


def read_model_folder(path: Path) -> ModelFolder:
    """Reads the configs and the headers of a model folder.

    Raises:
        CheckpointError: a file is missing, truncated, hostile, or contradicts the index.
        UnsupportedModel: a tensor has an element type that we do not read.
    """
    if not (path / CONFIG_NAME).exists():
        raise CheckpointError(f"{path}: no {CONFIG_NAME} in the folder{_hint(path)}")
    generation_path = path / GENERATION_CONFIG_NAME
    config = read_json_object(path / CONFIG_NAME)
    generation_config = read_json_object(generation_path) if generation_path.exists() else {}
    if (path / INDEX_NAME).exists():
        tensors, headers = _read_sharded(path)
    elif (path / SINGLE_NAME).exists():
        headers = {SINGLE_NAME: read_safetensors_header(path / SINGLE_NAME)}
        tensors = {info.name: info for info in headers[SINGLE_NAME].tensors}
    else:
        raise CheckpointError(
            f"{path}: neither {INDEX_NAME} nor {SINGLE_NAME} in the folder{_hint(path)}"
        )
    return ModelFolder(
        config=config,
        generation_config=generation_config,
        tensors=tensors,
        file_sizes={name: header.num_file_bytes for name, header in headers.items()},
    )


def _hint(path: Path) -> str:
    """What the folder has instead, in words that say what to do."""
    names = sorted(entry.name for entry in path.iterdir())
    pickles = [name for name in names if name.endswith(_PICKLE_SUFFIXES)]
    ggufs = [name for name in names if name.endswith(".gguf")]
    shards = [name for name in names if name.endswith(".safetensors")]
    if shards:
        return f"; it has {', '.join(shards[:5])}, which nothing names"
    if pickles:
        return (
            f"; {pickles[0]} holds pickled weights, which are never loaded because they can run "
            "code: convert to safetensors"
        )
    if ggufs:
        return f"; it has {ggufs[0]}: give the path of that file"
    return ""


def _read_sharded(path: Path) -> tuple[dict[str, TensorInfo], dict[str, SafetensorsHeader]]:
    weight_map = read_weight_map(path / INDEX_NAME)
    headers: dict[str, SafetensorsHeader] = {}
    for file_name in sorted(set(weight_map.values())):
        if not (path / file_name).exists():
            raise CheckpointError(
                f"{path / INDEX_NAME} names {file_name}, which is not in the folder: a shard is "
                f"missing, or the index belongs to other files{_present(path)}"
            )
        headers[file_name] = read_safetensors_header(path / file_name)
    found = {(name, info.name): info for name, header in headers.items() for info in header.tensors}
    tensors = {}
    for tensor_name, file_name in weight_map.items():
        info = found.pop((file_name, tensor_name), None)
        if info is None:
            raise CheckpointError(
                f"{path / INDEX_NAME} says that tensor {tensor_name} is in {file_name}, "
                f"which does not hold it: the index is stale"
            )
        tensors[tensor_name] = info
    for file_name, tensor_name in found:
        _LOG.warning(
            "%s: tensor %s is not read from here, the index does not say so",
            path / file_name,
            tensor_name,
        )
    return tensors, headers


def _present(path: Path) -> str:
    names = sorted(entry.name for entry in path.glob("*.safetensors"))
    return f" (the folder has {', '.join(names[:5])})" if names else ""


def read_weight_map(path: Path) -> Mapping[str, str]:
    """The file of each tensor by an index.

    Raises:
        CheckpointError: it is no index, or names a file outside of the folder.
    """
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map must be an object with at least one entry")
    for tensor_name, file_name in weight_map.items():
        if not _is_plain_name(file_name):
            raise CheckpointError(
                f"{path}: weight_map entry {tensor_name!r}: {file_name!r:.200} is not the plain "
                "name of a .safetensors file in the folder"
            )
    return weight_map


def _is_plain_name(name: object) -> bool:
    # The suffix rules out "." and ".."; a backslash separates folders on some systems.
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and not any(char in name for char in "/\\\0")
    )
