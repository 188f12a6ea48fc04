"""A model that travels without its data is the same model; hashes are remembered, never stale."""

import dataclasses
import hashlib
from pathlib import Path

import pytest

from stagemesh.checkpoint.tensor_info import TensorInfo, read_data
from stagemesh.checkpoint.weight_part import WeightBlock, WeightPart
from stagemesh.errors import CheckpointError, ProtocolError
from stagemesh.model_spec import ModelSpec, load_model_spec
from stagemesh.rpc.v1 import weights_pb2
from stagemesh.weight_transfer.content_hash import HashBook
from stagemesh.weight_transfer.manifest import ModelAssembler, model_parts, relocated
from tests.support.checkpoints import write_tiny_checkpoint, write_tiny_gguf
from tests.support.weight_parts import data_of

KINDS = {
    "safetensors": lambda folder: write_tiny_checkpoint(folder, "qwen2"),
    "sharded": lambda folder: write_tiny_checkpoint(folder, sharded=True),
    "tied": lambda folder: write_tiny_checkpoint(folder, tie_word_embeddings=True),
    "gguf with rows in another order": lambda folder: write_tiny_gguf(
        folder, matrix_type="Q8_0", rope_freqs=[1.0, 2.0, 3.0, 4.0]
    ),
}


def travelled(spec: ModelSpec, where: Path) -> ModelSpec:
    assembler = ModelAssembler(where=where)
    for part in model_parts(spec):
        assembler.add(weights_pb2.ModelPart.FromString(part.SerializeToString()))
    return assembler.spec()


def at_x(info: TensorInfo) -> TensorInfo:
    return dataclasses.replace(info, file=Path("/x"), offset=0)


@pytest.mark.parametrize("kind", KINDS)
def test_all_but_the_place_of_the_data_arrives(tmp_path: Path, kind: str) -> None:
    spec = load_model_spec(KINDS[kind](tmp_path / "m"))
    found = travelled(spec, tmp_path)
    for field in dataclasses.fields(spec):
        if field.name in ("path", "tensors", "groups", "gguf_metadata"):
            continue
        assert getattr(found, field.name) == getattr(spec, field.name), field.name
    placed = relocated(found, at_x)
    expected = relocated(spec, at_x)
    assert (placed.tensors, placed.groups) == (expected.tensors, expected.groups)
    for start, end in ((0, 2), (2, 4), (0, 4)):
        assert placed.tensors_for_stage(start, end) == expected.tensors_for_stage(start, end)
    kept = [key for key in spec.gguf_metadata or {} if not key.startswith("tokenizer.")]
    assert list(found.gguf_metadata or {}) == kept


@pytest.mark.parametrize("damage", ["json", "layer", "embedding"])
def test_a_description_that_lacks_something_is_refused(tmp_path: Path, damage: str) -> None:
    spec = load_model_spec(write_tiny_checkpoint(tmp_path / "m"))
    assembler = ModelAssembler(where=tmp_path)
    for part in model_parts(spec):
        if damage == "json":
            part.spec_json = part.spec_json[1:]
        kept = [
            entry
            for entry in part.tensors
            if not (damage == "layer" and entry.layer == 2)
            and not (damage == "embedding" and "embed" in entry.name)
        ]
        del part.tensors[:]
        part.tensors.extend(kept)
        assembler.add(part)
    with pytest.raises(ProtocolError, match="same version"):
        assembler.spec()


def test_hashes_are_those_of_the_data_and_read_once(tmp_path: Path) -> None:
    spec = load_model_spec(write_tiny_checkpoint(tmp_path / "m"))
    infos = list(spec.tensors.values())
    book = HashBook(tmp_path / "book")
    for info in infos:
        expected = hashlib.blake2b(read_data(info), digest_size=32).digest()
        assert book.look_up(info).content_hash == expected
    again = HashBook(tmp_path / "book")
    assert [again.look_up(i) for i in infos] == [book.look_up(i) for i in infos]
    assert again.hashed_bytes == 0
    # Negative control: without a folder, all is read again.
    alone = HashBook(None)
    for info in infos:
        alone.look_up(info)
    assert alone.hashed_bytes == book.hashed_bytes == sum(info.num_bytes for info in infos)


def test_parts_are_hashed_by_themselves_and_remembered_beside_the_whole(tmp_path: Path) -> None:
    spec = load_model_spec(write_tiny_checkpoint(tmp_path / "m"))
    info = spec.groups.embedding
    row_bytes = info.num_bytes // info.shape[0]
    parts = [
        WeightPart(row_bytes, (WeightBlock(3, 9, 0, row_bytes),)),
        WeightPart(row_bytes, (WeightBlock(0, 50, 8, 24), WeightBlock(60, 61, 0, 4))),
    ]
    book = HashBook(tmp_path / "book")
    for part in parts:
        found = book.look_up(info, part)
        assert found.content_hash == hashlib.blake2b(data_of(info, part), digest_size=32).digest()
        assert found.whole_hash is None
    whole = book.look_up(info)
    again = HashBook(tmp_path / "book")
    for part in parts:
        assert again.look_up(info, part).whole_hash == whole.content_hash
        assert again.look_up(info, part).content_hash == book.look_up(info, part).content_hash
    assert again.hashed_bytes == 0
    assert book.hashed_bytes == info.num_bytes + sum(part.num_bytes for part in parts)


def test_a_file_that_was_written_to_is_hashed_anew(tmp_path: Path) -> None:
    spec = load_model_spec(write_tiny_checkpoint(tmp_path / "m"))
    info = spec.groups.embedding
    before = HashBook(tmp_path / "book").look_up(info)
    with info.file.open("r+b") as file:
        file.seek(info.offset)
        file.write(b"\x01\x02\x03\x04")
    after = HashBook(tmp_path / "book").look_up(info)
    assert after.content_hash == hashlib.blake2b(read_data(info), digest_size=32).digest()
    assert after.content_hash != before.content_hash


def test_a_torn_or_foreign_page_counts_for_nothing(tmp_path: Path) -> None:
    spec = load_model_spec(write_tiny_checkpoint(tmp_path / "m"))
    info = spec.groups.embedding
    expected = HashBook(tmp_path / "book").look_up(info)
    (page,) = (tmp_path / "book").iterdir()
    page.write_text(page.read_text()[:-10])
    assert HashBook(tmp_path / "book").look_up(info) == expected
    again = HashBook(tmp_path / "book")
    assert again.look_up(info) == expected
    assert again.hashed_bytes == 0  # what was added behind the torn line counts
    page.write_bytes(b"\xff\xfe nonsense")
    assert HashBook(tmp_path / "book").look_up(info) == expected
    info.file.unlink()
    with pytest.raises(CheckpointError, match="cannot be opened"):
        HashBook(tmp_path / "book").look_up(info)
