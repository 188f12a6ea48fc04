"""Which heads, columns and words each rank has, and which sizes are refused."""

import pytest

from stagemesh.errors import ConfigError
from stagemesh.placement.tensor_shares import TensorShares


def divide(heads: int, kv_heads: int, tp: int, *, columns: int = 100, words: int = 50, **more):
    return TensorShares.divide(
        num_ranks=tp,
        num_heads=heads,
        num_kv_heads=kv_heads,
        mlp_columns=columns,
        vocab_size=words,
        **more,
    )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "query", "kv", "owned"),
    [
        (9, 3, 2, [(0, 6), (6, 9)], [(0, 2), (2, 3)], [(True, True), (True,)]),
        (
            *(8, 2, 4, [(0, 2), (2, 4), (4, 6), (6, 8)], [(0, 1), (0, 1), (1, 2), (1, 2)]),
            [(True,), (False,), (True,), (False,)],
        ),
        (
            *(6, 2, 4, [(0, 2), (2, 3), (3, 5), (5, 6)], [(0, 1), (0, 1), (1, 2), (1, 2)]),
            [(True,), (False,), (True,), (False,)],
        ),
        (
            4,
            4,
            3,
            [(0, 2), (2, 3), (3, 4)],
            [(0, 2), (2, 3), (3, 4)],
            [(True, True), (True,), (True,)],
        ),
        (4, 1, 3, [(0, 2), (2, 3), (3, 4)], [(0, 1)] * 3, [(True,), (False,), (False,)]),
        (5, 5, 1, [(0, 5)], [(0, 5)], [(True,) * 5]),
    ],
)
def test_heads(heads, kv_heads, tp, query, kv, owned) -> None:
    shares = divide(heads, kv_heads, tp)
    ranks = range(tp)
    assert [shares.query_range(rank) for rank in ranks] == query
    assert [shares.kv_range(rank) for rank in ranks] == kv
    assert [shares.owned_kv_heads(rank) for rank in ranks] == owned


def test_every_kv_head_is_owned_once() -> None:
    for heads, kv_heads in ((12, 2), (12, 3), (12, 12), (12, 1), (9, 3)):
        for tp in range(1, heads + 1):
            shares = divide(heads, kv_heads, tp)
            assert sum(sum(shares.owned_kv_heads(rank)) for rank in range(tp)) == kv_heads
            assert shares.num_heads == heads
            assert sum(shares.mlp_columns) == 100
            assert sum(shares.vocab_rows) == 50


def test_unequal_shares() -> None:
    shares = TensorShares.of_groups(
        kv_groups=(2, 1), mlp_columns=(1000, 536), num_heads=9, num_kv_heads=3, vocab_size=49152
    )
    assert (shares.query_heads, shares.num_ranks) == ((6, 3), 2)
    assert [shares.column_range(rank) for rank in (0, 1)] == [(0, 1000), (1000, 1536)]
    assert [shares.vocab_range(rank) for rank in (0, 1)] == [(0, 24576), (24576, 49152)]
    assert divide(9, 3, 2, weights=[1, 2]).query_heads == (3, 6)
    assert divide(9, 3, 2, weights=[1, 3]).mlp_columns == (25, 75)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: divide(4, 2, 5), "4 heads cannot be divided over tp of 5"),
        (lambda: divide(6, 4, 2), "6 heads cannot share 4 KV heads"),
        (lambda: divide(8, 8, 4, columns=3), "3 MLP columns cannot be divided over tp of 4"),
        (lambda: divide(8, 8, 4, words=3), "3 words cannot be divided over tp of 4"),
        (
            lambda: TensorShares(
                num_kv_heads=2, query_heads=(3, 5), mlp_columns=(1, 1), vocab_rows=(1, 1)
            ),
            r"tp of 2: query heads \[3, 8\) of rank 1 are neither whole groups of 4",
        ),
        (
            lambda: TensorShares(
                num_kv_heads=2, query_heads=(4, 4), mlp_columns=(1,), vocab_rows=(1, 1)
            ),
            r"mlp_columns must be one number >= 1 for each of 2 ranks, got \[1\]",
        ),
        (
            lambda: TensorShares(
                num_kv_heads=2, query_heads=(8, 0), mlp_columns=(1, 1), vocab_rows=(1, 1)
            ),
            "query_heads must be one number >= 1",
        ),
        (
            lambda: TensorShares.of_groups(
                kv_groups=(2, 2), mlp_columns=(1, 1), num_heads=9, num_kv_heads=3, vocab_size=9
            ),
            r"KV groups \[2, 2\] must add up to the 3 KV heads",
        ),
        (lambda: divide(4, 2, 2).query_range(2), r"rank must be in \[0, 2\), got 2"),
    ],
)
def test_sizes_that_cannot_be(call, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()
