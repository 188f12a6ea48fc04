"""Heads, columns and rows of a layer over ranks: known values, KV groups, weights, refusals."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagemesh.comm.message_group import DEFAULT_DIRECT_BYTES
from stagemesh.errors import ConfigError
from stagemesh.placement.counts import proportional_counts
from stagemesh.placement.tensor_split import DIRECT_BYTES, TensorParallel


def ranks(world_size: int, heads: int, ffn: int, kv: int | None = None, **options):
    result = []
    for rank in range(world_size):
        tensor_parallel = TensorParallel(world_size, rank, **options)
        tensor_parallel.configure(heads, ffn, num_kv_heads=kv)
        result.append(tensor_parallel)
    return result


def test_known_values() -> None:
    four = ranks(4, 64, 28672)
    assert four[1].head_range(64) == four[1].head_range() == (16, 32)
    assert four[2].ffn_range(28672) == four[2].ffn_range() == (14336, 21504)
    assert four[0].column_split((4096, 16384)) == (4096, 4096)
    assert four[0].row_split((16384, 4096)) == (4096, 4096)
    # Other numbers than those configured are cut anywhere.
    assert TensorParallel(4, 1).head_range(64) == (16, 32)
    assert TensorParallel(1, 0).head_range(7) == (0, 7)


@pytest.mark.parametrize(
    ("total", "weights", "expected"),
    [
        (100, [0.49, 0.51], [49, 51]),
        (10, [0.1, 0.2, 0.7], [1, 2, 7]),
        (31, [1 / 3, 1 / 3, 1 / 3], [11, 10, 10]),
        (10, [1, 1, 1], [4, 3, 3]),
        (60, [1] * 31, [2] * 29 + [1] * 2),
        (29, [1] * 7, [5, 4, 4, 4, 4, 4, 4]),
        (8, [0, 1], [0, 8]),
        (5, [1000, 1, 1], [3, 1, 1]),
    ],
)
def test_counts_follow_shares_without_a_residue(total, weights, expected) -> None:
    assert proportional_counts(total, weights) == expected


@pytest.mark.parametrize("weights", [[0, 0], [-1, 2], [float("nan"), 1], [float("inf")], [1] * 9])
def test_shares_that_make_no_sense_are_refused(weights) -> None:
    with pytest.raises(ConfigError, match=r"weight|cannot be split"):
        proportional_counts(8, weights)


def test_remainders_are_spread() -> None:
    sizes = [end - start for start, end in (r.ffn_range() for r in ranks(3, 3, 100))]
    assert sizes == [34, 33, 33]
    assert [r.head_range() for r in ranks(4, 10, 8)] == [(0, 3), (3, 6), (6, 8), (8, 10)]


def test_kv_groups_are_not_cut_while_there_are_enough() -> None:
    # 9 heads in 3 groups over 2 ranks: two groups and one, never half a group.
    two = ranks(2, 9, 1536, kv=3)
    assert [r.head_range() for r in two] == [(0, 6), (6, 9)]
    assert [r.kv_head_range() for r in two] == [(0, 2), (2, 3)]


def test_more_ranks_than_kv_heads_hold_copies() -> None:
    four = ranks(4, 8, 64, kv=2)
    assert [r.head_range() for r in four] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert [r.kv_head_range() for r in four] == [(0, 1), (0, 1), (1, 2), (1, 2)]


def test_ranks_that_divide_nothing_evenly() -> None:
    assert [r.head_range() for r in ranks(4, 6, 100, kv=2)] == [(0, 2), (2, 3), (3, 5), (5, 6)]
    eight = [r.head_range() for r in ranks(8, 12, 100, kv=2)]
    assert eight == [(0, 2), (2, 4), (4, 5), (5, 6), (6, 8), (8, 10), (10, 11), (11, 12)]


def test_shares_follow_unequal_devices() -> None:
    three = ranks(3, 16, 1000, kv=8, weights=(2, 1, 1))
    assert [r.head_range() for r in three] == [(0, 8), (8, 12), (12, 16)]
    assert [r.ffn_range() for r in three] == [(0, 500), (500, 750), (750, 1000)]
    # A slow rank keeps at least one group.
    assert ranks(2, 4, 8, kv=2, weights=(1000, 1))[1].kv_head_range() == (1, 2)


def attend(x, q, k, v, o, *, heads, kv_heads, dim=4):
    """Attention with grouped heads, [T, D] to [T, D]; the weights may be a rank's part."""
    queries = (x @ q).reshape(len(x), heads, dim)
    keys, values = ((x @ w).reshape(len(x), kv_heads, dim) for w in (k, v))
    repeat = heads // kv_heads
    scores = np.einsum("thd,shd->hts", queries, keys.repeat(repeat, axis=1))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    mixed = np.einsum("hts,shd->thd", weights, values.repeat(repeat, axis=1))
    return mixed.reshape(len(x), heads * dim) @ o


