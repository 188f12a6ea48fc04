"""Where each element lies: every one on exactly one rank, in pieces of rounded-up length."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.parallel.fsdp.layout import Piece, ShardLayout, flat_layout, per_parameter_layout

SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=5)


def numels(layout: ShardLayout) -> list[list[int]]:
    return [[piece.numel for piece in pieces] for pieces in layout.pieces]


@pytest.mark.parametrize(
    ("shapes", "num_shards", "length", "expected"),
    [
        ([(2, 3), (2,), (4,)], 5, 3, [[3, 0, 0], [3, 0, 0], [0, 2, 1], [0, 0, 3], [0, 0, 0]]),
        ([(7,)], 2, 4, [[4], [3]]),
        ([(), (1,)], 4, 1, [[1, 0], [0, 1], [0, 0], [0, 0]]),
        ([(6,)], 1, 6, [[6]]),
    ],
)
def test_flat(
    shapes: list[tuple[int, ...]], num_shards: int, length: int, expected: list[list[int]]
) -> None:
    layout = flat_layout(shapes, num_shards=num_shards)
    assert layout.shard_length == length
    assert numels(layout) == expected


@pytest.mark.parametrize(
    ("shapes", "num_shards", "length", "expected"),
    [
        ([(2, 3), (2,), (4,)], 2, 6, [[3, 1, 2], [3, 1, 2]]),
        ([(1,), (3,), (5,), ()], 4, 5, [[1, 1, 2, 1], [0, 1, 2, 0], [0, 1, 1, 0], [0, 0, 0, 0]]),
    ],
)
def test_per_parameter(
    shapes: list[tuple[int, ...]], num_shards: int, length: int, expected: list[list[int]]
) -> None:
    layout = per_parameter_layout(shapes, num_shards=num_shards)
    assert layout.shard_length == length
    assert numels(layout) == expected


@pytest.mark.parametrize("make", [flat_layout, per_parameter_layout])
@given(shapes=SHAPES, num_shards=st.integers(1, 5))
def test_each_element_is_in_one_place(make, shapes, num_shards) -> None:
    layout = make(shapes, num_shards=num_shards)
    assert covers_all_once(layout)
    if layout.gathered_starts is not None:
        for rank, pieces in enumerate(layout.pieces):
            for piece in pieces:
                if piece.numel:
                    at = rank * layout.shard_length + piece.start
                    assert at == layout.gathered_starts[piece.slot] + piece.offset


def covers_all_once(layout: ShardLayout) -> bool:
    seen = sorted(
        (piece.slot, element)
        for pieces in layout.pieces
        for piece in pieces
        for element in range(piece.offset, piece.offset + piece.numel)
    )
    places = [
        (rank, place)
        for rank, pieces in enumerate(layout.pieces)
        for piece in pieces
        for place in range(piece.start, piece.start + piece.numel)
    ]
    in_bounds = all(place < layout.shard_length for _, place in places)
    return len(seen) == len(set(seen)) == layout.numel == len(set(places)) and in_bounds


def test_an_overlap_would_be_noticed() -> None:
    """Negative control."""
    twice = Piece(slot=0, start=0, offset=0, numel=2)
    layout = ShardLayout(
        shapes=((3,),),
        shard_length=2,
        pieces=((twice,), (Piece(slot=0, start=0, offset=1, numel=2),)),
        flat_starts=(0,),
        gathered_starts=(0,),
    )
    assert not covers_all_once(layout)
