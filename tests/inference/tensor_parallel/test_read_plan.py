"""A rank reads the bytes that are planned before, and no others.

That holds for the tiny checkpoint of every family, too: `test_family_table` lets ranks load from
their parts alone.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stagemesh.checkpoint.weight_part import WeightPart
from stagemesh.errors import CheckpointError, UnsupportedModel
from stagemesh.inference import attention
from stagemesh.inference.read_plan import NotingReader, plan_reads
from stagemesh.model_spec import ModelSpec, load_model_spec
from stagemesh.models.draft import draft_stage
from stagemesh.models.tensor_cut import TensorCut
from stagemesh.models.weights import WeightReader
from tests.support.checkpoints import tiny_model, write_tiny_checkpoint, write_tiny_gguf
from tests.support.gguf_files import write_gguf
from tests.support.tensor_stages import shares_of
from tests.support.weight_parts import keep_parts

CPU = torch.device("cpu")
# Each rank's part is whole blocks of the 4-bit layout.
SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 112,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_layers": 2}
KINDS = {
    "safetensors": lambda path: write_tiny_checkpoint(path, **SIZES),
    "tied": lambda path: write_tiny_checkpoint(path, tie_word_embeddings=True, **SIZES),
    "blocks, rows in another order": lambda path: write_tiny_gguf(
        path, matrix_type="Q4_1", embedding_type="Q8_0", **SIZES
    ),
    "experts of a file's one tensor": lambda path: write_gguf(
        path, tiny_model("mixtral", **EXPERTS)
    ),
    "queries, keys and values in one": lambda path: write_gguf(
        path, tiny_model("phi3", num_layers=2)
    ),
    "numbers added": lambda path: write_gguf(path, tiny_model("nemotron", num_layers=2)),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def parts_of(
    spec: ModelSpec, rank: int, *, quantize: str = "none", layers: tuple[int, int] = (0, 2)
) -> dict[str, WeightPart | None]:
    return plan_reads(
        spec,
        start_layer=layers[0],
        end_layer=layers[1],
        dtype="float32",
        quantize=quantize,
        shares=shares_of(spec, 2, weights=(2, 1)),
        rank=rank,
    )


def read(
    spec: ModelSpec, rank: int, *, quantize: str = "none", layers: tuple[int, int] = (0, 2)
) -> tuple[int, dict[str, torch.Tensor]]:
    """Bytes that a rank reads, and what it then holds."""
    attention.register()
    draft = draft_stage(
        spec,
        start_layer=layers[0],
        end_layer=layers[1],
        dtype="float32",
        attention=attention.ATTENTION_NAME,
        shares=shares_of(spec, 2, weights=(2, 1)),
        rank=rank,
    )
    reader = WeightReader(spec)
    draft.read(reader, quantize=quantize, device=CPU)
    held = [*draft.model.named_parameters(), *draft.model.named_buffers()]
    return reader.read_bytes, {name: value for name, value in held if value.device == CPU}


@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_loads_from_its_parts_what_it_loads_from_all(
    tmp_path: Path, kind: str, quantize: str
) -> None:
    spec = load_model_spec(KINDS[kind](tmp_path / "m.gguf"))
    for rank in (0, 1):
        num_bytes, expected = read(spec, rank, quantize=quantize)
        parts = parts_of(spec, rank, quantize=quantize)
        kept = keep_parts(spec, parts, tmp_path / f"rank{rank}")
        again, found = read(kept, rank, quantize=quantize)
        assert expected.keys() == found.keys()
        assert len(expected) > 10
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        files = (tmp_path / f"rank{rank}").iterdir()
        assert num_bytes == again == sum(path.stat().st_size for path in files)
        # Negative control: the other rank reads bytes that are not among them.
        with pytest.raises(CheckpointError, match=r"has not all of bytes|cannot be opened"):
            read(kept, 1 - rank, quantize=quantize)


def test_a_stage_reads_its_own_layers_and_a_table_at_both_ends(tmp_path: Path) -> None:
    spec = load_model_spec(write_tiny_checkpoint(tmp_path / "m", tie_word_embeddings=True, **SIZES))
    first, last = parts_of(spec, 0, layers=(0, 1)), parts_of(spec, 0, layers=(1, 2))
    assert {name for name in first if ".layers." in name} == {i.name for i in spec.groups.layers[0]}
    assert {name for name in last if ".layers." in name} == {i.name for i in spec.groups.layers[1]}
    table = spec.groups.embedding.name
    assert first[table] == last[table]
    assert first.keys() & last.keys() == {table}
    rows, row_bytes = spec.vocab_size // 2, 4 * spec.hidden_size
    part = first[table]
    assert part is not None
    assert part.num_bytes == rows * row_bytes


CUTS = {
    "rows": TensorCut(rows=((3, 9), (20, 21))),
    "columns": TensorCut(columns=(5, 60)),
    "both": TensorCut(rows=((0, 8), (12, 20), (24, 32)), columns=(40, 72)),
    "all": None,
}


@pytest.mark.parametrize("cut", CUTS)
def test_a_matrix_that_the_file_has_turned_round(tmp_path: Path, cut: str) -> None:
    spec = load_model_spec(write_gguf(tmp_path / "m.gguf", tiny_model("gpt2", num_layers=1)))
    info = spec.tensors["transformer.h.0.attn.c_attn.weight"]
    assert info.stored.is_transposed
    notes = NotingReader(spec)
    noted = notes.read(info, torch.float32, cut=CUTS[cut])
    expected = WeightReader(spec).read(info, torch.float32, cut=CUTS[cut])
    kept = keep_parts(spec, notes.parts(), tmp_path / "kept")
    reader = WeightReader(kept)
    found = reader.read(kept.tensors[info.name], torch.float32, cut=CUTS[cut])
    assert noted.shape == found.shape
    assert torch.equal(found, expected)
    assert reader.read_bytes == 4 * expected.numel()


def test_what_ranks_cannot_share_is_refused_before_a_byte_is_there(tmp_path: Path) -> None:
    spec = load_model_spec(write_gguf(tmp_path / "m.gguf", tiny_model("gpt2", num_layers=2)))
    there = keep_parts(spec, {}, tmp_path / "none")
    there.config["intermediate_size"] = 128
    with pytest.raises(UnsupportedModel, match="no tensor-parallel plan"):
        parts_of(there, 0)
