"""Each family in three stages against transformers in one process: logits and greedy tokens.

The stages run without a network, one after the other: what travels between them is the same.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from stagemesh.errors import CheckpointError, UnsupportedModel
from stagemesh.inference.stage_engine import StageEngine
from stagemesh.model_spec import load_model_spec
from tests.support.checkpoints import (
    edit_config,
    edit_tensors,
    tiny_model,
    write_model,
    write_tiny_checkpoint,
    write_tiny_gguf,
)
from tests.support.stage_chain import (
    StageChain,
    assert_same_logits,
    reference_logits,
    reference_tokens,
)
from tools.families import tiny_configs

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26]
NUM_TOKENS = 16
FULL_SIZE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from more threads, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check_parity(
    folder: Path, model: PreTrainedModel, *, sizes: tuple[int, ...] = (1, 2, 1)
) -> None:
    tokens, logits = StageChain(folder, sizes=sizes).generate(PROMPT, NUM_TOKENS)
    assert_same_logits(logits, reference_logits(model, PROMPT + tokens[:-1]))
    assert tokens == reference_tokens(model, PROMPT, NUM_TOKENS)


SUPPORTED: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 4},
    "ministral": {"sliding_window": 4},
    "ministral3": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    "qwen3": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    "gemma": {},
    "gemma2": {
        "sliding_window": 4,
        "attn_logit_softcapping": 1.0,
        "final_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 16,
    },
    "gemma3_text": {
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "vaultgemma": {"sliding_window": 4},
    "phi": {},
    "phi3": {"sliding_window": 4},
    "olmo": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 4},
    "smollm3": {"no_rope_layer_interval": 2},
    "starcoder2": {"sliding_window": 4},
    "granite": {
        "embedding_multiplier": 12.0,
        "logits_scaling": 8.0,
        "residual_multiplier": 0.25,
        "attention_multiplier": 0.3,
    },
    "cohere": {"logit_scale": 0.25, "use_qk_norm": True},
    "cohere2": {"logit_scale": 0.25, "sliding_window": 4, "sliding_window_pattern": 2},
    "glm": {},
    "glm4": {},
    "helium": {},
    "ernie4_5": {},
    "exaone4": {"sliding_window": 4, "sliding_window_pattern": 2},
    "seed_oss": {},
    "arcee": {},
    "jais2": {},
    "hyperclovax": {"embedding_multiplier": 3.0},
    "gpt_neox": {"num_key_value_heads": None},
}


@pytest.mark.parametrize("family", SUPPORTED)
def test_three_stages_equal_one_process(tmp_path: Path, family: str) -> None:
    model = tiny_model(family, **SUPPORTED[family])
    check_parity(write_model(tmp_path / "model", model), model)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("mistral", {"sliding_window": 8}),
        ("qwen2", {"max_window_layers": 4}),
        ("gemma2", {"final_logit_softcapping": 3.0}),
        ("gemma2", {"attn_logit_softcapping": 2.0}),
        ("granite", {"embedding_multiplier": 1.0}),
        ("granite", {"logits_scaling": 1.0}),
        ("cohere", {"logit_scale": 1.0}),
    ],
)
def test_each_number_of_the_config_matters(
    tmp_path: Path, family: str, change: dict[str, Any]
) -> None:
    """The negative control: the comparison sees a config that is off by one number."""
    model = tiny_model(family, **SUPPORTED[family])
    other = tiny_model(family, **(SUPPORTED[family] | change))
    tokens, logits = StageChain(write_model(tmp_path / "m", model), num_stages=3).generate(
        PROMPT, 2
    )
    with pytest.raises(AssertionError):
        assert_same_logits(logits, reference_logits(other, PROMPT + tokens[:-1]))


REFUSED = {
    "ctrl": "ctrl: its forward changes the activation outside of its layers",
    "openai-gpt": r"openai-gpt: attention came by layers \[\]",
    "qwen3_next": r"\(qwen3_next\): its layers keep a recurrent state",
    "recurrent_gemma": r"\(recurrent_gemma\): its layers keep a recurrent state",
    "mamba": r"\(mamba\): its layers keep a recurrent state",
    "bert": r"\(bert\): it is a masked language model",
    "glm_moe_dsa": r"\(glm_moe_dsa\): its attention picks keys by an index",
}


@pytest.mark.parametrize("family", REFUSED)
def test_other_families_are_refused_by_name(tmp_path: Path, family: str) -> None:
    model = tiny_configs.tiny_model(family)
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=REFUSED[family]):
        StageChain(tmp_path, num_stages=2)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
        (
            "phi3",
            {
                "original_max_position_embeddings": 64,
                "rope_scaling": {
                    "rope_type": "longrope",
                    "short_factor": [1.0] * 4,
                    "long_factor": [2.0] * 4,
                },
            },
        ),
        ("gemma3_text", {"use_bidirectional_attention": True}),
    ],
)
def test_what_depends_on_later_tokens_or_other_sequences_is_refused(
    tmp_path: Path, family: str, change: dict[str, Any]
) -> None:
    folder = write_tiny_checkpoint(tmp_path / "model", family)
    edit_config(folder, change, remove=["rope_parameters"] if "rope_scaling" in change else [])
    with pytest.raises(UnsupportedModel, match=r"dynamic|longrope|bidirectional"):
        StageChain(folder)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_head_dim_that_is_not_hidden_size_by_heads(tmp_path: Path, family: str) -> None:
    model = tiny_model(family, **FULL_SIZE, head_dim=32)
    layer = model.get_submodule("model.layers.0.self_attn.q_proj")
    if family != "qwen2":  # whose class has no such setting
        assert layer.weight.shape == (128, 64)
    check_parity(write_model(tmp_path / "model", model), model)


def test_a_hidden_size_that_the_heads_do_not_divide(tmp_path: Path) -> None:
    """Which transformers lets Mistral have, and refuses for Llama: then we do, by name."""
    sizes = {"hidden_size": 60, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
    model = tiny_model("mistral", **sizes)
    folder = write_model(tmp_path / "model", model)
    check_parity(folder, model)
    edit_config(folder, {"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    message = r"(?s)refuses the configuration: .*\(60\) is not a multiple of .* heads \(8\)"
    with pytest.raises(UnsupportedModel, match=message):
        StageChain(folder)


def test_a_null_head_dim_is_a_missing_one(tmp_path: Path) -> None:
    model = tiny_model("llama", **FULL_SIZE, head_dim=16)
    folder = write_model(tmp_path / "model", model)
    edit_config(folder, {"head_dim": None})
    assert load_model_spec(folder).head_dim == 16
    check_parity(folder, model)


ROPES: dict[str, tuple[dict[str, Any], list[float] | None]] = {
    "linear, old key": ({"type": "linear", "factor": 2.0}, [0.5, 0.05, 0.005, 0.0005]),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        [1, 0.1, 0.01, 0.000213608],
    ),
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        None,
    ),
}


@pytest.mark.parametrize("name", ROPES)
def test_rope_scaling(tmp_path: Path, name: str) -> None:
    scaling, expected = ROPES[name]
    model = tiny_model("llama", rope_scaling=dict(scaling), rope_theta=10000.0)
    folder = write_model(tmp_path / "model", model)
    edit_config(
        folder, {"rope_scaling": scaling, "rope_theta": 10000.0}, remove=["rope_parameters"]
    )
    chain = StageChain(folder, num_stages=2)
    frequencies = [_inv_freq(engine.stage.model) for engine in chain.engines]
    torch.testing.assert_close(frequencies[0], _inv_freq(model), rtol=0, atol=0)
    torch.testing.assert_close(frequencies[1], _inv_freq(model), rtol=0, atol=0)
    if expected is not None:
        torch.testing.assert_close(frequencies[0], torch.tensor(expected), rtol=1e-4, atol=0)
    check_parity(folder, model)


def test_an_unknown_rope_type_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "model")
    edit_config(
        folder,
        {"rope_scaling": {"type": "extended", "factor": 8.0}},
        remove=["rope_parameters"],
    )
    with pytest.raises(UnsupportedModel, match="'extended'"):
        StageChain(folder)


def _inv_freq(model: PreTrainedModel) -> torch.Tensor:
    return model.get_submodule("model.rotary_emb").inv_freq


def test_qwen2_without_its_biases_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "model", "qwen2")
    assert "attention_bias" not in json.loads((folder / "config.json").read_text())
    edit_tensors(folder, lambda all_: {k: v for k, v in all_.items() if not k.endswith("bias")})
    with pytest.raises(
        CheckpointError, match=r"no tensor model\.layers\.0\.self_attn\.q_proj\.bias"
    ):
        StageChain(folder)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_gguf_equals_safetensors(tmp_path: Path, family: str) -> None:
    model = tiny_model(family)
    check_parity(write_tiny_gguf(tmp_path / "gguf", family), model)


def test_rope_factors_of_a_gguf_file(tmp_path: Path) -> None:
    factors = [1.0, 1.0, 1.0, 4.6815]
    path = write_tiny_gguf(tmp_path, rope_freqs=factors)
    model = tiny_model("llama")
    plain = _inv_freq(model).clone()
    for name in ("inv_freq", "original_inv_freq"):
        getattr(model.get_submodule("model.rotary_emb"), name).div_(torch.tensor(factors))
    chain = StageChain(path, num_stages=3)
    for engine in chain.engines:
        torch.testing.assert_close(_inv_freq(engine.stage.model), plain / torch.tensor(factors))
    check_parity(path, model)


@pytest.mark.parametrize(
    ("embedding_type", "matrix_type"), [("Q8_0", "Q4_0"), ("F16", "Q8_0"), ("BF16", "F16")]
)
def test_a_gguf_of_mixed_types_without_an_output_tensor(
    tmp_path: Path, embedding_type: str, matrix_type: str
) -> None:
    config = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 24}
    path = write_tiny_gguf(
        tmp_path,
        embedding_type=embedding_type,
        matrix_type=matrix_type,
        tie_word_embeddings=True,
        **config,
    )
    model = tiny_model("llama", tie_word_embeddings=True, **config)
    _load_dequantised(model, path)
    check_parity(path, model)


def _load_dequantised(model: PreTrainedModel, path: Path) -> None:
    """Give `model` the values of a llama GGUF file, read and permuted back by gguf-py and numpy."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    values = {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for tensor in gguf.GGUFReader(path).tensors
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
            data = values[gguf_name]
            heads = {
                "q_proj": model.config.num_attention_heads,
                "k_proj": model.config.num_key_value_heads,
            }.get(name.split(".")[-2])
            if heads is not None:
                pairs = data.reshape(heads, -1, 2, *data.shape[1:])
                data = pairs.swapaxes(1, 2).reshape(data.shape)
            parameter.copy_(torch.from_numpy(data.copy()))


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("case", ["no head in the file", "equal head", "other head", "untied"])
def test_tied_embeddings(tmp_path: Path, num_stages: int, case: str) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    folder = write_model(tmp_path / "model", model)
    table = model.get_input_embeddings().weight.detach()
    if case == "no head in the file":
        names = load_model_spec(folder).tensors
        assert "lm_head.weight" not in names
    else:
        head = table.clone() if case == "equal head" else -table
        edit_tensors(folder, lambda all_: all_ | {"lm_head.weight": head})
        model.get_output_embeddings().weight = torch.nn.Parameter(head)
    if case == "untied":
        edit_config(folder, {"tie_word_embeddings": False})
    sizes = {1: (4,), 2: (2, 2), 3: (1, 2, 1)}[num_stages]
    check_parity(folder, model, sizes=sizes)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_config_without_the_tie_key_uses_the_head_of_the_file(
    tmp_path: Path, num_stages: int
) -> None:
    model = tiny_model("llama")
    folder = write_model(tmp_path / "model", model)
    edit_config(folder, {}, remove=["tie_word_embeddings"])
    check_parity(folder, model, sizes=(4,) if num_stages == 1 else (3, 1))


