"""Read a matrix in chunks of rows, quantise, pack, next chunk.

So besides the stage's own weights no more than a chunk in floats is held, whatever the size of a
matrix. A matrix may be made of several tensors, one below the other, as an expert's often is.
"""

from collections.abc import Iterator, Sequence

import torch

from stagemesh.checkpoint.low_bit import GROUP, fits_int4
from stagemesh.model_spec import TensorInfo
from stagemesh.models.low_bit_kernels import LowBitKernels
from stagemesh.models.low_bit_values import (
    BLOCK_ENCODINGS,
    groups_of_blocks,
    quantize_groups,
    quantize_rows,
)
from stagemesh.models.tensor_cut import Range, TensorCut
from stagemesh.models.weights import WeightReader

# Elements of a chunk: 4 MiB in float32.
_CHUNK_ELEMENTS = 2**20
# 4-bit layouts are blocks of so many rows at most.
_BLOCK_ROWS = 64

Sources = Sequence[tuple[TensorInfo, TensorCut]]
"""Tensors of which a matrix is made, with the part of each that is read."""


class LowBitReader:
    """Reads matrices as integers and scales.

    Args:
        reader: reads the files.
        kernels: of the device that the weights are for.
    """

    def __init__(self, reader: WeightReader, kernels: LowBitKernels) -> None:
        self._reader = reader
        self._kernels = kernels

    def rows(self, sources: Sources) -> tuple[torch.Tensor, torch.Tensor]:
        """In 8 bits.

        Shapes:
            returns int8 [rows, columns] and bfloat16 [rows].

        Raises:
            CheckpointError: a file is gone or too short.
        """
        num_rows, columns = _shape_of(sources)
        where = self._reader.device
        values = torch.empty((num_rows, columns), dtype=torch.int8, device=where)
        scales = torch.empty(num_rows, dtype=torch.bfloat16, device=where)
        done = 0
        for info, cut in sources:
            first = cut.columns[0] if cut.columns is not None else 0
            # Whole rows, though only some columns are kept: a row has one scale on all ranks.
            for start, end, part in _chunks(info, TensorCut(rows=cut.rows)):
                weight = self._reader.read(info, torch.float32, cut=part)
                here = slice(done + start, done + end)
                whole, scales[here] = quantize_rows(weight)
                values[here] = whole[:, first : first + columns]
            done += part_shape(info, cut)[0]
        return values.to(self._kernels.device), scales.to(self._kernels.device)

    def groups(self, sources: Sources) -> tuple[torch.Tensor, torch.Tensor]:
        """In 4 bits, packed.

        Shapes:
            returns what `LowBitKernels.matmul_int4` takes.

        Raises:
            CheckpointError: a file is gone or too short.
        """
        num_rows, columns = _shape_of(sources)
        # A GPU's layout is of whole matrices.
        by_chunks = self._kernels.device.type == "cpu" and all(
            part_shape(info, cut)[0] % _BLOCK_ROWS == 0 for info, cut in sources[:-1]
        )
        where = self._reader.device
        width = columns // 2 if by_chunks else columns
        packed = torch.empty((num_rows, width), dtype=torch.uint8, device=where)
        shape = (columns // GROUP, num_rows, 2)
        scales_zeros = torch.empty(shape, dtype=torch.bfloat16, device=where)
        done = 0
        for info, cut in sources:
            for start, end, part in _chunks(info, cut):
                here = slice(done + start, done + end)
                values, scales_zeros[:, here] = self._group_values(info, part)
                packed[here] = self._kernels.pack_int4(values) if by_chunks else values
            done += part_shape(info, cut)[0]
        packed = packed if by_chunks else self._kernels.pack_int4(packed)
        return packed, scales_zeros.to(self._kernels.device)

    def rows_of(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A matrix [rows, columns] of floats in 8 bits, as `rows`."""
        values, scales = quantize_rows(weight)
        return values.to(self._kernels.device), scales.to(self._kernels.device)

    def groups_of(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A matrix [rows, columns] of floats in 4 bits, as `groups`."""
        values, scales_zeros = quantize_groups(weight)
        return self._kernels.pack_int4(values), scales_zeros.to(self._kernels.device)

    def _group_values(self, info: TensorInfo, part: TensorCut) -> tuple[torch.Tensor, torch.Tensor]:
        stored = info.stored
        if info.encoding in BLOCK_ENCODINGS and not (stored.is_transposed or stored.added):
            return groups_of_blocks(self._reader.read_blocks(info, cut=part), info.encoding)
        return quantize_groups(self._reader.read(info, torch.float32, cut=part))


def fit_int4(sources: Sources) -> bool:
    """Whether the 4-bit kernels take this matrix, and its parts begin and end with a group."""
    for info, cut in sources:
        start, end = cut.columns or (0, info.shape[1])
        if start % GROUP or end % GROUP:
            return False
    return fits_int4(*_shape_of(sources))


def part_shape(info: TensorInfo, cut: TensorCut) -> tuple[int, int]:
    """Rows and columns of a part of a matrix."""
    start, end = cut.columns or (0, info.shape[1])
    ranges = cut.rows or ((0, info.shape[0]),)
    return sum(last - first for first, last in ranges), end - start


def _shape_of(sources: Sources) -> tuple[int, int]:
    shapes = [part_shape(info, cut) for info, cut in sources]
    return sum(rows for rows, _ in shapes), shapes[0][1]


def _chunks(info: TensorInfo, cut: TensorCut) -> Iterator[tuple[int, int, TensorCut]]:
    """The part in chunks of whole blocks of rows: rows [start, end) of it, and where they are."""
    rows, columns = part_shape(info, cut)
    step = max(_BLOCK_ROWS, _CHUNK_ELEMENTS // columns // _BLOCK_ROWS * _BLOCK_ROWS)
    ranges = cut.rows or ((0, info.shape[0]),)
    for start in range(0, rows, step):
        end = min(start + step, rows)
        here = tuple(_between(ranges, start, end))
        yield start, end, TensorCut(rows=here, columns=cut.columns)


def _between(ranges: tuple[Range, ...], start: int, end: int) -> Iterator[Range]:
    """What lies at [start, end) when the ranges are put one after the other."""
    done = 0
    for first, last in ranges:
        low, high = max(start, done), min(end, done + last - first)
        if low < high:
            yield first + low - done, first + high - done
        done += last - first
