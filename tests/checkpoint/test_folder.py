import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stagemesh.checkpoint.folder import read_model_folder
from stagemesh.errors import CheckpointError
from stagemesh.model_spec import load_model_spec
from stagemesh.models.weights import WeightReader
from tests.checkpoint.limits import cheap
from tests.support.checkpoints import write_tiny_checkpoint

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def all_weights(folder: Path) -> dict[str, torch.Tensor]:
    spec = load_model_spec(folder)
    reader = WeightReader(spec)
    return {name: reader.read(info, torch.float32) for name, info in spec.tensors.items()}


def edit_index(folder: Path, change: Callable[[dict[str, str]], dict[str, str]]) -> None:
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({"weight_map": change(index["weight_map"])}))


def test_shards_hold_what_one_file_holds(tmp_path: Path) -> None:
    one = all_weights(write_tiny_checkpoint(tmp_path / "one"))
    two = all_weights(write_tiny_checkpoint(tmp_path / "two", sharded=True))
    other = all_weights(write_tiny_checkpoint(tmp_path / "other", seed=1))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one[Q_PROJ], other[Q_PROJ])


def test_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "m", sharded=True)
    (folder / SECOND).unlink()
    with pytest.raises(CheckpointError, match=SECOND):
        load_model_spec(folder)


def test_truncated_shard_names_file_and_sizes(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "m", sharded=True)
    raw = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes(raw[:-16])
    with pytest.raises(CheckpointError, match=rf"{SECOND}.*{len(raw)}.*{len(raw) - 16}"):
        load_model_spec(folder)
    (folder / SECOND).write_bytes(raw[:100])
    with pytest.raises(CheckpointError, match=rf"{SECOND}.*100"):
        load_model_spec(folder)


def test_shard_truncated_after_the_spec_was_read(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "m")
    spec = load_model_spec(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-16])
    last = max(spec.tensors.values(), key=lambda info: info.offset)
    end = last.offset + last.num_bytes
    with pytest.raises(CheckpointError, match=rf"model\.safetensors.*{end}.*{end - 16}"):
        WeightReader(spec).read(last, torch.float32)


def test_appended_bytes_leave_the_values_exact(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "m")
    clean = all_weights(folder)
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"\xff" * 8)
    appended = all_weights(folder)
    assert all(torch.equal(clean[name], appended[name]) for name in clean)


@pytest.mark.parametrize("sharded", [False, True])
def test_stray_file_is_not_read(tmp_path: Path, *, sharded: bool) -> None:
    folder = write_tiny_checkpoint(tmp_path / "m", sharded=sharded)
    clean = all_weights(folder)
    table = torch.full_like(clean["model.embed_tokens.weight"], 7.0)
    save_file({"model.embed_tokens.weight": table}, folder / "other.safetensors")
    stray = all_weights(folder)
    assert all(torch.equal(clean[name], stray[name]) for name in clean)


def test_stale_index_of_an_earlier_sharding(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "m")
    stale = write_tiny_checkpoint(tmp_path / "s", sharded=True) / INDEX
    (folder / INDEX).write_bytes(stale.read_bytes())
    with pytest.raises(CheckpointError, match=rf"{FIRST}.*not in the folder.*model\.safetensors"):
        load_model_spec(folder)


def test_tensor_that_is_not_where_the_index_says(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "m", sharded=True)
    edit_index(folder, lambda weight_map: weight_map | {Q_PROJ: SECOND})
    with pytest.raises(CheckpointError, match=rf"{Q_PROJ} is in {SECOND}, which does not hold it"):
        load_model_spec(folder)


@pytest.mark.parametrize(
    "entry",
    [
        "../secret.safetensors",
        "a/../../secret.safetensors",
        "sub/secret.safetensors",
        "..",
        "",
        ".\\secret.safetensors",
        "config.json",
        "nul\0.safetensors",
        7,
        None,
        ["a.safetensors"],
    ],
)
def test_index_entry_that_is_no_plain_name_is_refused(tmp_path: Path, entry: object) -> None:
    folder = write_tiny_checkpoint(tmp_path / "m", sharded=True)
    save_file({Q_PROJ: torch.zeros(32, 32)}, tmp_path / "secret.safetensors")
    (folder / "a").mkdir()
    edit_index(folder, lambda weight_map: weight_map | {Q_PROJ: entry})  # type: ignore[dict-item]
    with pytest.raises(CheckpointError, match=f"entry '{Q_PROJ}'.*not the plain name"):
        load_model_spec(folder)


def test_absolute_index_entry_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "m", sharded=True)
    secret = tmp_path / "secret.safetensors"
    save_file({Q_PROJ: torch.zeros(32, 32)}, secret)
    edit_index(folder, lambda weight_map: weight_map | {Q_PROJ: str(secret)})
    with pytest.raises(CheckpointError, match="not the plain name"):
        load_model_spec(folder)


def test_symlinks_to_blobs_outside_are_followed(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "m", sharded=True)
    clean = all_weights(folder)
    (folder / FIRST).rename(tmp_path / "blob")
    (folder / FIRST).symlink_to(tmp_path / "blob")
    linked = all_weights(folder)
    assert all(torch.equal(clean[name], linked[name]) for name in clean)


def test_symlink_to_something_else_is_refused_by_its_header(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "m", sharded=True)
    (tmp_path / "secret").write_text("user:password:and more of it")
    (folder / FIRST).unlink()
    (folder / FIRST).symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=FIRST) as caught:
        load_model_spec(folder)
    assert "password" not in str(caught.value)


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


def test_pickled_weights_are_refused_unopened(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    pwned = tmp_path / "pwned"
    raw = pickle.dumps(Evil(pwned))
    (folder / "pytorch_model.bin").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*convert to safetensors"):
        load_model_spec(folder)
    assert not pwned.exists()
    pickle.loads(raw)  # the control: this pickle does create the file
    assert pwned.exists()


def test_metadata_only_file_is_missing_keys(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "m")
    save_file({}, folder / "model.safetensors", metadata={"format": "pt"})
    assert read_model_folder(folder).tensors == {}
    with pytest.raises(CheckpointError, match=r"missing keys.*embed_tokens"):
        load_model_spec(folder)


BAD_JSON = {
    "no JSON": b"{",
    "no object": b"[]",
    "nested without end": b"[" * 100_000,
    "not UTF-8": b'{"\xff": 1}',
}


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
@pytest.mark.parametrize("case", BAD_JSON)
def test_bad_json_is_named(tmp_path: Path, name: str, case: str) -> None:
    folder = write_tiny_checkpoint(tmp_path / "m", sharded=True)
    (folder / name).write_bytes(BAD_JSON[case])
    with cheap(), pytest.raises(CheckpointError, match=name):
        load_model_spec(folder)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no config.json"),
        ({"x.gguf": "GGUF"}, r"x\.gguf: give the path of that file"),
        ({"config.json": "{}"}, r"neither .*index\.json nor model\.safetensors"),
        ({"config.json": "{}", "a.safetensors": ""}, r"a\.safetensors, which nothing names"),
        ({"config.json": "{}", INDEX: "{}"}, "weight_map"),
    ],
)
def test_folder_that_is_no_model(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        load_model_spec(tmp_path)
