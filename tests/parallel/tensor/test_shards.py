"""Whole numbers over ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.errors import ConfigError
from stagemesh.parallel.tensor.shards import (
    balanced_sizes,
    even_sizes,
    proportional_sizes,
    resolve_sizes,
    shard_span,
)


@pytest.mark.parametrize(
    ("total", "shares", "expected"),
    [
        (6, (1, 1), (3, 3)),
        (3, (1, 1), (2, 1)),
        (3, (1, 2), (1, 2)),
        (8, (3, 2, 1), (4, 3, 1)),
        (4, (100, 1, 1), (2, 1, 1)),
        (7, (5,), (7,)),
    ],
)
def test_proportional_sizes(total: int, shares: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert proportional_sizes(total, shares=shares, name="heads") == expected


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(0, 500))
def test_proportional_sizes_are_whole_and_near_the_quota(shares: list[int], extra: int) -> None:
    total = len(shares) + extra
    sizes = proportional_sizes(total, shares=shares, name="heads")
    assert sum(sizes) == total
    assert min(sizes) >= 1
    for size, share in zip(sizes, shares, strict=True):
        quota = total * share / sum(shares)
        assert size > quota - len(shares)
        assert size < max(2, quota + 1)


@given(st.integers(0, 200), st.integers(1, 9))
def test_balanced_sizes(total: int, num_ranks: int) -> None:
    sizes = balanced_sizes(total, num_ranks=num_ranks)
    assert sum(sizes) == total
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6))
def test_spans_follow_one_another(sizes: list[int]) -> None:
    spans = [shard_span(sizes, rank=rank) for rank in range(len(sizes))]
    assert [end for _, end in spans[:-1]] == [start for start, _ in spans[1:]]
    assert (spans[0][0], spans[-1][1]) == (0, sum(sizes))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: even_sizes(6, num_ranks=0, name="x"), ["ranks must be >= 1", "0"]),
        (lambda: even_sizes(7, num_ranks=2, name="out_features"), ["out_features", "7", "2"]),
        (lambda: even_sizes(0, num_ranks=2, name="out_features"), ["out_features", "0", "2"]),
        (lambda: proportional_sizes(6, shares=[1, 0], name="x"), ["shares", "[1, 0]"]),
        (lambda: proportional_sizes(1, shares=[1, 1], name="heads"), ["heads of 1", "2 ranks"]),
        (lambda: proportional_sizes(1, shares=[], name="heads"), ["0"]),
        (lambda: balanced_sizes(4, num_ranks=0), ["0"]),
        (lambda: shard_span((2, 2), rank=2), ["rank", "[0, 2)", "2"]),
        (lambda: shard_span((2, 2), rank=-1), ["rank", "-1"]),
        (lambda: resolve_sizes((3, 4), total=6, num_ranks=2, name="x"), ["sum 6", "[3, 4]"]),
        (lambda: resolve_sizes((6,), total=6, num_ranks=2, name="x"), ["2 numbers", "[6]"]),
        (lambda: resolve_sizes((6, 0), total=6, num_ranks=2, name="x"), [">= 1", "[6, 0]"]),
    ],
)
def test_what_does_not_fit_is_named(call, words) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError) as raised:
        call()
    for word in words:
        assert word in str(raised.value)
