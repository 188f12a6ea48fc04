"""Reads the weights that a stage needs, and only those, out of safetensors and GGUF files.

Each read takes the exact byte range of one tensor, in chunks of rows: besides the result no more
than a chunk is held, whatever the size of the tensor and whatever it is converted from.
"""

import math
import os
from collections.abc import Callable

import gguf
import torch

from stagemesh.checkpoint.gguf_names import permuted_heads
from stagemesh.checkpoint.tensor_info import TensorInfo, open_for_reading, pread_into, same_data
from stagemesh.errors import CheckpointError, UnsupportedModel
from stagemesh.model_spec import ModelSpec

_CHUNK_BYTES = 4 << 20

# Encodings that are a torch dtype, in either format.
_PLAIN_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
}

_Decoder = Callable[[torch.Tensor], torch.Tensor]


class WeightReader:
    """Reads tensors of one model.

    One thread at a time; files are opened for each tensor, so nothing stays open.

    Args:
        spec: the model.
        on_bytes: called after each chunk with the number of bytes that it read.
    """

    def __init__(self, spec: ModelSpec, *, on_bytes: Callable[[int], None] | None = None) -> None:
        self.read_bytes = 0
        """Bytes of files read so far."""
        self._spec = spec
        self._on_bytes = on_bytes

    def read(self, info: TensorInfo, dtype: torch.dtype) -> torch.Tensor:
        """The tensor in `dtype`: dequantised, rows in transformers' order, contiguous, own memory.

        Raises:
            CheckpointError: the file is gone or too short.
            UnsupportedModel: the tensor's type cannot be decoded.
        """
        decode = _decoder(info)
        # A descriptor first: a truncated file is refused before memory is taken.
        descriptor = open_for_reading(info)
        try:
            result = torch.empty(info.shape, dtype=dtype)
            if result.numel():
                self._fill(result, info, descriptor, decode)
        finally:
            os.close(descriptor)
        return result

    def _fill(
        self, result: torch.Tensor, info: TensorInfo, descriptor: int, decode: _Decoder
    ) -> None:
        num_rows = _num_rows(info)
        rows = result.view(num_rows, -1)
        row_bytes = info.num_bytes // num_rows
        step = max(1, min(num_rows, _CHUNK_BYTES // row_bytes))
        targets = self._target_rows(info, num_rows)
        # torch.empty and not bytes: torch warns of memory that cannot be written.
        buffer = torch.empty((step, row_bytes), dtype=torch.uint8)
        view = buffer.numpy().data.cast("B")
        for start in range(0, num_rows, step):
            count = min(step, num_rows - start)
            pread_into(
                descriptor,
                view[: count * row_bytes],
                offset=info.offset + start * row_bytes,
                info=info,
            )
            self._count(count * row_bytes)
            values = decode(buffer[:count])
            if targets is None:
                rows[start : start + count].copy_(values)
            else:
                rows[targets[start : start + count]] = values.to(rows.dtype)

    def _count(self, num_bytes: int) -> None:
        self.read_bytes += num_bytes
        if self._on_bytes is not None:
            self._on_bytes(num_bytes)

    def _target_rows(self, info: TensorInfo, num_rows: int) -> torch.Tensor | None:
        """For each row of the file its row in the result; None when the order is the same."""
        metadata = self._spec.gguf_metadata
        if metadata is None:
            return None
        num_heads = permuted_heads(
            info.source_name,
            architecture=metadata["general.architecture"],
            num_heads=self._spec.num_heads,
            num_kv_heads=self._spec.num_kv_heads,
        )
        if num_heads is None:
            return None
        if num_rows % (2 * num_heads):
            raise CheckpointError(
                f"{info.file}: tensor {info.source_name} has {num_rows} rows, which "
                f"{num_heads} heads of an even size do not divide"
            )
        # Row (head, pair, half) of the file is row (head, half, pair) of the model.
        order = torch.arange(num_rows).view(num_heads, 2, num_rows // num_heads // 2)
        return order.transpose(1, 2).reshape(-1)


def tied_head_differs(spec: ModelSpec) -> bool:
    """Whether the config ties the head to the token table while the file has another head."""
    return spec.tie_word_embeddings and any(
        info.name.endswith(".weight") and not same_data(info, spec.groups.embedding)
        for info in spec.groups.head
    )


def _num_rows(info: TensorInfo) -> int:
    """Rows that can be decoded alone: blocks of quantised values never cross the last axis."""
    if len(info.shape) > 1:
        return math.prod(info.shape[:-1])
    return math.prod(info.shape) if info.encoding in _PLAIN_DTYPES else 1


def _decoder(info: TensorInfo) -> _Decoder:
    """From rows of bytes [rows, row_bytes] to rows of values [rows, elements]."""
    dtype = _PLAIN_DTYPES.get(info.encoding)
    if dtype is not None:
        return lambda raw: raw.view(dtype)
    ggml_type = gguf.GGMLQuantizationType[info.encoding]

    def dequantise(raw: torch.Tensor) -> torch.Tensor:
        try:
            return torch.from_numpy(gguf.quants.dequantize(raw.numpy(), ggml_type))
        except NotImplementedError as error:
            raise UnsupportedModel(
                f"{info.file}: tensor {info.source_name} has type {info.encoding}, "
                "which cannot be dequantised"
            ) from error

    return dequantise
