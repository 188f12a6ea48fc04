"""Strict reader of a GGUF header (versions 2 and 3, little-endian). Torch-free.

    | "GGUF" | version | number of tensors | number of keys | keys | tensor infos | pad | data |

It is ours, and not the one of the package `gguf`, because files come from strangers: each number is
checked before it is used, and the vocabulary of a real model is read in a fraction of a second.
"""

import dataclasses
import functools
import math
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from stagemesh.checkpoint.gguf_reader import GgufReader
from stagemesh.checkpoint.tensor_info import TensorInfo
from stagemesh.errors import CheckpointError, UnsupportedModel

MAX_DIMS = 4
"""Most dimensions of a tensor; ggml itself has no more."""

MAX_ALIGNMENT = 65_536
"""Largest alignment of the data that is accepted; files in use have 32."""

PLAIN_TYPES = frozenset({"F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64"})
"""Types whose values are numbers, not blocks."""

_UINT32 = 4
_MIN_KEY_BYTES = 8 + 4 + 1  # an empty key, a type, a one-byte value
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8  # an empty name, no dims, a type, an offset


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """What a GGUF file says about itself."""

    version: int
    """Version of the format."""
    metadata: dict[str, Any]
    """All keys; arrays are lists."""
    tensors: tuple[TensorInfo, ...]
    """In file order, `name` equal to `source_name`, shapes in HF order (rows first)."""
    num_file_bytes: int
    """Size of the file."""


