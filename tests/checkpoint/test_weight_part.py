"""Parts of tensors: places and pieces against bytes cut out one by one."""

import random
from pathlib import Path

import pytest

from stagemesh.checkpoint import weight_part
from stagemesh.checkpoint.weight_part import (
    MAX_BLOCKS,
    WeightBlock,
    WeightPart,
    read_part,
    union_of,
)
from stagemesh.errors import CheckpointError

ROWS, ROW_BYTES = 12, 10
NUM_BYTES = ROWS * ROW_BYTES


def numbers_of(part: WeightPart) -> list[int]:
    """The numbers of the tensor's bytes, in the order of the part."""
    return [
        row * part.row_bytes + byte
        for block in part.blocks
        for row in range(block.first_row, block.end_row)
        for byte in range(block.first_byte, block.end_byte)
    ]


def some_blocks(draw: random.Random) -> list[WeightBlock]:
    """Rows of a few spans of columns that have nothing in common."""
    borders = sorted(draw.sample(range(ROW_BYTES + 1), 2 * draw.randint(1, 2)))
    spans = list(zip(borders[::2], borders[1::2], strict=True))
    if draw.random() < 0.3:
        spans = [(0, ROW_BYTES)]
    return [
        WeightBlock(*sorted(draw.sample(range(ROWS + 1), 2)), *span)
        for span in spans
        for _ in range(draw.randint(1, 3))
    ]


@pytest.mark.parametrize("seed", range(50))
def test_places_and_pieces_are_those_of_the_bytes(seed: int) -> None:
    draw = random.Random(seed)
    blocks = some_blocks(draw)
    part = union_of(blocks, row_bytes=ROW_BYTES, num_bytes=NUM_BYTES)
    wanted = {n for block in blocks for n in numbers_of(WeightPart(ROW_BYTES, (block,)))}
    if part is None:
        assert len(wanted) == NUM_BYTES
        return
    numbers = numbers_of(part)
    assert sorted(numbers) == sorted(wanted)
    assert (part.num_bytes, part.end) == (len(numbers), max(numbers) + 1)
    for _ in range(40):
        start = draw.randrange(len(numbers) + 1)
        count = draw.randint(0, len(numbers) - start)
        pieces = [
            n for first, size in part.pieces(start, count) for n in range(first, first + size)
        ]
        assert pieces == numbers[start : start + count]
    for _ in range(40):
        start, count = draw.randrange(NUM_BYTES), draw.randint(1, 2 * ROW_BYTES)
        place = part.position(start, count)
        asked = list(range(start, start + count))
        if place is not None:
            assert numbers[place : place + count] == asked
        elif start in numbers:
            first = numbers.index(start)
            is_whole = all(b.end_byte - b.first_byte == ROW_BYTES for b in part.blocks)
            # Bytes of several blocks may follow each other; they are read in as many calls.
            assert numbers[first : first + count] != asked or not is_whole or len(part.blocks) > 1


def test_a_span_of_columns_that_meets_another_is_not_cut() -> None:
    meeting = [WeightBlock(0, 2, 0, 6), WeightBlock(5, 7, 4, 8)]
    assert union_of(meeting, row_bytes=ROW_BYTES, num_bytes=NUM_BYTES) is None
    apart = [WeightBlock(0, 2, 0, 4), WeightBlock(5, 7, 4, 8)]
    assert union_of(apart, row_bytes=ROW_BYTES, num_bytes=NUM_BYTES) == WeightPart(
        ROW_BYTES, tuple(apart)
    )


def test_what_would_need_many_blocks_is_read_whole() -> None:
    blocks = [WeightBlock(row, row + 1, 0, 4) for row in range(0, 4 * MAX_BLOCKS, 2)]
    size = 4 * MAX_BLOCKS * 4
    assert union_of(blocks, row_bytes=4, num_bytes=size) is None
    few = union_of(blocks[:MAX_BLOCKS], row_bytes=4, num_bytes=size)
    assert few is not None
    assert len(few.blocks) == MAX_BLOCKS


@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        ((), "from 1 to"),
        ((WeightBlock(0, 1, 0, 4),) * (MAX_BLOCKS + 1), "from 1 to"),
        ((WeightBlock(2, 2, 0, 4),), "not of rows of 8 bytes"),
        ((WeightBlock(0, 1, 4, 9),), "not of rows of 8 bytes"),
        ((WeightBlock(0, 1, 5, 4),), "not of rows of 8 bytes"),
        ((WeightBlock(0, 3, 0, 4), WeightBlock(2, 4, 3, 8)), "bytes in common"),
    ],
)
def test_blocks_that_make_no_part_are_refused(blocks: tuple[WeightBlock, ...], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        WeightPart(8, blocks)


def test_a_parts_text_is_its_own() -> None:
    texts = {
        str(part)
        for seed in range(100)
        if (part := union_of(some_blocks(random.Random(seed)), row_bytes=10, num_bytes=120))
    }
    parts = {
        part
        for seed in range(100)
        if (part := union_of(some_blocks(random.Random(seed)), row_bytes=10, num_bytes=120))
    }
    assert len(texts) == len(parts) > 50
    assert not any(set(text) & set(" \n") for text in texts)


@pytest.mark.parametrize("limits", [(0, 1), (3, 25), (100, 10**6)])
def test_bytes_read_are_those_of_the_part(
    tmp_path: Path, limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_part, "_GAP_BYTES", limits[0])
    monkeypatch.setattr(weight_part, "_SPAN_BYTES", limits[1])
    content = bytes(range(NUM_BYTES))
    path = tmp_path / "file"
    path.write_bytes(b"before" + content)
    with path.open("rb") as file:
        for seed in range(60):
            draw = random.Random(seed)
            part = union_of(some_blocks(draw), row_bytes=ROW_BYTES, num_bytes=NUM_BYTES)
            if part is None:
                continue
            numbers = numbers_of(part)
            for _ in range(20):
                start = draw.randrange(len(numbers) + 1)
                got = bytearray(draw.randint(0, len(numbers) - start))
                view = memoryview(got)
                assert read_part(file.fileno(), view, part=part, offset=6, start=start)
                assert list(got) == numbers[start : start + len(got)]
            # Negative control: a file that ends within the part.
            got = bytearray(part.num_bytes)
            late = 6 + NUM_BYTES - numbers[-1]
            assert not read_part(file.fileno(), memoryview(got), part=part, offset=late, start=0)
