"""Data that is found by the hash of its content."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stagemesh.checkpoint.weight_part import WeightPart, read_part
from stagemesh.errors import CheckpointError
from stagemesh.weight_transfer.content_hash import FileIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """Where the data of one tensor, or of a part of one, lies."""

    path: Path
    """The file."""
    offset: int
    """First byte of the tensor."""
    num_bytes: int
    """Length of the data."""
    part: WeightPart | None = None
    """Which bytes of the tensor it is; None for the first `num_bytes`."""
    identity: FileIdentity | None = None
    """The file as it was when it was hashed; None for files that are never written again."""


class BlobStore(Protocol):
    """What a process can send."""

    def find(self, content_hash: bytes) -> Blob | None:
        """The data with this hash, where it is here. May read the disk."""
        ...


def read_blob(blob: Blob, *, offset: int, num_bytes: int) -> bytes:
    """A part of the data.

    The file is opened for each part: a caller that is cancelled meanwhile leaves nothing open.

    Args:
        blob: which.
        offset: first byte, from the start of the data.
        num_bytes: how many.

    Raises:
        CheckpointError: the file is gone, has changed or is too short.
    """
    try:
        descriptor = os.open(blob.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{blob.path}: cannot be opened: {error}") from error
    try:
        if blob.identity is not None and FileIdentity.of(descriptor) != blob.identity:
            raise CheckpointError(
                f"{blob.path} has changed since the model was described; load the model again"
            )
        if blob.part is None:
            data = os.pread(descriptor, num_bytes, blob.offset + offset)
            is_there = len(data) == num_bytes
        else:
            buffer = bytearray(num_bytes)
            is_there = read_part(
                descriptor, memoryview(buffer), part=blob.part, offset=blob.offset, start=offset
            )
            data = bytes(buffer)
    finally:
        os.close(descriptor)
    if not is_there:
        raise CheckpointError(
            f"{blob.path} is truncated: {num_bytes} bytes are wanted from byte {offset} of what "
            f"lies at byte {blob.offset}, and the file has {blob.path.stat().st_size} bytes"
        )
    return data
