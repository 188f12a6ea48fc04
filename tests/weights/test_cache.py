"""The cache at a node: whole or not there, shared by processes, bounded, and wrong never."""

import hashlib
import os
import stat
from pathlib import Path

import pytest

from node.weight_cache import WeightCache
from stagemesh.errors import CapacityExceeded, ConfigError


def hash_of(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()


def put(cache: WeightCache, data: bytes) -> bytes:
    digest = hash_of(data)
    with cache.reserve({digest: len(data)}, what="m"):
        partials = cache.partials()
        assert partials.open(digest, len(data)) == 0
        partials.write(digest, data)
        assert partials.finish(digest)
        partials.close()
    return digest


def data(letter: str, num_bytes: int = 1000) -> bytes:
    return letter.encode() * num_bytes


def test_a_tensor_is_whole_or_not_there_and_ours_alone(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path / "c")
    digest = put(cache, data("a"))
    assert cache.has(digest, 1000)
    found = cache.find(digest)
    assert found is not None
    assert found.path.read_bytes() == data("a")
    for path in [tmp_path / "c", *(tmp_path / "c").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    assert not cache.has(hash_of(b"other"), 5)


def test_half_a_tensor_is_gone_on_with_by_whoever_comes(tmp_path: Path) -> None:
    first, second = WeightCache(tmp_path / "c"), WeightCache(tmp_path / "c")
    digest = hash_of(data("a"))
    with first.reserve({digest: 1000}, what="m"):
        writer = first.partials()
        assert writer.open(digest, 1000) == 0
        writer.write(digest, data("a", 400))
        other = second.partials()
        assert other.open(digest, 1000) is None  # somebody writes it
        assert second.partial_bytes(digest) == 400
        assert first.find(digest) is None
        writer.close()
        assert other.open(digest, 1000) == 400
        other.write(digest, data("a", 600))
        assert other.finish(digest)
        assert writer.open(digest, 1000) is None  # closed for good
        assert first.has(digest, 1000)


def test_wrong_content_never_becomes_a_tensor(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path / "c")
    digest = hash_of(data("a"))
    with cache.reserve({digest: 1000}, what="m"):
        partials = cache.partials()
        partials.open(digest, 1000)
        partials.write(digest, data("b"))
        assert not partials.finish(digest)
        assert not cache.has(digest, 1000)
        partials.write(digest, data("a"))  # it was emptied
        assert partials.finish(digest)


@pytest.mark.parametrize("damage", ["changed", "short", "touched"])
def test_damage_is_found_and_what_was_only_touched_is_kept(tmp_path: Path, damage: str) -> None:
    cache = WeightCache(tmp_path / "c")
    digest = put(cache, data("a"))
    path = cache.blob_path(digest)
    if damage == "short":
        os.truncate(path, 999)
    else:
        with path.open("r+b") as file:
            file.write(b"b" if damage == "changed" else b"a")
    assert cache.find(digest) is None  # not to be sent before somebody has looked
    assert cache.has(digest, 1000) is (damage == "touched")
    assert path.exists() is (damage == "touched")
    assert (cache.find(digest) is not None) is (damage == "touched")


def test_the_longest_unused_goes_first_and_nothing_in_use(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path / "c", limit_bytes=3000)
    a, b, c = (put(cache, data(letter)) for letter in "abc")
    for age, digest in enumerate((c, a, b)):
        path = cache.blob_path(digest)
        os.utime(path, ns=(10**9 * (100 + age), path.stat().st_mtime_ns))
    with cache.reserve({c: 1000}, what="m"):  # in use: a is the next
        d = put(cache, data("d"))
        assert [cache.has(x, 1000) for x in (a, b, c, d)] == [False, True, True, True]
        with cache.reserve({b: 1000, d: 1000}, what="m"), pytest.raises(CapacityExceeded) as full:
            cache.reserve({hash_of(data("e")): 1000}, what="model x")
    assert all(word in str(full.value) for word in ("model x", "--cache-limit", "in use"))
    put(cache, data("e"))  # negative control: nobody uses them any more


def test_a_dead_process_uses_nothing(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path / "c", limit_bytes=1000)
    digest = put(cache, data("a"))
    (tmp_path / "c" / "uses" / "left").write_text(f'{{"{digest.hex()}": 1000}}')
    put(cache, data("b"))
    assert not cache.has(digest, 1000)
    assert list((tmp_path / "c" / "uses").iterdir()) == []


def test_room_on_the_disk_is_checked_first_and_nothing_is_thrown_away_for_nothing(
    tmp_path: Path,
) -> None:
    free = 5000
    cache = WeightCache(tmp_path / "c", free_bytes=lambda _: free)
    old = put(cache, data("a"))
    with pytest.raises(CapacityExceeded) as full:
        cache.reserve({hash_of(b"x"): 10_000}, what="model x")
    words = ("model x needs 9.766 KiB", str(tmp_path / "c"), "--cache-dir", "free")
    assert all(word in str(full.value) for word in words), str(full.value)
    assert cache.has(old, 1000)
    cache.reserve({hash_of(b"x"): 5500}, what="model x").close()  # with the room of the old one
    assert not cache.has(old, 1000)


def test_what_others_were_promised_is_not_free(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path / "c", free_bytes=lambda _: 5000)
    with cache.reserve({hash_of(b"x"): 4000}, what="x"):
        with pytest.raises(CapacityExceeded):
            cache.reserve({hash_of(b"y"): 2000}, what="y")
        cache.reserve({hash_of(b"x"): 4000}, what="x").close()  # the same tensor needs no second


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir(mode=0o700)
    (tmp_path / "c").chmod(0o777)
    with pytest.raises(ConfigError, match="chmod 700"):
        WeightCache(tmp_path / "c").reserve({}, what="m")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--cache-dir"):
        WeightCache(tmp_path / "file").reserve({}, what="m")
