"""Reads the weights that a stage needs, and only those, out of safetensors and GGUF files.

Each read takes the exact byte range of one tensor, in chunks of rows: besides the result no more
than a chunk is held, whatever the size of the tensor and whatever it is converted from.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import gguf
import numpy as np
import torch

from stagemesh.checkpoint.tensor_info import TensorInfo, open_for_reading, pread_into, same_data
from stagemesh.errors import UnsupportedModel
from stagemesh.model_spec import ModelSpec
from stagemesh.models.tensor_cut import Range, TensorCut

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSpan:
    """Which bytes of each row are read, and which of the values in them are kept."""

    row_bytes: int
    """Bytes of a whole row."""
    offset: int
    """First byte that is read."""
    num_bytes: int
    """Bytes that are read."""
    start: int
    """First value that is kept, of those read."""
    stop: int
    """One past the last value that is kept."""


class WeightReader:
    """Reads tensors of one model.

    One thread at a time; files are opened for each tensor, so nothing stays open.

    Args:
        spec: the model.
        on_bytes: called after each chunk with the number of bytes that it read.
    """

    device = torch.device("cpu")
    """Where what is read comes to lie."""

    def __init__(self, spec: ModelSpec, *, on_bytes: Callable[[int], None] | None = None) -> None:
        self.read_bytes = 0
        """Bytes of files read so far."""
        self._spec = spec
        self._on_bytes = on_bytes

    def read(
        self, info: TensorInfo, dtype: torch.dtype, *, cut: TensorCut | None = None
    ) -> torch.Tensor:
        """The tensor in `dtype`: dequantised, rows in transformers' order, contiguous, own memory.

        Args:
            info: which.
            dtype: of the result.
            cut: which part of it, as [rows, columns] (or a vector) in the result; no other rows are
                read, and of each row only the blocks of quantised values that the columns touch.

        Raises:
            CheckpointError: the file is gone or too short.
            UnsupportedModel: the tensor's type cannot be decoded.
        """
        if info.stored.is_transposed:
            return self._read_transposed(info, dtype, cut)
        decode = _decoder(info)
        # A descriptor first: a truncated file is refused before memory is taken.
        with self._opened(info) as descriptor:
            if cut is not None:
                return self._read_part(info, dtype, cut, descriptor, decode)
            result = torch.empty(info.shape, dtype=dtype, device=self.device)
            if result.numel():
                num_rows = _num_rows(info)
                span = _whole_rows(info, num_rows)
                rows = result.view(num_rows, -1)
                self._fill(rows, (0, num_rows), span, info, descriptor, decode)
            return result

    def read_blocks(self, info: TensorInfo, *, cut: TensorCut) -> torch.Tensor:
        """A part of a matrix of quantised values as the file has it; rows in the model's order.

        Args:
            info: which; neither transposed nor with a number added.
            cut: which part of it; columns begin and end with a block.

        Shapes:
            returns uint8 [rows, bytes of the blocks].

        Raises:
            CheckpointError: the file is gone or too short.
        """
        num_rows = _num_rows(info)
        columns = cut.columns or (0, info.shape[-1])
        span = dataclasses.replace(_row_span(info, *columns), start=0)
        span = dataclasses.replace(span, stop=span.num_bytes)
        ranges = cut.rows or ((0, num_rows),)
        shape = (sum(end - start for start, end in ranges), span.num_bytes)
        result = torch.empty(shape, dtype=torch.uint8, device=self.device)
        done = 0
        with self._opened(info) as descriptor:
            for start, end in ranges:
                part = result[done : done + end - start]
                self._fill(part, (start, end), span, info, descriptor, lambda raw: raw)
                done += end - start
        return result

    @contextmanager
    def _opened(self, info: TensorInfo) -> Iterator[int]:
        descriptor = open_for_reading(info)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _read_transposed(
        self, info: TensorInfo, dtype: torch.dtype, cut: TensorCut | None
    ) -> torch.Tensor:
        """A matrix whose rows are the file's columns."""
        in_file = dataclasses.replace(
            info,
            shape=info.shape[::-1],
            stored=dataclasses.replace(info.stored, is_transposed=False),
        )
        if cut is None:
            return self.read(in_file, dtype).T.contiguous()
        rows = (cut.columns,) if cut.columns is not None else None
        parts = [
            self.read(in_file, dtype, cut=TensorCut(rows=rows, columns=columns))
            for columns in cut.rows or (None,)
        ]
        return torch.cat(parts, dim=1).T.contiguous()

    def _read_part(
        self,
        info: TensorInfo,
        dtype: torch.dtype,
        cut: TensorCut,
        descriptor: int,
        decode: _Decoder,
    ) -> torch.Tensor:
        """One part of a tensor, or of a vector of plain values, as [rows, columns]."""
        num_rows = _num_rows(info)
        if len(info.shape) == 1 and num_rows != info.shape[0]:
            raise UnsupportedModel(
                f"{info.file}: tensor {info.source_name} of shape {list(info.shape)} and type "
                f"{info.encoding} cannot be read in parts"
            )
        ranges = cut.rows or ((0, num_rows),)
        span = _whole_rows(info, num_rows)
        if cut.columns is not None:
            span = _row_span(info, *cut.columns)
        count = sum(end - start for start, end in ranges)
        result = torch.empty((count, span.stop - span.start), dtype=dtype, device=self.device)
        done = 0
        for start, end in ranges:
            part = result[done : done + end - start]
            self._fill(part, (start, end), span, info, descriptor, decode)
            done += end - start
        return result if len(info.shape) > 1 else result.view(-1)

    def _fill(
        self,
        rows: torch.Tensor,
        row_range: Range,
        span: RowSpan,
        info: TensorInfo,
        descriptor: int,
        decode: _Decoder,
    ) -> None:
        """Read `span` of each row of the file in `row_range` into `rows`."""
        first, last = row_range
        step = max(1, min(last - first, _CHUNK_BYTES // span.num_bytes))
        # torch.empty and not bytes: torch warns of memory that cannot be written.
        buffer = torch.empty((step, span.num_bytes), dtype=torch.uint8)
        view = buffer.numpy().data.cast("B")
        for start, end, targets in row_runs(info, first, last):
            for row in range(start, end, step):
                count = min(step, end - row)
                self._read_rows(descriptor, view, row, count, span, info)
                values = decode(buffer[:count])[:, span.start : span.stop]
                if info.stored.added:
                    values = values.float() - info.stored.added
                if targets is None:
                    rows[row - first : row - first + count].copy_(values)
                else:
                    rows[targets[row - start : row - start + count]] = values.to(rows.dtype)

    def _read_rows(
        self,
        descriptor: int,
        view: memoryview,
        start: int,
        count: int,
        span: RowSpan,
        info: TensorInfo,
    ) -> None:
        size = span.num_bytes
        if size == span.row_bytes:
            pread_into(descriptor, view[: count * size], start=start * size, info=info)
        else:
            for row in range(count):
                first = (start + row) * span.row_bytes + span.offset
                part = view[row * size : (row + 1) * size]
                pread_into(descriptor, part, start=first, info=info)
        self._count(count * size)

    def _count(self, num_bytes: int) -> None:
        self.read_bytes += num_bytes
        if self._on_bytes is not None:
            self._on_bytes(num_bytes)


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


def row_runs(
    info: TensorInfo, first: int, last: int
) -> Iterator[tuple[int, int, torch.Tensor | None]]:
    """The file's rows that make up the model's rows [first, last), in runs [start, end).

    With each run comes, for each of its rows, the row of the result; None when the order is the
    same.
    """
    order = info.stored.row_order
    if order is None:
        yield first, last, None
        return
    where = f"{info.file}: tensor {info.source_name} has {_num_rows(info)} rows"
    sources = order.source_rows(_num_rows(info), where=where)[first:last]
    targets = np.argsort(sources)
    sorted_rows = sources[targets]
    borders = np.flatnonzero(np.diff(sorted_rows) != 1) + 1
    for rows, places in zip(
        np.split(sorted_rows, borders), np.split(targets, borders), strict=True
    ):
        if rows.size:
            yield int(rows[0]), int(rows[-1]) + 1, torch.from_numpy(places)


def _whole_rows(info: TensorInfo, num_rows: int) -> RowSpan:
    size = info.num_bytes // num_rows
    elements = info.num_elements // num_rows
    return RowSpan(row_bytes=size, offset=0, num_bytes=size, start=0, stop=elements)


def _row_span(info: TensorInfo, start: int, end: int) -> RowSpan:
    """The blocks of a row that hold its values [start, end)."""
    row_bytes = info.num_bytes // _num_rows(info)
    dtype = _PLAIN_DTYPES.get(info.encoding)
    if dtype is not None:
        block, size = 1, dtype.itemsize
    else:
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[info.encoding]]
    first, last = start // block, -(-end // block)
    return RowSpan(
        row_bytes=row_bytes,
        offset=first * size,
        num_bytes=(last - first) * size,
        start=start - first * block,
        stop=end - first * block,
    )


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