def test_an_untied_model_without_a_head_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "model")
    edit_tensors(folder, lambda all_: {k: v for k, v in all_.items() if k != "lm_head.weight"})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        StageChain(folder, num_stages=2)


def test_a_stage_reads_and_holds_its_own_layers_only(tmp_path: Path) -> None:
    model = tiny_model("llama")
    folder = write_model(tmp_path / "model", model, sharded=True)
    _one_file_per_layer(folder, model)
    chain = StageChain(folder, sizes=(2, 2))
    sizes = {name: p.numel() * 4 for name, p in model.named_parameters()}
    for engine, layers in zip(chain.engines, ((0, 1), (2, 3)), strict=True):
        expected = sum(
            size
            for name, size in sizes.items()
            if any(f".layers.{layer}." in name for layer in layers)
            or ("embed" in name and 0 in layers)
            or (name in ("model.norm.weight", "lm_head.weight") and 3 in layers)
        )
        assert engine.stage.weight_bytes == expected
        assert engine.stage.read_bytes == expected
    # Files of other layers are read no further than their headers: it loads without them.
    spec = load_model_spec(folder)
    (folder / "layer-0.safetensors").unlink()
    (folder / "layer-1.safetensors").unlink()
    settings = {"dtype": "float32", "device": torch.device("cpu"), "kv_limit_bytes": 2**20}
    StageEngine.load(spec, start_layer=2, end_layer=4, **settings)
    with pytest.raises(CheckpointError, match=r"layer-0\.safetensors"):
        StageEngine.load(spec, start_layer=0, end_layer=2, **settings)


