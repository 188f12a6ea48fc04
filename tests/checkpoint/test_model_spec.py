import json
import logging
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import torch

from stagemesh.checkpoint.generation_settings import SamplingDefaults, sampling_defaults
from stagemesh.errors import CheckpointError, ConfigError, UnsupportedModel
from stagemesh.model_spec import ModelSpec, load_model_spec
from stagemesh.models.weights import tied_head_differs
from tests.checkpoint.limits import cheap
from tests.support.checkpoints import (
    edit_config,
    edit_tensors,
    tiny_model,
    write_chain_model,
    write_tiny_checkpoint,
    write_tiny_gguf,
)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def parameter_bytes(family: str, dtype_bytes: int, **config: object) -> int:
    return sum(p.numel() for p in tiny_model(family, **config).parameters()) * dtype_bytes


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gpt2", "gemma", "phi3"])
def test_dimensions_and_tensors_of_a_family(tmp_path: Path, family: str) -> None:
    spec = load_model_spec(write_tiny_checkpoint(tmp_path / family, family))
    assert (spec.name, spec.format, spec.num_layers) == (family, "safetensors", 4)
    assert (spec.hidden_size, spec.vocab_size, spec.head_dim) == (32, 100, 8)
    assert (spec.num_heads, spec.num_kv_heads) == (4, 4 if family == "gpt2" else 2)
    assert spec.max_context_tokens == 128
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2,))
    assert spec.has_separate_head is not spec.tie_word_embeddings
    assert set(spec.tensors) == {name for name, _ in tiny_model(family).named_parameters()}


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("llama", True), ("gpt2", True)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_of_the_parts(tmp_path: Path, family: str, dtype: str, *, tied: bool) -> None:
    size = 4 if dtype == "float32" else 2
    spec = load_model_spec(write_tiny_checkpoint(tmp_path, family, tie_word_embeddings=tied))
    table = 100 * 32 * size
    layers = [spec.layer_bytes(layer, dtype) for layer in range(4)]
    assert len(set(layers)) == 1
    assert spec.head_bytes(dtype) == table
    positions = 128 * 32 * size if family == "gpt2" else 0
    assert spec.embedding_bytes(dtype) == table + positions
    whole = spec.stage_weight_bytes(0, 4, dtype)
    assert whole == parameter_bytes(family, size, tie_word_embeddings=tied)
    # A table that serves both ends is held twice once the ends are on two stages.
    ends = spec.stage_weight_bytes(0, 1, dtype) + spec.stage_weight_bytes(1, 4, dtype)
    assert ends - whole == (table if tied else 0)
    assert spec.stage_weight_bytes(1, 3, dtype) == sum(layers[1:3])
    assert spec.kv_bytes_per_token(3, dtype) == 2 * 3 * spec.num_kv_heads * 8 * size


def test_tensors_of_a_stage(tmp_path: Path) -> None:
    spec = load_model_spec(write_tiny_checkpoint(tmp_path, tie_word_embeddings=True))

    def names(start: int, end: int) -> list[str]:
        found = [info.name for info in spec.tensors_for_stage(start, end)]
        assert len(found) == len(set(found))
        return found

    outside = {EMBEDDING, "model.norm.weight"}
    assert outside & set(names(0, 2)) == {EMBEDDING}
    assert outside & set(names(1, 3)) == set()
    assert outside & set(names(2, 4)) == outside
    assert set(names(0, 4)) == set(spec.tensors)
    assert {name.split(".")[2] for name in names(1, 3)} == {"1", "2"}
    for start, end in [(0, 0), (2, 1), (-1, 2), (0, 5)]:
        with pytest.raises(ConfigError, match="not a range"):
            spec.tensors_for_stage(start, end)
    with pytest.raises(ConfigError, match="int4"):
        spec.head_bytes("int4")


def tied_spec(folder: Path, factor: float | None) -> ModelSpec:
    """A tied Llama with its table times `factor` as a head in the file, or without a head."""
    write_tiny_checkpoint(folder, tie_word_embeddings=True)
    if factor is not None:
        edit_tensors(folder, lambda tensors: tensors | {HEAD: tensors[EMBEDDING] * factor})
    return load_model_spec(folder)


