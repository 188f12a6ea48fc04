import dataclasses
import time
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file

from stagemesh.checkpoint.safetensors_header import ELEMENT_BYTES
from stagemesh.checkpoint.stored_form import AS_IT_IS, RowOrder, StoredForm
from stagemesh.checkpoint.tensor_info import TensorInfo
from stagemesh.errors import CheckpointError, UnsupportedModel
from stagemesh.model_spec import ModelSpec, load_model_spec
from stagemesh.models import weights
from stagemesh.models.tensor_cut import TensorCut
from stagemesh.models.weights import WeightReader
from tests.support.checkpoints import edit_tensors, write_tiny_checkpoint, write_tiny_gguf

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def read_all(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    reader = WeightReader(spec)
    return {name: reader.read(info, dtype) for name, info in spec.tensors.items()}


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int16,
    torch.uint16,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.uint32,
    torch.float32,
    torch.int64,
    torch.uint64,
    torch.float64,
]


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_safetensors_type_is_read_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    write_tiny_checkpoint(tmp_path)
    values = torch.tensor([[0.0, 1.0, 2.0], [3.5, 0.25, 96.0]]).to(dtype)
    odd = {"x": values, "vector": values[0], "scalar": values[1, 2], "empty": values[:0]}
    odd = {f"model.extra.{name}": value.clone() for name, value in odd.items()}
    edit_tensors(tmp_path, lambda tensors: tensors | odd)
    spec = load_model_spec(tmp_path)
    reader = WeightReader(spec)
    for name, value in odd.items():
        same = reader.read(spec.tensors[name], dtype)
        assert same.dtype == dtype
        assert same.shape == value.shape
        assert torch.equal(bits(same), bits(value))
        assert torch.equal(reader.read(spec.tensors[name], torch.float64), value.double())


def test_control_no_type_of_the_header_reader_is_left_out() -> None:
    assert len(ELEMENT_BYTES) == len(DTYPES)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_gguf_weights_equal_safetensors_weights(tmp_path: Path, family: str) -> None:
    config = {"attention_bias": True} if family in ("llama", "qwen3") else {}
    folder = write_tiny_checkpoint(tmp_path / "m", family, **config)
    path = write_tiny_gguf(tmp_path, family, **config)
    expected = load_file(folder / "model.safetensors")
    found = read_all(load_model_spec(path))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
        assert found[name].is_contiguous()


def test_control_rows_of_a_llama_file_are_permuted(tmp_path: Path) -> None:
    """Unpermuting with the wrong head count, or not at all, would show."""
    write_tiny_checkpoint(tmp_path / "m")
    expected = load_file(tmp_path / "m" / "model.safetensors")
    spec = load_model_spec(write_tiny_gguf(tmp_path))
    k_proj = Q_PROJ.replace("q_proj", "k_proj")
    info, reader = spec.tensors[k_proj], WeightReader(spec)
    assert torch.equal(reader.read(info, torch.float32), expected[k_proj])
    order = RowOrder(kind="pairs", num_heads=spec.num_heads, num_kv_heads=spec.num_heads)
    wrong_heads = dataclasses.replace(info, stored=StoredForm(row_order=order))
    assert not torch.equal(reader.read(wrong_heads, torch.float32), expected[k_proj])
    as_it_is = dataclasses.replace(info, stored=AS_IT_IS)
    assert not torch.equal(reader.read(as_it_is, torch.float32), expected[k_proj])


def test_heads_that_do_not_divide_the_rows(tmp_path: Path) -> None:
    spec = load_model_spec(write_tiny_gguf(tmp_path))
    order = RowOrder(kind="pairs", num_heads=3, num_kv_heads=3)
    odd = dataclasses.replace(spec.tensors[Q_PROJ], stored=StoredForm(row_order=order))
    with pytest.raises(CheckpointError, match=r"blk\.1\.attn_q\.weight has 32 rows"):
        WeightReader(spec).read(odd, torch.float32)


