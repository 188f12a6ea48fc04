"""Strict reader of a safetensors header; it reads the header and nothing else.

    | 8 bytes, little-endian: N | N bytes of JSON | data; offsets in the JSON count from here |

Every number of the header is checked before memory is taken for it, so that a hostile file costs
no more than its own size.
"""

import json
import logging
import math
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagemesh.checkpoint.tensor_info import TensorInfo
from stagemesh.errors import CheckpointError, UnsupportedModel

_LOG = logging.getLogger(__name__)

MAX_HEADER_BYTES = 100_000_000
"""Longest header that is read; the reference implementation has the same limit."""

MAX_DIMS = 8
"""Most dimensions a tensor may have."""

ELEMENT_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
"""Bytes of one element by the header's dtype name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsHeader:
    """What a safetensors file says about itself."""

    tensors: tuple[TensorInfo, ...]
    """In the order of their data; empty for a file that holds only metadata."""
    metadata: dict[str, str]
    """The `__metadata__` entry, empty when absent."""
    num_file_bytes: int
    """Size of the file."""


def read_safetensors_header(path: Path) -> SafetensorsHeader:
    """Reads and checks the header of a safetensors file.

    Bytes that no tensor covers (appended ones, or gaps) are logged as a warning; they cannot
    change a value.

    Raises:
        CheckpointError: the file is truncated, or its header is inconsistent or hostile.
        UnsupportedModel: a tensor has an element type that we do not read.
    """
    size, raw = _read_raw_header(path)
    entries = _parse_json(path, raw)
    metadata = _check_metadata(path, entries.pop("__metadata__", {}))
    data_start = 8 + len(raw)
    tensors = sorted(
        (_check_entry(path, name, entry, data_start) for name, entry in entries.items()),
        key=lambda info: (info.offset, info.num_bytes),
    )
    _check_ranges(path, tensors, data_start=data_start, size=size)
    return SafetensorsHeader(tensors=tuple(tensors), metadata=metadata, num_file_bytes=size)


def _read_raw_header(path: Path) -> tuple[int, bytes]:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: not a regular file")
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = status.st_size
            if size < 8:
                raise CheckpointError(f"{path} is truncated: {size} bytes, expected at least 8")
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path}: header length {length} is over the limit of {MAX_HEADER_BYTES} bytes"
                )
            if 8 + length > size:
                raise CheckpointError(
                    f"{path} is truncated: header length {length} needs a file of at least "
                    f"{8 + length} bytes, the file has {size}"
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if len(raw) != length:
        raise CheckpointError(f"{path} is truncated: got {len(raw)} header bytes of {length}")
    return size, raw


def _parse_json(path: Path, raw: bytes) -> dict[str, Any]:
    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key appears twice")
        return found

    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: header is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path}: header must be a JSON object, got {type(parsed).__name__}")
    return parsed


def _check_metadata(path: Path, metadata: object) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise CheckpointError(f"{path}: __metadata__ must map strings to strings")
    return metadata


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _check_entry(path: Path, name: str, entry: object, data_start: int) -> TensorInfo:
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where}: entry must be an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str):
        raise CheckpointError(f"{where}: dtype must be a string, got {dtype!r:.80}")
    if dtype not in ELEMENT_BYTES:
        raise UnsupportedModel(
            f"{where}: type {dtype:.40} is not supported; supported: {', '.join(ELEMENT_BYTES)}"
        )
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(map(_is_count, shape)):
        raise CheckpointError(
            f"{where}: shape must be a list of at most {MAX_DIMS} counts, got {shape!r:.80}"
        )
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise CheckpointError(f"{where}: data_offsets must be two counts, got {offsets!r:.80}")
    start, end = offsets
    expected = math.prod(shape) * ELEMENT_BYTES[dtype]
    if end - start != expected:
        raise CheckpointError(
            f"{where}: data_offsets {offsets} span {end - start} bytes, "
            f"shape {shape} of {dtype} needs {expected}"
        )
    return TensorInfo(
        name=name,
        source_name=name,
        file=path,
        offset=data_start + start,
        num_bytes=expected,
        shape=tuple(shape),
        encoding=dtype,
    )


def _check_ranges(path: Path, tensors: list[TensorInfo], *, data_start: int, size: int) -> None:
    """Checks that the sorted tensors lie inside the file and do not share bytes."""
    end = data_start
    num_covered = 0
    previous = ""
    for info in tensors:
        if info.offset < end and info.num_bytes:
            raise CheckpointError(
                f"{path}: data_offsets of tensors {previous!r} and {info.name!r} overlap"
            )
        if info.num_bytes:
            end, previous = info.offset + info.num_bytes, info.name
            num_covered += info.num_bytes
    # Empty tensors take no bytes, but their offsets must still point into the file.
    needed = max((info.offset + info.num_bytes for info in tensors), default=data_start)
    if needed > size:
        raise CheckpointError(
            f"{path} is truncated: its header needs {needed} bytes, the file has {size}"
        )
    if num_covered != size - data_start:
        _LOG.warning(
            "%s: %d bytes belong to no tensor and are ignored",
            path,
            size - data_start - num_covered,
        )