@pytest.mark.parametrize(
    ("world_size", "heads", "kv"), [(2, 9, 3), (4, 8, 2), (3, 8, 2), (4, 6, 2), (8, 12, 2)]
)
def test_the_parts_sum_to_the_whole(world_size: int, heads: int, kv: int) -> None:
    rng, dim, hidden = np.random.default_rng(0), 4, 12
    x = rng.standard_normal((7, hidden))
    q, k, v = (rng.standard_normal((hidden, n * dim)) * 0.3 for n in (heads, kv, kv))
    o = rng.standard_normal((heads * dim, hidden))
    whole = attend(x, q, k, v, o, heads=heads, kv_heads=kv)

    def summed(shift: int) -> np.ndarray:
        total = np.zeros_like(whole)
        for rank in ranks(world_size, heads, 64, kv=kv):
            (start, end), (first, last) = rank.head_range(), rank.kv_head_range()
            own = slice(start * dim, end * dim)
            heads_of = np.arange(first, last)
            columns = [(c + shift) % kv * dim + d for c in heads_of for d in range(dim)]
            total += attend(
                x, q[:, own], k[:, columns], v[:, columns], o[own],
                heads=end - start, kv_heads=last - first,
            )  # fmt: skip
        return total

    np.testing.assert_allclose(summed(0), whole, atol=1e-9)
    # Negative control: the wrong KV heads are noticed.
    assert np.abs(summed(1) - whole).max() > 1e-3


@pytest.mark.parametrize(
    ("world_size", "heads", "ffn", "kv", "numbers"),
    [
        (8, 6, 100, 2, "6 heads.*tp of 8"),
        (4, 8, 3, 2, "3 MLP columns.*tp of 4"),
        (2, 9, 64, 2, "9 heads.*2 KV heads"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_the_numbers(
    world_size, heads, ffn, kv, numbers
) -> None:
    with pytest.raises(ConfigError, match=numbers):
        ranks(world_size, heads, ffn, kv=kv)


@pytest.mark.parametrize("arguments", [(0, 0), (2, 2), (2, -1)])
def test_ranks_that_are_not_there_are_refused(arguments) -> None:
    with pytest.raises(ConfigError, match=re.escape(str(arguments[0]))):
        TensorParallel(*arguments)


def test_ranges_need_a_configuration() -> None:
    for call in (TensorParallel(2, 0).head_range, TensorParallel(2, 0).kv_head_range):
        with pytest.raises(ConfigError, match="configure"):
            call()
    with pytest.raises(ConfigError, match="multiple of the unit 64"):
        TensorParallel(2, 0).column_split((8, 100), unit=64)


def test_columns_that_stay_together() -> None:
    parts = [TensorParallel(2, r).column_split((576, 9 * 64), unit=64) for r in range(2)]
    assert parts == [(576, 320), (576, 256)]


def test_volume_is_what_the_algorithm_moves() -> None:
    four = TensorParallel(4, 0)
    # [1, 4096] in 2 bytes is 8 KiB: whole to three others. [4096, 4096]: in parts.
    assert four.all_reduce_volume_mb(4096, 1, 2) == pytest.approx(3 * 8192 / 1e6)
    assert four.all_reduce_volume_mb(4096, 4096, 2) == pytest.approx(2 * 3 / 4 * 2 * 4096**2 / 1e6)
    assert four.all_reduce_volume_mb(4096, 1, 2, algorithm="ring") == pytest.approx(
        1.5 * 8192 / 1e6
    )
    assert TensorParallel(1, 0).all_reduce_volume_mb(4096, 4096, 2) == 0
    # 128 KiB: two ranks send it whole, four would send 384 KiB.
    assert TensorParallel(2, 0).all_reduce_volume_mb(4096, 16, 2) == pytest.approx(2**17 / 1e6)
    assert four.all_reduce_volume_mb(4096, 16, 2) == pytest.approx(2 * 3 / 4 * 2**17 / 1e6)
    assert DIRECT_BYTES == DEFAULT_DIRECT_BYTES


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_every_head_and_column_has_one_rank(data) -> None:
    kv = data.draw(st.integers(1, 8))
    per_group = data.draw(st.integers(1, 8))
    world_size = data.draw(st.integers(1, 8))
    if world_size > kv:
        world_size = min(world_size, kv * per_group)
    weights = data.draw(st.lists(st.integers(1, 50), min_size=world_size, max_size=world_size))
    parts = ranks(world_size, kv * per_group, 64, kv=kv, weights=weights)
    heads = [h for r in parts for h in range(*r.head_range())]
    assert heads == list(range(kv * per_group))
    assert [c for r in parts for c in range(*r.ffn_range())] == list(range(64))
    for rank in parts:
        start, end = rank.head_range()
        first, last = rank.kv_head_range()
        assert start < end
        assert first == start // per_group
        assert last == (end - 1) // per_group + 1
        if world_size <= kv:
            assert start % per_group == end % per_group == 0
