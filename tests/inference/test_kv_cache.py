"""The KV cache: growth, bound, trimming, and accounts that go back to zero."""

import dataclasses

import pytest
import torch

from stagemesh.errors import CapacityExceeded, ProtocolError
from stagemesh.inference.kv_cache import KVCache, KVLayout
from stagemesh.models.kv_shape import KVShape

LAYOUT = KVLayout(
    num_layers=2, num_kv_heads=2, head_dim=4, dtype=torch.float32, device=torch.device("cpu")
)
TOKEN = 2 * 2 * 2 * 4 * 4


def cache_of(tokens: int, *, block_tokens: int = 4) -> KVCache:
    return KVCache(LAYOUT, limit_bytes=tokens * TOKEN, block_tokens=block_tokens)


def grow(cache: KVCache, session_id: int, count: int) -> None:
    """Reserve and commit `count` tokens."""
    session = cache._sessions.get(session_id)
    start = 0 if session is None else session.length
    session = cache.reserve(session_id, start_position=start, num_tokens=count)
    session.length = start + count


def held_bytes(cache: KVCache) -> int:
    """What the sessions' tensors really hold."""
    return sum(s._block.numel() * s._block.element_size() for s in cache._sessions.values())


def test_bytes_per_token() -> None:
    assert LAYOUT.bytes_per_token == TOKEN


@pytest.mark.parametrize("chunks", [[1] * 30, [30], [3, 7, 20], [16, 1, 1, 12]])
def test_a_session_keeps_its_tokens_while_it_grows(chunks: list[int]) -> None:
    cache = cache_of(100)
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(2, 2, 2, sum(chunks), 4, generator=generator)
    start = 0
    for count in chunks:
        session = cache.reserve(7, start_position=start, num_tokens=count)
        stop = start + count
        for layer in range(2):
            session.keys[layer][:, start:stop] = truth[layer, 0, :, start:stop]
            session.values[layer][:, start:stop] = truth[layer, 1, :, start:stop]
        start += count
        session.length = start
        assert cache.used_bytes == held_bytes(cache) <= cache.limit_bytes
    for layer in range(2):
        torch.testing.assert_close(session.keys[layer][:, :start], truth[layer, 0], rtol=0, atol=0)
        torch.testing.assert_close(
            session.values[layer][:, :start], truth[layer, 1], rtol=0, atol=0
        )


def test_growth_copies_seldom() -> None:
    cache = cache_of(10_000)
    capacities = set()
    for _ in range(2000):
        grow(cache, 1, 1)
        capacities.add(cache._sessions[1].capacity)
    assert len(capacities) <= 12


def test_one_session_may_take_the_whole_cache_and_not_a_token_more() -> None:
    cache = cache_of(10)
    grow(cache, 1, 10)
    assert cache.used_bytes == cache.limit_bytes
    with pytest.raises(CapacityExceeded, match="session 1 room for 11 tokens"):
        cache.reserve(1, start_position=10, num_tokens=1)
    with pytest.raises(CapacityExceeded, match="session 2"):
        cache.reserve(2, start_position=0, num_tokens=1)
    assert cache.num_sessions == 1
    assert cache.used_bytes == held_bytes(cache)


def test_room_taken_in_advance_goes_back_before_anyone_is_refused() -> None:
    cache = cache_of(16)
    grow(cache, 1, 5)  # holds 8
    grow(cache, 2, 5)  # holds 8
    assert cache.used_bytes == 16 * TOKEN
    grow(cache, 3, 6)
    assert cache.used_bytes == held_bytes(cache) == 16 * TOKEN
    with pytest.raises(CapacityExceeded):
        cache.reserve(4, start_position=0, num_tokens=1)
    assert [cache._sessions[i].length for i in (1, 2, 3)] == [5, 5, 6]


def test_trimming_keeps_what_the_running_step_has_reserved() -> None:
    cache = cache_of(16)
    grow(cache, 1, 3)
    running = cache.reserve(1, start_position=3, num_tokens=4)
    other = cache.reserve(2, start_position=0, num_tokens=9)
    assert running.capacity >= 7
    assert other.capacity >= 9
    assert cache.used_bytes == held_bytes(cache) <= cache.limit_bytes


@pytest.mark.parametrize("start", [0, 4, 6, 100])
def test_a_segment_that_does_not_go_on_where_the_session_ends_is_refused(start: int) -> None:
    cache = cache_of(100)
    grow(cache, 1, 5)
    with pytest.raises(ProtocolError, match=rf"holds 5 tokens here.* position {start}"):
        cache.reserve(1, start_position=start, num_tokens=1)
    with pytest.raises(ProtocolError, match="session 2 holds 0 tokens here"):
        cache.reserve(2, start_position=5, num_tokens=1)
    assert cache.num_sessions == 1


def test_the_accounts_go_back_to_zero() -> None:
    cache = cache_of(1000)
    for round_ in range(5):
        for session_id in range(10):
            grow(cache, session_id, 1 + session_id + round_)
    assert cache.num_sessions == 10
    for session_id in range(10):
        cache.release(session_id)
    cache.release(3)
    cache.release(99)
    assert (cache.used_bytes, cache.num_sessions) == (0, 0)
    grow(cache, 3, 2)
    cache.clear()
    assert (cache.used_bytes, cache.num_sessions) == (0, 0)


def test_layers_of_different_shapes_keep_their_tokens_when_a_session_grows() -> None:
    shapes = (
        KVShape(num_heads=2, key_dim=6, value_dim=4),
        KVShape(num_heads=3, key_dim=2, value_dim=2),
    )
    layout = dataclasses.replace(LAYOUT, shapes=shapes)
    assert layout.bytes_per_token == (2 * 10 + 3 * 4) * 4
    cache = KVCache(layout, limit_bytes=64 * layout.bytes_per_token, block_tokens=4)
    session = cache.reserve(1, start_position=0, num_tokens=3)
    assert session.capacity == 4
    held = []
    for shape, keys, values in zip(shapes, session.keys, session.values, strict=True):
        assert keys.shape == (shape.num_heads, 4, shape.key_dim)
        assert values.shape == (shape.num_heads, 4, shape.value_dim)
        held.append((torch.randn(keys[:, :3].shape), torch.randn(values[:, :3].shape)))
        keys[:, :3], values[:, :3] = held[-1]
    session.length = 3
    session = cache.reserve(1, start_position=3, num_tokens=6)
    assert session.capacity >= 9
    for (first, second), keys, values in zip(held, session.keys, session.values, strict=True):
        assert torch.equal(keys[:, :3], first)
        assert torch.equal(values[:, :3], second)
    assert cache.used_bytes == session.capacity * layout.bytes_per_token
