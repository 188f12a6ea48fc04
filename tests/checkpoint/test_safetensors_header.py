import json
import logging
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from stagemesh.checkpoint.safetensors_header import read_safetensors_header
from stagemesh.errors import CheckpointError, UnsupportedModel
from tests.checkpoint.limits import cheap


def entry(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def write(path: Path, header: object, *, data: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def test_header_of_a_file_of_the_reference_writer(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.arange(5, dtype=np.int64),
        "empty": np.zeros((0, 4), dtype=np.float16),
        "scalar": np.array(7.0, dtype=np.float64),
    }
    save_file(arrays, path, metadata={"format": "pt"})
    header = read_safetensors_header(path)
    assert header.metadata == {"format": "pt"}
    assert header.num_file_bytes == path.stat().st_size
    raw = path.read_bytes()
    found = {info.name: info for info in header.tensors}
    assert set(found) == set(arrays)
    for name, array in arrays.items():
        info = found[name]
        assert info.shape == array.shape
        assert raw[info.offset : info.offset + info.num_bytes] == array.tobytes()


HOSTILE = {
    "length beyond any file": ({"header": b"{}", "length": 2**40}, "header length"),
    "length just beyond the file": ({"header": b"{}", "length": 3}, "at least 11 bytes"),
    "length over the limit": ({"header": b"{}", "length": 2**64 - 1}, "over the limit"),
    "not JSON": ({"header": b"{nope"}, "not valid JSON"),
    "not UTF-8": ({"header": b'{"\xff": 1}'}, "not valid JSON"),
    "nested without end": ({"header": b"[" * 200_000}, "not valid JSON"),
    "a number of 10000 digits": ({"header": b'{"a":' + b"9" * 10_000 + b"}"}, "not valid JSON"),
    "not an object": ({"header": [1, 2]}, "must be a JSON object"),
    "key twice": ({"header": b'{"a": 1, "a": 2}'}, "twice"),
    "metadata is no text": ({"header": {"__metadata__": {"a": 1}}}, "__metadata__"),
    "entry is no object": ({"header": {"a": 3}}, "'a'"),
    "size is not shape x dtype": (
        {"header": {"a": entry([2, 2], 0, 12)}, "data": bytes(16)},
        "'a'",
    ),
    "negative offset": ({"header": {"a": entry([1], -4, 0)}, "data": bytes(8)}, "data_offsets"),
    "end before start": ({"header": {"a": entry([1], 4, 0)}, "data": bytes(8)}, "span -4"),
    "negative dim": ({"header": {"a": entry([-1, -1], 0, 4)}, "data": bytes(4)}, "shape"),
    "bool as dim": ({"header": {"a": entry([True], 0, 4)}, "data": bytes(4)}, "shape"),
    "huge dims": ({"header": {"a": entry([2**62] * 8, 0, 4)}, "data": bytes(4)}, "needs"),
    "too many dims": ({"header": {"a": entry([1] * 1000, 0, 4)}, "data": bytes(4)}, "shape"),
    "past the end": ({"header": {"a": entry([4], 0, 16)}, "data": bytes(15)}, "truncated"),
    "far past the end": ({"header": {"a": entry([2**60], 0, 2**62)}}, "truncated"),
    "empty tensor past the end": ({"header": {"a": entry([0], 99, 99)}}, "truncated"),
    "overlap": (
        {"header": {"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, "data": bytes(12)},
        "'a' and 'b' overlap",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_header_is_refused_cheaply(tmp_path: Path, case: str) -> None:
    arguments, message = HOSTILE[case]
    path = write(tmp_path / "bad.safetensors", **arguments)  # type: ignore[arg-type]
    with cheap(), pytest.raises(CheckpointError, match=message) as caught:
        read_safetensors_header(path)
    assert "bad.safetensors" in str(caught.value)


def test_control_the_writer_of_the_hostile_cases_can_write_a_good_file(tmp_path: Path) -> None:
    header = {"a": entry([2], 0, 8), "b": entry([1], 8, 12)}
    path = write(tmp_path / "good.safetensors", header, data=bytes(12))
    assert [info.name for info in read_safetensors_header(path).tensors] == ["a", "b"]


@pytest.mark.parametrize("raw", [b"", b"\x01\x02", b"\x10" + bytes(7)])
def test_file_shorter_than_a_header(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "short.safetensors"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=rf"truncated.*{len(raw)}"):
        read_safetensors_header(path)


def test_metadata_only_is_zero_tensors(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", {"__metadata__": {"format": "pt"}})
    assert read_safetensors_header(path).tensors == ()


def test_unknown_element_type_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "t.safetensors", {"a.b": entry([2], 0, 1, "F4")}, data=b"x")
    with pytest.raises(UnsupportedModel, match=r"'a\.b'.*F4"):
        read_safetensors_header(path)


def test_truncated_file_names_both_sizes(tmp_path: Path) -> None:
    path = write(tmp_path / "t.safetensors", {"a": entry([8], 0, 32)}, data=bytes(32))
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-16])
    with pytest.raises(CheckpointError, match=rf"t\.safetensors.*{size} bytes.*{size - 16}"):
        read_safetensors_header(path)


def test_appended_bytes_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "t.safetensors", {"a": entry([2], 0, 8)}, data=bytes(8))
    with caplog.at_level(logging.WARNING):
        clean = read_safetensors_header(path)
        assert not caplog.records
        path.write_bytes(path.read_bytes() + bytes(8))
        appended = read_safetensors_header(path)
    assert appended.tensors == clean.tensors
    assert "8 bytes belong to no tensor" in caplog.text


def test_something_that_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "d.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_safetensors_header(tmp_path / "d.safetensors")