@pytest.mark.parametrize("factor", [None, 1.0])
def test_tied_head_absent_or_identical(
    tmp_path: Path, factor: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        spec = tied_spec(tmp_path, factor)
    assert not caplog.records
    assert not spec.has_separate_head
    assert not tied_head_differs(spec)
    assert HEAD not in {info.name for info in spec.tensors_for_stage(0, 4)}
    assert EMBEDDING in {info.name for info in spec.tensors_for_stage(3, 4)}


def test_tied_head_that_differs_is_used_and_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        spec = tied_spec(tmp_path, -1.0)
    assert EMBEDDING in caplog.text
    assert HEAD in caplog.text
    assert spec.has_separate_head
    assert tied_head_differs(spec)
    names = {info.name for info in spec.tensors_for_stage(3, 4)}
    assert HEAD in names
    assert EMBEDDING not in names


def test_tied_head_that_differs_in_the_last_byte_only(tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        head = tensors[EMBEDDING].clone()
        head[-1, -1] += 1e-6
        return tensors | {HEAD: head}

    write_tiny_checkpoint(tmp_path, tie_word_embeddings=True)
    edit_tensors(tmp_path, change)
    assert load_model_spec(tmp_path).has_separate_head


def test_untied_head_that_is_missing(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, tie_word_embeddings=False)
    edit_tensors(tmp_path, lambda tensors: {k: v for k, v in tensors.items() if k != HEAD})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        load_model_spec(tmp_path)


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("gemma", True), ("gpt2", True)])
def test_missing_tie_key_means_what_the_class_means(
    tmp_path: Path, family: str, *, tied: bool
) -> None:
    write_tiny_checkpoint(tmp_path, family)
    edit_config(tmp_path, {}, remove=["tie_word_embeddings"])
    assert load_model_spec(tmp_path).tie_word_embeddings is tied


@pytest.mark.parametrize(
    ("head_dim", "remove", "expected"),
    [(None, False, 16), (None, True, 16), (32, False, 32), (32, True, 32)],
)
def test_head_dim(tmp_path: Path, head_dim: int | None, expected: int, *, remove: bool) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    write_tiny_checkpoint(tmp_path, head_dim=head_dim, **sizes)
    edit_config(tmp_path, {"head_dim": head_dim}, remove=["head_dim"] if remove else [])
    spec = load_model_spec(tmp_path)
    assert spec.head_dim == expected
    assert spec.tensors["model.layers.0.self_attn.k_proj.weight"].shape == (2 * expected, 64)
    assert spec.kv_bytes_per_token(1, "float32") == 2 * 2 * expected * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 5}, "no tensor of layer 4"),
        ({"num_hidden_layers": 2**31 - 1}, "no tensor of layer 4"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9 * 9}, "num_hidden_layers"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"num_key_value_heads": True}, "num_key_value_heads"),
        ({"vocab_size": 101}, "vocab_size is 101"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"model_type": None}, "model_type"),
        ({"architectures": []}, "architectures"),
    ],
)
def test_config_that_is_wrong(tmp_path: Path, change: dict[str, object], message: str) -> None:
    write_tiny_checkpoint(tmp_path)
    edit_config(tmp_path, change)
    with cheap(), pytest.raises(CheckpointError, match=message):
        load_model_spec(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"type": "extended", "factor": 8.0}}, "extended"),
        ({"rope_parameters": {"full_attention": {"rope_type": "extended"}}}, "extended"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"text_config": {}}, "text_config"),
    ],
)
def test_config_of_a_kind_that_is_not_run(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    write_tiny_checkpoint(tmp_path)
    edit_config(tmp_path, change)
    with pytest.raises(UnsupportedModel, match=message):
        load_model_spec(tmp_path)


@pytest.mark.parametrize(
    "scaling", [{"type": "linear", "factor": 2.0}, {"rope_type": "llama3", "factor": 8.0}]
)
def test_both_spellings_of_the_rope_type_pass(tmp_path: Path, scaling: dict[str, object]) -> None:
    write_tiny_checkpoint(tmp_path)
    edit_config(tmp_path, {"rope_scaling": scaling}, remove=["rope_parameters"])
    assert load_model_spec(tmp_path).config["rope_scaling"] == scaling


def test_layer_without_its_biases_is_missing_keys(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "qwen2")
    bias = "layers.2.self_attn.q_proj.bias"
    edit_tensors(tmp_path, lambda tensors: {k: v for k, v in tensors.items() if bias not in k})
    with pytest.raises(CheckpointError, match=r"layer 2 lacks self_attn\.q_proj\.bias"):
        load_model_spec(tmp_path)


def test_layers_of_two_kinds_are_no_missing_keys(tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {k.replace("layers.0.mlp.up", "layers.0.mlp.dense"): v for k, v in tensors.items()}

    write_tiny_checkpoint(tmp_path)
    edit_tensors(tmp_path, change)
    assert load_model_spec(tmp_path).num_layers == 4


def test_stored_tables_that_the_model_computes_are_left_out(tmp_path: Path) -> None:
    computed = {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4),
        "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
        "transformer.h.0.rotary_emb.inv_freq": torch.ones(4),
    }
    write_tiny_checkpoint(tmp_path, "gpt2")
    before = load_model_spec(tmp_path).layer_bytes(0, "float32")
    edit_tensors(tmp_path, lambda tensors: tensors | computed)
    spec = load_model_spec(tmp_path)
    assert spec.layer_bytes(0, "float32") == before
    names = {info.name for info in spec.tensors_for_stage(0, 4)}
    assert not names & computed.keys()
    assert "transformer.h.0.attn.c_attn.bias" in names


def test_eos_ids_are_the_union(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, eos_token_id=[7, 5])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 5], "top_p": 0.5}')
    spec = load_model_spec(tmp_path)
    assert spec.eos_token_ids == (9, 5, 7)
    assert spec.generation_defaults["top_p"] == 0.5