def _one_file_per_layer(folder: Path, model: PreTrainedModel) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    weight_map = {}
    for name, _ in model.named_parameters():
        layer = name.split(".")[2] if ".layers." in name else None
        weight_map[name] = "rest.safetensors" if layer is None else f"layer-{layer}.safetensors"
    for file in set(weight_map.values()):
        tensors = {n: p.detach() for n, p in model.named_parameters() if weight_map[n] == file}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("chunk", [1, 3, 5])
@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen2", "gemma2", "gemma3_text", "cohere2"]
)
def test_a_prefill_in_chunks_equals_a_whole_one(tmp_path: Path, family: str, chunk: int) -> None:
    chain = StageChain(
        write_tiny_checkpoint(tmp_path / "m", family, **SUPPORTED[family]), num_stages=2
    )
    whole_tokens, whole = chain.generate(PROMPT, 6)
    tokens, logits = chain.generate(PROMPT, 6, chunk=chunk)
    assert tokens == whole_tokens
    assert_same_logits(logits, whole)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_near_full_precision(tmp_path: Path, dtype: str) -> None:
    model = tiny_model("llama")
    chain = StageChain(write_model(tmp_path / "m", model), num_stages=2, dtype=dtype)
    tokens, logits = chain.generate(PROMPT, 4)
    exact = reference_logits(model, PROMPT + tokens[:-1])
    error = float((logits - exact).abs().max())
    assert 0 < error < 0.1 * math.sqrt(float(exact.abs().max()))
