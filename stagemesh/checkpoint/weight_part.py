"""The bytes of a tensor that one rank reads: rows of it, or some columns of its rows. Torch-free.

The data of a tensor is rows of equal length. A part is made of blocks, each so many rows and of
each the same bytes. Where only a part is sent and kept, its blocks follow each other:

    the tensor, rows of 8 bytes       blocks: rows [0, 2), bytes [0, 8)       the part, 19 bytes
      aaaaaaaa                                rows [3, 4), bytes [2, 5)         aaaaaaaabbbbbbbbccc
      bbbbbbbb
      ........
      ..ccc...
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from stagemesh.errors import CheckpointError

MAX_BLOCKS = 1000
"""Most blocks of a part: what would need more is read as a whole."""

_GAP_BYTES = 16 << 10
# Small enough for memory that the C library has at hand: fresh pages take longer than the copy.
_SPAN_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, order=True)
class WeightBlock:
    """Rows [first_row, end_row), and of each its bytes [first_byte, end_byte)."""

    first_row: int
    end_row: int
    first_byte: int
    end_byte: int

    @property
    def num_bytes(self) -> int:
        """Length of the data."""
        return (self.end_row - self.first_row) * (self.end_byte - self.first_byte)


@dataclass(frozen=True, slots=True)
class WeightPart:
    """Some bytes of a tensor, in the order of its blocks.

    Raises:
        CheckpointError: a block is empty or leaves its rows, or two have a byte in common.
    """

    row_bytes: int
    """Bytes of a row of the tensor."""
    blocks: tuple[WeightBlock, ...]
    """In the order in which their bytes are kept."""

    def __post_init__(self) -> None:
        if not 0 < len(self.blocks) <= MAX_BLOCKS:
            raise CheckpointError(
                f"a part has from 1 to {MAX_BLOCKS} blocks, got {len(self.blocks)}"
            )
        for block in self.blocks:
            if not (
                0 <= block.first_row < block.end_row
                and 0 <= block.first_byte < block.end_byte <= self.row_bytes
            ):
                raise CheckpointError(f"{block} is not of rows of {self.row_bytes} bytes")
        by_row = sorted(self.blocks)
        for index, block in enumerate(by_row):
            for other in by_row[index + 1 :]:
                if other.first_row >= block.end_row:
                    break
                if other.first_byte < block.end_byte and block.first_byte < other.end_byte:
                    raise CheckpointError(f"{block} and {other} have bytes in common")

    def __str__(self) -> str:
        """Short, without spaces, and the same for equal parts alone."""
        blocks = (f"{b.first_row}-{b.end_row}:{b.first_byte}-{b.end_byte}" for b in self.blocks)
        return f"{self.row_bytes};{','.join(blocks)}"

    @property
    def num_bytes(self) -> int:
        """Length of all blocks."""
        return sum(block.num_bytes for block in self.blocks)

    @property
    def end(self) -> int:
        """One past the last byte of the tensor that belongs to the part."""
        return max((b.end_row - 1) * self.row_bytes + b.end_byte for b in self.blocks)

    def position(self, start: int, num_bytes: int) -> int | None:
        """Where bytes of the tensor lie within the part.

        Args:
            start: the first, counted from the tensor's begin.
            num_bytes: how many.

        Returns:
            None where the part does not have all of them, one after the other.
        """
        row, byte = divmod(start, self.row_bytes)
        before = 0
        for block in self.blocks:
            width = block.end_byte - block.first_byte
            if block.first_row <= row < block.end_row and block.first_byte <= byte < block.end_byte:
                is_whole = width == self.row_bytes
                end = block.end_row * width if is_whole else row * self.row_bytes + block.end_byte
                if start + num_bytes > end:
                    return None
                return before + (row - block.first_row) * width + byte - block.first_byte
            before += block.num_bytes
        return None

    def pieces(self, start: int, num_bytes: int) -> Iterator[tuple[int, int]]:
        """Where bytes of the part lie within the tensor: (first, how many) of each piece.

        Args:
            start: the first, counted from the part's begin.
            num_bytes: how many.
        """
        end = start + num_bytes
        for block in self.blocks:
            width = block.end_byte - block.first_byte
            # Whole rows are one piece.
            size = block.num_bytes if width == self.row_bytes else width
            here = block.first_row * self.row_bytes + block.first_byte
            for index in range(max(0, start) // size, block.num_bytes // size):
                first, last = max(start, index * size), min(end, (index + 1) * size)
                if first >= last:
                    break
                yield here + index * self.row_bytes + first - index * size, last - first
            start, end = start - block.num_bytes, end - block.num_bytes
            if end <= 0:
                return


def union_of(blocks: Iterable[WeightBlock], *, row_bytes: int, num_bytes: int) -> WeightPart | None:
    """The part that has the bytes of all blocks, each once.

    Args:
        blocks: may touch and repeat each other.
        row_bytes: of a row of the tensor.
        num_bytes: of the tensor.

    Returns:
        None for all of the tensor: where the part would be that, or not of few blocks.
    """
    by_columns: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for block in set(blocks):
        columns = (block.first_byte, block.end_byte)
        by_columns.setdefault(columns, []).append((block.first_row, block.end_row))
    if any(a < d and c < b for (a, b), (c, d) in combinations(by_columns, 2)):
        return None
    merged = [
        WeightBlock(*rows, *columns)
        for columns, ranges in sorted(by_columns.items())
        for rows in _merged(ranges)
    ]
    if len(merged) > MAX_BLOCKS or sum(block.num_bytes for block in merged) == num_bytes:
        return None
    return WeightPart(row_bytes, tuple(merged))


def _merged(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    ordered = sorted(ranges)
    start, end = ordered[0]
    for first, last in ordered[1:]:
        if first > end:
            yield start, end
            start, end = first, last
        else:
            end = max(end, last)
    yield start, end


def read_part(
    descriptor: int, buffer: memoryview, *, part: WeightPart, offset: int, start: int
) -> bool:
    """Fill `buffer` with bytes of a part, from a file that has the whole tensor.

    Args:
        descriptor: the file.
        buffer: what to fill.
        part: which.
        offset: of the tensor in the file.
        start: first byte, counted from the part's begin.

    Returns:
        Whether the file has them all.
    """
    end, done = start + len(buffer), 0
    for block in part.blocks:
        first, last = max(0, start), min(end, block.num_bytes)
        if first < last:
            target = buffer[done : done + last - first]
            here = offset + block.first_row * part.row_bytes + block.first_byte
            width = block.end_byte - block.first_byte
            if width == part.row_bytes:
                is_there = os.preadv(descriptor, [target], here + first) == len(target)
            else:
                columns = _Columns(descriptor, here, width, part.row_bytes)
                is_there = columns.read(target, first)
            if not is_there:
                return False
            done += last - first
        start, end = start - block.num_bytes, end - block.num_bytes
    return True


@dataclass(frozen=True, slots=True)
class _Columns:
    """The first `width` bytes of rows in a file, of which row 0 begins at `offset`."""

    descriptor: int
    offset: int
    width: int
    row_bytes: int

    def read(self, target: memoryview, start: int) -> bool:
        """Fill `target` from byte `start` of the columns; returns whether they are there."""
        row, skipped = divmod(start, self.width)
        if skipped:  # the rest of a row
            size = min(len(target), self.width - skipped)
            place = self.offset + row * self.row_bytes + skipped
            if os.preadv(self.descriptor, [target[:size]], place) < size:
                return False
            target, row = target[size:], row + 1
        # Rows are read with what lies between them: a call for each takes longer than some kB more.
        is_wide = self.row_bytes - self.width > _GAP_BYTES
        step = 1 if is_wide else max(1, _SPAN_BYTES // self.row_bytes)
        while target:
            # The last row may be wanted in part.
            count = min(step, len(target) // self.width) or 1
            width = min(self.width, len(target))
            size = (count - 1) * self.row_bytes + width
            span = os.pread(self.descriptor, size, self.offset + row * self.row_bytes)
            if len(span) < size:
                return False
            rows = np.ndarray((count, width), np.uint8, span, strides=(self.row_bytes, 1))
            np.frombuffer(target, np.uint8, count * width).reshape(count, width)[:] = rows
            target, row = target[count * width :], row + count
        return True