def test_generation_settings_of_either_format(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"temperature": 0.5, "top_k": 20, "top_p": 0.75, "min_p": 0.25}

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_int32("general.sampling.top_k", 20)
        writer.add_float32("general.sampling.top_p", 0.75)
        writer.add_float32("general.sampling.min_p", 0.25)

    folder = write_tiny_checkpoint(tmp_path / "m")
    path = folder / "generation_config.json"
    path.write_text(json.dumps(settings | {"do_sample": True}))
    file = write_tiny_gguf(tmp_path, extra=extra)
    for spec in (load_model_spec(folder), load_model_spec(file)):
        assert sampling_defaults(spec.generation_defaults) == SamplingDefaults(**settings)
    assert not caplog.records
    nothing = load_model_spec(write_tiny_gguf(tmp_path / "plain")).generation_defaults
    assert sampling_defaults(nothing) == SamplingDefaults()
    # What cannot be is left out, and named once.
    path.write_text('{"temperature": -1, "top_p": "x", "top_k": -1, "min_p": NaN}')
    spec = load_model_spec(folder)
    assert [record.getMessage().split()[-6] for record in caplog.records] == [
        *("temperature", "top_p", "top_k", "min_p")
    ]
    assert sampling_defaults(spec.generation_defaults) == SamplingDefaults()


def test_fingerprint_tells_models_apart_and_not_places(tmp_path: Path) -> None:
    def fingerprint(folder: str, **config: object) -> str:
        path = write_tiny_checkpoint(tmp_path / folder, **config)  # type: ignore[arg-type]
        return load_model_spec(path).fingerprint

    first = fingerprint("a")
    assert fingerprint("b") == first
    others = {
        fingerprint("c", intermediate_size=72),
        fingerprint("d", rope_theta=5e5),
        fingerprint("e", sharded=True),
        load_model_spec(write_tiny_gguf(tmp_path)).fingerprint,
    }
    assert len(others | {first}) == 5


def test_chain_model_walks(tmp_path: Path) -> None:
    spec = load_model_spec(write_chain_model(tmp_path, successors={10: 65}))
    assert spec.hidden_size == spec.vocab_size == 260
    assert spec.eos_token_ids == (257,)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"]


def test_reading_a_spec_imports_no_torch(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path)
    code = (
        "import sys; from stagemesh.model_spec import load_model_spec; "
        f"assert load_model_spec({str(folder)!r}).num_layers == 4; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'safetensors')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0