def read_gguf_header(path: Path) -> GgufHeader:
    """Reads and checks the header of a GGUF file.

    Raises:
        CheckpointError: the file is truncated, or its header is inconsistent or hostile; the
            message names the field.
        UnsupportedModel: a version, byte order, split file or tensor type that we do not read.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: not a regular file")
        with path.open("rb", buffering=1 << 20) as file:
            reader = GgufReader(file, path=str(path), size=status.st_size)
            version = _read_version(reader, path)
            num_tensors = reader.count(field="tensor count", min_item_bytes=_MIN_TENSOR_BYTES)
            num_keys = reader.count(field="key count", min_item_bytes=_MIN_KEY_BYTES)
            metadata = _read_metadata(reader, num_keys)
            alignment = metadata.get("general.alignment", 32)
            if metadata.get("split.count", 0) not in (0, 1):
                raise UnsupportedModel(
                    f"{path}: split.count is {metadata['split.count']}: split GGUF files are not "
                    "supported; merge them into one file first"
                )
            infos = [_read_tensor_info(reader, path, index) for index in range(num_tensors)]
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    data_start = reader.position + -reader.position % alignment
    tensors = tuple(_place(info, data_start=data_start, alignment=alignment) for info in infos)
    _check_ranges(path, tensors, size=status.st_size)
    return GgufHeader(
        version=version, metadata=metadata, tensors=tensors, num_file_bytes=status.st_size
    )


def _read_version(reader: GgufReader, path: Path) -> int:
    magic = reader.take(4, field="magic")
    if magic != b"GGUF":
        raise CheckpointError(f"{path}: magic: not a GGUF file, it starts with {magic!r}")
    version = reader.u32(field="version")
    if version & 0xFFFF == 0 and version:
        raise UnsupportedModel(f"{path}: version: big-endian GGUF files are not supported")
    if version not in (2, 3):
        raise UnsupportedModel(
            f"{path}: version: GGUF version {version} is not supported; supported: 2, 3"
        )
    return version


def _read_metadata(reader: GgufReader, num_keys: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(num_keys):
        key = reader.string(field=f"key {index}")
        if key in metadata:
            raise reader.fail(key, "the key appears twice")
        value_type = reader.u32(field=f"type of {key}")
        metadata[key] = reader.value(value_type, field=key)
        if key == "general.alignment":
            _check_alignment(reader, value_type, metadata[key])
    return metadata


def _check_alignment(reader: GgufReader, value_type: int, alignment: Any) -> None:
    if value_type != _UINT32:
        raise reader.fail("general.alignment", f"must be of type uint32, got type {value_type}")
    if not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise reader.fail(
            "general.alignment",
            f"must be a power of two from 1 to {MAX_ALIGNMENT}, got {alignment}",
        )


def _read_tensor_info(reader: GgufReader, path: Path, index: int) -> TensorInfo:
    """One tensor info, its offset still counted from the start of the data."""
    name = reader.string(field=f"name of tensor {index}")
    field = f"tensor {name!r:.200}"
    num_dims = reader.u32(field=f"n_dims of {field}")
    if num_dims > MAX_DIMS:
        raise reader.fail(f"n_dims of {field}", f"must be at most {MAX_DIMS}, got {num_dims}")
    # ggml lists the fastest axis first, HF lists it last.
    shape = tuple(reader.u64(field=f"dims of {field}") for _ in range(num_dims))[::-1]
    num_elements = math.prod(shape)
    if any(dim >= 2**63 for dim in shape) or num_elements >= 2**63:
        raise reader.fail(f"dims of {field}", f"{list(shape)} overflow a signed 64-bit count")
    type_id = reader.u32(field=f"type of {field}")
    offset = reader.u64(field=f"offset of {field}")
    try:
        ggml_type = GGMLQuantizationType(type_id)
        block_elements, block_bytes = GGML_QUANT_SIZES[ggml_type]
    except (ValueError, KeyError) as error:
        raise UnsupportedModel(f"{path}: {field} has the unknown ggml type {type_id}") from error
    if not _has_values(ggml_type):
        raise UnsupportedModel(
            f"{path}: {field} has the type {ggml_type.name}, which cannot be dequantised"
        )
    if (shape[-1] if shape else 1) % block_elements:
        raise reader.fail(
            f"dims of {field}",
            f"rows of {shape[-1:]} elements are not whole blocks of {block_elements} "
            f"({ggml_type.name})",
        )
    return TensorInfo(
        name=name,
        source_name=name,
        file=path,
        offset=offset,
        num_bytes=num_elements // block_elements * block_bytes,
        shape=shape,
        encoding=ggml_type.name,
    )


@functools.cache
def _has_values(ggml_type: GGMLQuantizationType) -> bool:
    """Whether the package gguf knows the values of a block; it has no other way to ask."""
    if ggml_type.name in PLAIN_TYPES:
        return True
    try:
        quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[ggml_type][1]), np.uint8), ggml_type)
    except NotImplementedError:
        return False
    return True


def _place(info: TensorInfo, *, data_start: int, alignment: int) -> TensorInfo:
    if info.offset % alignment:
        raise CheckpointError(
            f"{info.file}: offset of tensor {info.name!r}: {info.offset} is not a multiple of "
            f"general.alignment {alignment}"
        )
    return dataclasses.replace(info, offset=data_start + info.offset)


def _check_ranges(path: Path, tensors: tuple[TensorInfo, ...], *, size: int) -> None:
    """Checks that the tensors lie inside the file, have distinct names and share no bytes."""
    seen: set[str] = set()
    end, previous = 0, ""
    for info in sorted(tensors, key=lambda info: (info.offset, info.num_bytes)):
        if info.name in seen:
            raise CheckpointError(f"{path}: name of tensor {info.name!r} appears twice")
        seen.add(info.name)
        if info.offset + info.num_bytes > size:
            raise CheckpointError(
                f"{path}: offset of tensor {info.name!r}: its {info.num_bytes} bytes at "
                f"{info.offset} need a file of at least {info.offset + info.num_bytes} bytes, the "
                f"file has {size} (truncated?)"
            )
        if info.num_bytes and info.offset < end:
            raise CheckpointError(
                f"{path}: offset of tensor {info.name!r}: overlaps tensor {previous!r}"
            )
        if info.num_bytes:
            end, previous = info.offset + info.num_bytes, info.name