STORED = {
    "pairs": StoredForm(row_order=RowOrder(kind="pairs", num_heads=4, num_kv_heads=4)),
    "qkv": StoredForm(row_order=RowOrder(kind="qkv", num_heads=12, num_kv_heads=6)),
    "transposed": StoredForm(is_transposed=True),
    "raised": StoredForm(added=1.0),
}


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("encoding", ["F32", "Q8_0"])
def test_a_part_equals_that_part_of_the_whole(tmp_path: Path, name: str, encoding: str) -> None:
    """Rows and columns count as the model has them, whatever the file's form."""
    values = torch.randn(96, 96, generator=torch.Generator().manual_seed(0))
    kind = gguf.GGMLQuantizationType[encoding]
    raw = gguf.quants.quantize(values.numpy(), kind).tobytes()
    (tmp_path / "raw").write_bytes(raw)
    info = TensorInfo(
        name="x",
        source_name="x",
        file=tmp_path / "raw",
        offset=0,
        num_bytes=len(raw),
        shape=(96, 96),
        encoding=encoding,
        stored=STORED[name],
    )
    spec = load_model_spec(write_tiny_gguf(tmp_path))
    reader = WeightReader(spec)
    whole = reader.read(info, torch.float32)
    for rows in (((5, 40),), ((0, 7), (50, 96)), None):
        for columns in ((32, 64), (3, 50), None):
            start = reader.read_bytes
            part = reader.read(info, torch.float32, cut=TensorCut(rows=rows, columns=columns))
            expected = torch.cat([whole[first:last] for first, last in rows or ((0, 96),)])
            first, last = columns or (0, 96)
            assert torch.equal(part, expected[:, first:last])
            assert part.is_contiguous()
            if rows is not None and not info.stored.is_transposed:
                assert reader.read_bytes - start < len(raw)


def test_mixed_quantised_types_equal_the_reference(tmp_path: Path) -> None:
    """Rows of 96, which 256 does not divide; types differ between tensors; the head is tied."""
    path = write_tiny_gguf(
        tmp_path,
        "qwen2",
        hidden_size=96,
        intermediate_size=160,
        tie_word_embeddings=True,
        embedding_type="Q8_0",
        matrix_type="Q4_0",
    )
    spec = load_model_spec(path)
    assert spec.tie_word_embeddings
    assert not spec.has_separate_head
    assert {info.encoding for info in spec.tensors.values()} == {"F32", "Q4_0", "Q8_0"}
    assert_equals_reference(spec)


TYPES = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0"]


@pytest.mark.parametrize("type_name", TYPES)
def test_quantised_types_equal_the_reference(tmp_path: Path, type_name: str) -> None:
    path = write_tiny_gguf(
        tmp_path,
        "qwen2",
        num_layers=1,
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=32,
        matrix_type=type_name,
    )
    assert_equals_reference(load_model_spec(path))


def assert_equals_reference(spec: ModelSpec) -> None:
    """Compares with gguf-py, for an architecture whose rows are not permuted."""
    found = read_all(spec)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(spec.path).tensors}
    for name, info in spec.tensors.items():
        tensor = tensors[info.source_name]
        reference = gguf.quants.dequantize(tensor.data.copy(), tensor.tensor_type)
        assert found[name].shape == info.shape
        assert torch.equal(found[name], torch.from_numpy(reference)), name


def test_quantised_vector_is_one_row(tmp_path: Path) -> None:
    info = quantised_info(tmp_path, torch.linspace(-1, 1, 64), shape=(64,))
    spec = load_model_spec(write_tiny_gguf(tmp_path))
    values = WeightReader(spec).read(info, torch.float32)
    assert torch.allclose(values, torch.linspace(-1, 1, 64), atol=0.01)


def quantised_info(folder: Path, values: torch.Tensor, *, shape: tuple[int, ...]) -> TensorInfo:
    raw = gguf.quants.quantize(values.numpy(), gguf.GGMLQuantizationType.Q8_0).tobytes()
    (folder / "raw").write_bytes(raw)
    return TensorInfo(
        name="x",
        source_name="x",
        file=folder / "raw",
        offset=0,
        num_bytes=len(raw),
        shape=shape,
        encoding="Q8_0",
    )


def test_stack_of_matrices(tmp_path: Path) -> None:
    values = torch.linspace(-1, 1, 4 * 3 * 32).view(4, 3, 32)
    info = quantised_info(tmp_path, values, shape=(4, 3, 32))
    spec = load_model_spec(write_tiny_gguf(tmp_path))
    assert torch.allclose(WeightReader(spec).read(info, torch.float32), values, atol=0.01)


