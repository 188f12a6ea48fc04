"""Where one tensor of a checkpoint lies: names, file, byte range, shape, encoding. Torch-free."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

from stagemesh.checkpoint.stored_form import AS_IT_IS, StoredForm
from stagemesh.checkpoint.weight_part import WeightPart
from stagemesh.errors import CheckpointError

_COMPARE_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor of a model's files, found without reading its data."""

    name: str
    """Parameter name as transformers spells it, e.g. "model.layers.0.self_attn.q_proj.weight"."""
    source_name: str
    """Name in the file."""
    file: Path
    """File that holds the data."""
    offset: int
    """First byte of the data, from the start of the file."""
    num_bytes: int
    """Length of the data of the whole tensor."""
    shape: tuple[int, ...]
    """Shape as transformers spells it, [out, in] for a linear layer."""
    encoding: str
    """Element type in the file: "F32", "BF16", ... or a ggml type such as "Q4_1"."""
    stored: StoredForm = AS_IT_IS
    """What reading has to undo."""
    part: WeightPart | None = None
    """Which of the data the file has; None for all of it."""

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)

    @property
    def held_bytes(self) -> int:
        """Length of the data in the file."""
        return self.num_bytes if self.part is None else self.part.num_bytes


def open_for_reading(info: TensorInfo) -> int:
    """Opens the tensor's file and returns the descriptor; the caller closes it.

    Raises:
        CheckpointError: the file is gone or no longer reaches to the tensor's end.
    """
    expected = info.offset + info.held_bytes
    try:
        descriptor = os.open(info.file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{info.file}: cannot be opened: {error}") from error
    actual = os.fstat(descriptor).st_size
    if actual < expected:
        os.close(descriptor)
        raise CheckpointError(
            f"{info.file} is truncated: tensor {info.source_name} ends at byte {expected}, "
            f"the file has {actual} bytes"
        )
    return descriptor


def pread_into(descriptor: int, buffer: memoryview, *, start: int, info: TensorInfo) -> None:
    """Fills `buffer` with data of the tensor; a short read is an error, never zeros.

    Args:
        descriptor: the tensor's file.
        buffer: what to fill.
        start: first byte, counted from the begin of the whole tensor's data.
        info: the tensor.

    Raises:
        CheckpointError: the file ended before the buffer was full, or has other parts of the
            tensor.
    """
    position = start if info.part is None else info.part.position(start, len(buffer))
    if position is None:
        raise CheckpointError(
            f"{info.file} has not all of bytes [{start}, {start + len(buffer)}) of tensor "
            f"{info.source_name}, only {info.part}"
        )
    offset, done = info.offset + position, 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], offset + done)
        if count == 0:
            raise CheckpointError(
                f"{info.file} is truncated: tensor {info.source_name} needs "
                f"{offset + len(buffer)} bytes of the file, reading stopped at {offset + done}"
            )
        done += count


def same_data(first: TensorInfo, second: TensorInfo) -> bool:
    """Whether two tensors hold the same bits: shape and encoding first, then bytes in chunks."""
    if (first.shape, first.encoding, first.num_bytes, first.stored) != (
        second.shape,
        second.encoding,
        second.num_bytes,
        second.stored,
    ):
        return False
    size = min(_COMPARE_CHUNK_BYTES, first.num_bytes)
    left, right = memoryview(bytearray(size)), memoryview(bytearray(size))
    descriptors: list[int] = []
    try:
        descriptors.extend(open_for_reading(info) for info in (first, second))
        for start in range(0, first.num_bytes, _COMPARE_CHUNK_BYTES):
            count = min(size, first.num_bytes - start)
            for descriptor, part, info in zip(
                descriptors, (left, right), (first, second), strict=True
            ):
                pread_into(descriptor, part[:count], start=start, info=info)
            if left[:count] != right[:count]:
                return False
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return True


def read_data(info: TensorInfo) -> bytes:
    """The data of a small tensor that is needed before any model exists."""
    buffer = bytearray(info.num_bytes)
    descriptor = open_for_reading(info)
    try:
        pread_into(descriptor, memoryview(buffer), start=0, info=info)
    finally:
        os.close(descriptor)
    return bytes(buffer)
