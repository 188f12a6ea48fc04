import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from stagemesh.checkpoint.gguf_header import read_gguf_header
from stagemesh.checkpoint.resolve import resolve_model
from stagemesh.errors import CheckpointError, UnsupportedModel
from tests.checkpoint.limits import cheap

U8, U32, BOOL, STRING, ARRAY = 0, 4, 7, 8, 9


def u32(number: int) -> bytes:
    return struct.pack("<I", number)


def u64(number: int) -> bytes:
    return struct.pack("<Q", number)


def text(value: str) -> bytes:
    return u64(len(value)) + value.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + u32(kind) + value


def tensor(name: str, dims: list[int], *, kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + u32(len(dims)) + b"".join(map(u64, dims)) + u32(kind) + u64(offset)


def build(
    *,
    keys: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: bytes = b"",
    version: int = 3,
    num_tensors: int | None = None,
    num_keys: int | None = None,
) -> bytes:
    head = b"GGUF" + u32(version)
    head += u64(len(tensors) if num_tensors is None else num_tensors)
    head += u64(len(keys) if num_keys is None else num_keys)
    head += b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


NESTED = b"".join(u32(ARRAY) + u64(1) for _ in range(10_000))
GOOD = build(keys=(key("a", U32, u32(5)),), tensors=(tensor("t", [4]),), data=bytes(16))

HOSTILE = {
    "n_dims": (build(tensors=(text("t") + u32(0xFFFFFFFF) + bytes(64),)), "n_dims of tensor 't'"),
    "key length": (build(keys=(u64(2**62) + bytes(64),)), "key 0"),
    "string length": (build(keys=(key("a", STRING, u64(2**62)),)), "a: needs"),
    "alignment 0": (build(keys=(key("general.alignment", U32, u32(0)),)), "general.alignment"),
    "alignment 2**30": (
        build(keys=(key("general.alignment", U32, u32(2**30)),)),
        "general.alignment",
    ),
    "alignment 24": (build(keys=(key("general.alignment", U32, u32(24)),)), "general.alignment"),
    "alignment is text": (
        build(keys=(key("general.alignment", STRING, text("32")),)),
        "general.alignment",
    ),
    "tensor count": (build(num_tensors=2**60), "tensor count"),
    "key count": (build(num_keys=2**64 - 1), "key count"),
    "key count over the file": (build(num_keys=9, data=bytes(128)), "appears twice"),
    "nested arrays": (build(keys=(key("deep", ARRAY, NESTED),)), "deep: arrays nest"),
    "array length": (build(keys=(key("a", ARRAY, u32(U32) + u64(2**62)),)), "length of a"),
    "string array length": (build(keys=(key("a", ARRAY, u32(STRING) + u64(2**61)),)), "of a"),
    "string inside an array": (
        build(keys=(key("a", ARRAY, u32(STRING) + u64(1) + u64(2**62)),)),
        r"length of a\[0\]",
    ),
    "value type": (build(keys=(key("a", 99, bytes(8)),)), "a: unknown value type 99"),
    "item type": (build(keys=(key("a", ARRAY, u32(77) + u64(1)),)), "a: unknown value type 77"),
    "bool of 2": (build(keys=(key("a", BOOL, b"\2"),)), "a: a bool"),
    "key is not UTF-8": (build(keys=(u64(1) + b"\xff" + u32(U8) + b"\0",)), "key 0"),
    "key twice": (build(keys=(key("a", U8, b"\0"), key("a", U8, b"\0"))), "a: the key appears"),
    "dims overflow": (build(tensors=(tensor("t", [2**32 + 1, 2**32]),)), "dims of tensor 't'"),
    "one huge dim": (build(tensors=(tensor("t", [2**64 - 1]),)), "dims of tensor 't'"),
    "huge and zero": (build(tensors=(tensor("t", [2**64 - 1, 0]),)), "dims of tensor 't'"),
    "dims past the file": (build(tensors=(tensor("t", [2**40]),)), "offset of tensor 't'"),
    "offset past the end": (
        build(tensors=(tensor("t", [4], offset=2**40),), data=bytes(16)),
        "offset of tensor 't'",
    ),
    "offset wraps": (build(tensors=(tensor("t", [4], offset=2**64 - 32),)), "offset of tensor"),
    "offset not aligned": (
        build(tensors=(tensor("t", [4], offset=4),), data=bytes(64)),
        "multiple of general.alignment",
    ),
    "overlap": (build(tensors=(tensor("t", [8]), tensor("u", [8])), data=bytes(64)), "overlaps"),
    "tensor twice": (build(tensors=(tensor("t", [0]), tensor("t", [0]))), "appears twice"),
    "rows of half a block": (build(tensors=(tensor("t", [48], kind=2),)), "blocks of 32"),
    "not a GGUF file": (b"PK\3\4" + bytes(60), "magic"),
    "empty": (b"", "magic"),
    "only the magic": (b"GGUF", "version"),
    "data cut off": (GOOD[:-1], rf"at least {len(GOOD)} bytes, the file has {len(GOOD) - 1}"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_file_is_refused_cheaply(tmp_path: Path, case: str) -> None:
    raw, message = HOSTILE[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    with cheap(), pytest.raises(CheckpointError, match=message) as caught:
        read_gguf_header(path)
    assert "bad.gguf" in str(caught.value)


def test_control_the_good_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "good.gguf"
    path.write_bytes(GOOD)
    header = read_gguf_header(path)
    assert header.metadata == {"a": 5}
    assert [(info.name, info.shape, info.num_bytes) for info in header.tensors] == [("t", (4,), 16)]


def test_every_truncation_is_a_named_error(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    for size in range(len(GOOD)):
        path.write_bytes(GOOD[:size])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            read_gguf_header(path)


UNSUPPORTED = {
    "version 1": (build(version=1), "version 1"),
    "version 4": (build(version=4), "version 4"),
    "big-endian": (build(version=3 << 24), "big-endian"),
    "split": (build(keys=(key("split.count", U32, u32(2)),)), r"split\.count"),
    "tensor type": (build(tensors=(tensor("t", [4], kind=250),)), "'t'.*250"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported_file_is_named(tmp_path: Path, case: str) -> None:
    raw, message = UNSUPPORTED[case]
    path = tmp_path / "odd.gguf"
    path.write_bytes(raw)
    with pytest.raises(UnsupportedModel, match=message):
        read_gguf_header(path)


def test_agrees_with_gguf_py_on_every_value_type(tmp_path: Path) -> None:
    path = tmp_path / "w.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -128)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -32768)
    writer.add_int32("i32", -(2**31))
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -(2**63))
    writer.add_float32("f32", 1.5)
    writer.add_float64("f64", 1e300)
    writer.add_bool("yes", True)
    writer.add_string("text", "\u00e9\u4e2d")
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("floats", [0.5, -0.25])
    writer.add_array("bools", [True, False])
    writer.add_array("strings", ["a", "", "\u00e9"])
    writer.add_tensor("m", np.ones((3, 64), dtype=np.float32))
    quantised = gguf.quants.quantize(np.ones((3, 64), dtype=np.float32), Q8_0)
    writer.add_tensor("q", quantised, raw_dtype=Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert_same_as_gguf_py(path)


Q8_0 = gguf.GGMLQuantizationType.Q8_0


def assert_same_as_gguf_py(path: Path) -> None:
    ours, theirs = read_gguf_header(path), gguf.GGUFReader(path)
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata == fields
    assert [
        (info.name, info.shape[::-1], info.offset, info.num_bytes, info.encoding)
        for info in ours.tensors
    ] == [
        (t.name, tuple(map(int, t.shape)), t.data_offset, t.n_bytes, t.tensor_type.name)
        for t in theirs.tensors
    ]


def test_sample_model_is_read_fast_and_right() -> None:
    path = resolve_model("smollm2-135m-instruct")
    start = time.process_time()
    header = read_gguf_header(path)
    assert time.process_time() - start < 1.0
    assert len(header.metadata["tokenizer.ggml.tokens"]) == 49152
    assert len(header.metadata["tokenizer.ggml.merges"]) == 48900
    assert header.metadata["tokenizer.ggml.tokens"][:3] == [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
    ]
    assert header.metadata["llama.rope.freq_base"] == 100_000.0
    assert len(header.tensors) == 272
    assert header.tensors[0].shape == (49152, 576)