def test_type_that_cannot_be_dequantised_is_named(tmp_path: Path) -> None:
    info = dataclasses.replace(
        quantised_info(tmp_path, torch.zeros(512), shape=(512,)),
        source_name="blk.0.ffn_up.weight",
        encoding="Q8_K",
        shape=(1, 256),
        num_bytes=292,
    )
    spec = load_model_spec(write_tiny_gguf(tmp_path))
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.ffn_up\.weight has type Q8_K"):
        WeightReader(spec).read(info, torch.float32)


@pytest.mark.parametrize("chunk_bytes", [1, 100, 1000])
def test_chunks_do_not_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    spec = load_model_spec(write_tiny_gguf(tmp_path, matrix_type="Q8_0"))
    whole = read_all(spec)
    monkeypatch.setattr(weights, "_CHUNK_BYTES", chunk_bytes)
    chunked = read_all(spec)
    assert all(torch.equal(whole[name], chunked[name]) for name in whole)


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
@pytest.mark.parametrize(("start", "end"), [(0, 4), (0, 1), (1, 3), (3, 4)])
def test_a_stage_reads_the_bytes_of_its_tensors_only(
    tmp_path: Path, kind: str, start: int, end: int
) -> None:
    if kind == "gguf":
        path = write_tiny_gguf(tmp_path, matrix_type="Q4_1")
    else:
        path = write_tiny_checkpoint(tmp_path, sharded=True)
    spec = load_model_spec(path)
    seen: list[int] = []
    reader = WeightReader(spec, on_bytes=seen.append)
    tensors = spec.tensors_for_stage(start, end)
    for info in tensors:
        reader.read(info, torch.bfloat16)
    expected = sum(info.num_bytes for info in tensors)
    assert reader.read_bytes == sum(seen) == expected
    total = sum(info.num_bytes for info in spec.tensors.values())
    assert expected == total if end - start == 4 else expected < 0.7 * total


def test_a_result_owns_its_memory(tmp_path: Path) -> None:
    spec = load_model_spec(write_tiny_checkpoint(tmp_path))
    reader = WeightReader(spec)
    first = reader.read(spec.tensors[Q_PROJ], torch.float32)
    kept = first.clone()
    reader.read(spec.tensors[Q_PROJ], torch.float32).zero_()
    (tmp_path / "model.safetensors").unlink()
    assert torch.equal(first, kept)
    with pytest.raises(CheckpointError, match="cannot be opened"):
        reader.read(spec.tensors[Q_PROJ], torch.float32)


def test_rounding_to_the_run_dtype(tmp_path: Path) -> None:
    spec = load_model_spec(write_tiny_checkpoint(tmp_path))
    exact = read_all(spec)
    rounded = read_all(spec, torch.bfloat16)
    assert all(torch.equal(rounded[name], exact[name].bfloat16()) for name in exact)
    assert not torch.equal(rounded[Q_PROJ].float(), exact[Q_PROJ])


def test_file_of_a_shard_may_be_shared(tmp_path: Path) -> None:
    """Tensors that lie one after the other are told apart."""
    write_tiny_checkpoint(tmp_path)
    pair = {"model.extra.a": torch.full((3,), 1.0), "model.extra.b": torch.full((3,), 2.0)}
    edit_tensors(tmp_path, lambda tensors: tensors | pair)
    found = read_all(load_model_spec(tmp_path))
    assert torch.equal(found["model.extra.a"], pair["model.extra.a"])
    assert torch.equal(found["model.extra.b"], pair["model.extra.b"])


def test_sample_model_loads_in_seconds() -> None:
    spec = load_model_spec("smollm2-135m-instruct")
    start = time.process_time()
    reader = WeightReader(spec)
    tensors = [reader.read(info, torch.float32) for info in spec.tensors_for_stage(0, 30)]
    assert time.process_time() - start < 10.0  # about 1.5 on an idle machine
    assert reader.read_bytes == 96_576_768
    assert sum(tensor.numel() for tensor in tensors) == 134_515_008
