from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from stagemesh.errors import CheckpointError, UnsupportedModel
from stagemesh.model_spec import load_model_spec
from tests.support.checkpoints import write_tiny_checkpoint, write_tiny_gguf

Extra = Callable[[gguf.GGUFWriter], None]
FACTORS = [1.0, 1.0, 1.0, 4.6815]
# What a GGUF file cannot say, or says in another way.
SAME_KEYS = [
    "model_type",
    "architectures",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "hidden_act",
    "bos_token_id",
]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_config_equals_the_one_of_the_folder(tmp_path: Path, family: str, *, tied: bool) -> None:
    folder = write_tiny_checkpoint(tmp_path / "m", family, tie_word_embeddings=tied)
    path = write_tiny_gguf(tmp_path, family, tie_word_embeddings=tied)
    safetensors, from_gguf = load_model_spec(folder), load_model_spec(path)
    for key in SAME_KEYS:
        expected = safetensors.config[key]
        approx = pytest.approx(expected) if isinstance(expected, float) else expected
        assert from_gguf.config[key] == approx, key
    assert from_gguf.head_dim == safetensors.head_dim == 8
    assert from_gguf.eos_token_ids == safetensors.eos_token_ids == (2,)
    assert from_gguf.tensors.keys() == safetensors.tensors.keys()
    assert {n: i.shape for n, i in from_gguf.tensors.items()} == {
        n: i.shape for n, i in safetensors.tensors.items()
    }
    parsed = AutoConfig.for_model(**dict(from_gguf.config))
    assert parsed.rope_parameters["rope_theta"] == 10_000.0


def test_head_dim_that_is_not_hidden_over_heads(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path, head_dim=16)
    assert load_model_spec(path).head_dim == 16


def test_all_ids_that_end_a_turn(tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_eot_token_id(5)
        writer.add_uint32("tokenizer.ggml.eom_token_id", 6)

    assert load_model_spec(write_tiny_gguf(tmp_path, extra=extra)).eos_token_ids == (2, 5, 6)


def inv_freq(config: dict[str, object]) -> list[float]:
    rotary = LlamaRotaryEmbedding(AutoConfig.for_model(**config))
    values: list[float] = rotary.inv_freq.tolist()
    return values


def test_linear_scaling(tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(2.0)

    spec = load_model_spec(write_tiny_gguf(tmp_path, extra=extra))
    assert inv_freq(spec.config) == pytest.approx([0.5, 0.05, 0.005, 0.0005])
    plain = load_model_spec(write_tiny_gguf(tmp_path / "plain"))
    assert inv_freq(plain.config) == pytest.approx([1.0, 0.1, 0.01, 0.001])


def test_yarn_scaling(tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)

    spec = load_model_spec(write_tiny_gguf(tmp_path, extra=extra))
    reference = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10_000.0,
    }
    theirs = inv_freq(
        {
            "model_type": "llama",
            "hidden_size": 32,
            "num_attention_heads": 4,
            "max_position_embeddings": 128,
            "rope_parameters": reference,
        }
    )
    assert inv_freq(spec.config) == pytest.approx(theirs)


def test_rope_factors_are_carried_and_not_dropped(tmp_path: Path) -> None:
    spec = load_model_spec(write_tiny_gguf(tmp_path, rope_freqs=FACTORS))
    assert spec.rope_frequency_factors == pytest.approx(FACTORS)
    assert "rope_freqs.weight" not in spec.tensors
    base = torch.tensor(inv_freq(spec.config))
    effective = base / torch.tensor(spec.rope_frequency_factors)
    assert effective.tolist() == pytest.approx([1.0, 0.1, 0.01, 0.000213606], rel=1e-5)
    plain = load_model_spec(write_tiny_gguf(tmp_path / "plain"))
    assert plain.rope_frequency_factors is None
    assert plain.fingerprint != spec.fingerprint


@pytest.mark.parametrize("factors", [[1.0] * 3, [1.0] * 8])
def test_rope_factors_of_another_length(tmp_path: Path, factors: list[float]) -> None:
    with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight"):
        load_model_spec(write_tiny_gguf(tmp_path, rope_freqs=factors))


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_rope_factor_that_divides_by_nothing(tmp_path: Path, factor: float) -> None:
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        load_model_spec(write_tiny_gguf(tmp_path, rope_freqs=[1.0, 1.0, 1.0, factor]))


def test_sliding_window_of_a_mistral_file(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path, "mistral", extra=lambda writer: writer.add_sliding_window(4))
    config = load_model_spec(path).config
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 4)
    assert config["architectures"] == ["MistralForCausalLM"]
    AutoConfig.for_model(**config)


UNSUPPORTED: dict[str, tuple[Extra, str]] = {
    "experts": (lambda w: w.add_expert_group_count(8), r"llama\.expert_group_count"),
    "logit scale": (lambda w: w.add_logit_scale(0.5), r"llama\.logit_scale"),
    "partial rotary": (lambda w: w.add_rope_dimension_count(4), r"rope\.dimension_count = 4"),
    "key length": (lambda w: w.add_key_length(16), r"attention\.key_length = 16"),
    "longrope": (
        lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
        "'longrope' is not supported",
    ),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_key_that_changes_the_output_is_refused_by_name(tmp_path: Path, case: str) -> None:
    extra, message = UNSUPPORTED[case]
    with pytest.raises(UnsupportedModel, match=message):
        load_model_spec(write_tiny_gguf(tmp_path, extra=extra))


def write_bare(path: Path, architecture: str, fill: Extra) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    path = write_bare(tmp_path / "m.gguf", "mamba", lambda writer: writer.add_block_count(1))
    with pytest.raises(UnsupportedModel, match=r"'mamba'.*recurrent.*llama, .*qwen2, .*qwen3"):
        load_model_spec(path)


def test_architecture_that_is_no_text(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0]["general.architecture"] = gguf.GGUFValue(
            value=[1, 2], type=gguf.GGUFValueType.ARRAY
        )

    with pytest.raises(UnsupportedModel, match=r"\[1, 2\]"):
        load_model_spec(write_bare(tmp_path / "m.gguf", "llama", fill))


def test_file_without_tensors_is_missing_keys(tmp_path: Path) -> None:
    path = write_bare(tmp_path / "m.gguf", "llama", lambda writer: writer.add_block_count(1))
    with pytest.raises(CheckpointError, match=r"token_embd\.weight is missing"):
        load_model_spec(path)


def test_unknown_tensor_is_refused_by_name(tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.attn_sinks.weight", torch.zeros(4).numpy())

    with pytest.raises(UnsupportedModel, match=r"blk\.0\.attn_sinks\.weight"):
        load_model_spec(write_tiny_gguf(tmp_path, extra=extra))


def test_head_counts_per_layer(tmp_path: Path) -> None:
    def per_layer(counts: list[int]) -> Extra:
        def extra(writer: gguf.GGUFWriter) -> None:
            key = "llama.attention.head_count_kv"
            del writer.kv_data[0][key]
            writer.add_array(key, counts)

        return extra

    same = load_model_spec(write_tiny_gguf(tmp_path / "a", extra=per_layer([2, 2, 2, 2])))
    assert same.num_kv_heads == 2
    with pytest.raises(UnsupportedModel, match="differs between layers"):
        load_model_spec(write_tiny_gguf(tmp_path / "b", extra=per_layer([2, 2, 1, 2])))
