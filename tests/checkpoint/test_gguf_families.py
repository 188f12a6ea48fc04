"""Every architecture of GGUF: config, names and values against transformers' class and reader."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from stagemesh.checkpoint.gguf_config import config_from_gguf
from stagemesh.checkpoint.gguf_families import UNSUPPORTED
from stagemesh.checkpoint.gguf_header import read_gguf_header
from stagemesh.checkpoint.stored_form import AS_IT_IS
from stagemesh.errors import CheckpointError, UnsupportedModel
from stagemesh.model_spec import ModelSpec, load_model_spec
from stagemesh.models.weights import WeightReader
from stagemesh.weight_transfer.manifest import ModelAssembler, model_parts
from tests.support.checkpoints import tiny_model
from tests.support.gguf_files import write_gguf
from tests.support.stage_chain import StageChain, assert_same_logits, reference_logits

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Numbers that differ from the families' defaults where the file can say them.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 4},
    "mixtral": LOCAL_EXPERTS,
    "qwen2": {},
    "qwen3": {},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 48},
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True},
    "minimax_m2": LOCAL_EXPERTS | {"partial_rotary_factor": 0.5},
    "phi3": {"sliding_window": 4, "partial_rotary_factor": 0.5},
    "gemma": {},
    "gemma2": {
        "sliding_window": 4,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 1.0,
        "final_logit_softcapping": 2.0,
    },
    "gemma3_text": {"sliding_window": 4, "query_pre_attn_scalar": 8, "num_layers": 7},
    "starcoder2": {"tie_word_embeddings": False},
    "stablelm": {"partial_rotary_factor": 0.5, "use_qkv_bias": True, "qk_layernorm": True},
    "nemotron": {"partial_rotary_factor": 0.5},
    "gpt2": {},
    "bloom": {"n_layer": 2, "n_head": 4, "seq_length": 128},
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True},
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, config) for family, config in FAMILIES.items()},
    "falcon, one norm": ("falcon", {"num_kv_heads": 1, "multi_query": True}),
    "stablelm, parallel": ("stablelm", {"use_parallel_residual": True}),
    "tied llama": ("llama", {"tie_word_embeddings": True}),
}
# Where transformers' reader leaves rows as they are or a number at its default.
NOT_READ_RIGHT_BY_TRANSFORMERS = frozenset({"falcon", "gemma", "mistral", "mixtral", "stablelm"})


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from more threads, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(name: str) -> PreTrainedModel:
    family, config = VARIANTS[name]
    return tiny_model(family, **{"num_layers": 2, **config})


def hub_tensors(folder: Path, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The model's tensors by the names that transformers itself saves them with."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def read_all(spec: ModelSpec) -> dict[str, torch.Tensor]:
    reader = WeightReader(spec)
    return {name: reader.read(info, torch.float32) for name, info in spec.tensors.items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_names_values_and_config(tmp_path: Path, name: str) -> None:
    model = build(name)
    spec = load_model_spec(write_gguf(tmp_path / "m.gguf", model))
    found, expected = read_all(spec), hub_tensors(tmp_path / "m", model)
    assert found.keys() == expected.keys()
    for tensor_name, value in expected.items():
        # One is added and taken away again in fp32.
        torch.testing.assert_close(found[tensor_name], value, rtol=0, atol=2e-7)
    parsed = AutoConfig.for_model(**spec.config)
    again = AutoModelForCausalLM.from_config(parsed, dtype=torch.float32).eval()
    again.load_state_dict(model.state_dict())
    got, want = reference_logits(again, PROMPT), reference_logits(model, PROMPT)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert spec.config["architectures"] == [type(model).__name__]
    assert spec.eos_token_ids == (2,)


@pytest.mark.parametrize("name", FAMILIES)
def test_values_equal_those_of_transformers_own_reader(tmp_path: Path, name: str) -> None:
    if name in NOT_READ_RIGHT_BY_TRANSFORMERS:
        pytest.skip("transformers reads these files otherwise")
    model = build(name)
    path = write_gguf(tmp_path / "m.gguf", model)
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    ours = read_all(load_model_spec(path))
    by_name = dict(model.named_parameters())
    assert by_name.keys() <= theirs.keys() | {"lm_head.weight"}
    shared = ours.keys() & theirs.keys()
    assert len(shared) > 10
    for tensor_name in shared:
        assert torch.equal(ours[tensor_name], theirs[tensor_name]), tensor_name


@pytest.mark.parametrize("name", ["llama", "gpt2", "nemotron", "bloom"])
def test_a_node_without_the_file_knows_how_values_lie(tmp_path: Path, name: str) -> None:
    spec = load_model_spec(write_gguf(tmp_path / "m.gguf", build(name)))
    assembler = ModelAssembler(where=tmp_path)
    for part in model_parts(spec):
        assembler.add(part)
    there = assembler.spec()
    assert {n: i.stored for n, i in there.tensors.items()} == {
        n: i.stored for n, i in spec.tensors.items()
    }
    assert any(info.stored != AS_IT_IS for info in there.tensors.values())


@pytest.mark.parametrize("part", ["attn_q", "attn_norm", "attn_qkv"])
def test_control_what_the_converter_did_is_seen(tmp_path: Path, part: str) -> None:
    """Values that are taken as they lie differ."""
    family = {"attn_q": "llama", "attn_norm": "gemma2", "attn_qkv": "bloom"}[part]
    model = build(family)
    path = write_gguf(tmp_path / "m.gguf", model)
    plain = {info.source_name: info for info in read_gguf_header(path).tensors}
    spec = load_model_spec(path)
    source = f"blk.0.{part}.weight"
    info = next(info for info in spec.tensors.values() if info.source_name == source)
    reader = WeightReader(spec)
    as_it_lies = reader.read(plain[source], torch.float32)
    assert not torch.allclose(reader.read(info, torch.float32), as_it_lies)


def test_27b_models_scale_queries_by_width(tmp_path: Path) -> None:
    model = tiny_model("gemma2", num_layers=2, sliding_window=4, head_dim=16)
    path = write_gguf(tmp_path / "m.gguf", model)
    header = read_gguf_header(path)
    assert config_from_gguf(header, path="x").config["query_pre_attn_scalar"] == 16
    header.metadata["gemma2.block_count"] = 46
    assert config_from_gguf(header, path="x").config["query_pre_attn_scalar"] == 32 // 4


@pytest.mark.parametrize("architecture", UNSUPPORTED)
def test_refused_architectures_say_why(tmp_path: Path, architecture: str) -> None:
    header = read_gguf_header(write_gguf(tmp_path / "m.gguf", build("llama")))
    header.metadata["general.architecture"] = architecture
    with pytest.raises(UnsupportedModel, match=rf"'{architecture}' .*\(it"):
        config_from_gguf(header, path="m.gguf")


def test_a_stack_that_is_none(tmp_path: Path) -> None:
    def extra(writer: Any) -> None:
        writer.add_tensor("blk.1.ffn_up_exps.weight", torch.zeros(8).numpy())

    path = write_gguf(tmp_path / "m.gguf", build("qwen3"), extra=extra)
    with pytest.raises(UnsupportedModel, match=r"'blk\.1\.ffn_up_exps\.weight'"):
        load_model_spec(path)
    data = path.read_bytes().replace(b"qwen3.", b"qwen9.")
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"attention\.head_count"):
        load_model_spec(path)


# Of each way in which a file's tensors differ from the model's one runs in the fast part.
IN_THE_FAST_PART = {"llama", "mixtral", "gemma3_text", "gpt2", "bloom"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in IN_THE_FAST_PART else pytest.mark.slow)
        for name in VARIANTS
    ],
)
def test_stages_of_a_gguf_equal_the_model(tmp_path: Path, name: str) -> None:
    model = build(name)
    path = write_gguf(tmp_path / "m.gguf", model)
    num_layers = model.config.num_hidden_layers
    tokens, logits = StageChain(path, sizes=(1, num_layers - 1)).generate(PROMPT, 2)
    expected = reference_logits(model, PROMPT + tokens[:1])
    assert_same_logits(logits, expected)
