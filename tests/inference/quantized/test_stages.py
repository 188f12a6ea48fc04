"""Stages with weights in low bits: what they hold, what they answer, and what is planned."""

from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.model_cost import held_model_cost
from stagemesh.checkpoint.low_bit import Role, held_form
from stagemesh.errors import ConfigError
from stagemesh.inference import attention
from stagemesh.model_spec import ModelSpec, load_model_spec
from stagemesh.models.builder import StageModel, build_stage
from stagemesh.models.low_bit_kernels import LowBitKernels
from stagemesh.models.low_bit_values import (
    quantize_groups,
    quantize_rows,
    weight_of_groups,
    weight_of_rows,
)
from stagemesh.models.quantized_linear import Int4Linear, Int8Embedding, Int8Linear
from stagemesh.models.weights import WeightReader
from tests.inference.quantized.comparing import distance, load_whole, logits_of
from tests.support.checkpoints import edit_tensors, write_tiny_checkpoint, write_tiny_gguf

CPU = torch.device("cpu")
PROMPT = [3, 14, 15, 92, 65, 35, 89]
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "head_dim": 16,
    "vocab_size": 112,
}


def build(spec: ModelSpec, quantize: str, *, span: tuple[int, int] | None = None) -> StageModel:
    attention.register()
    start, end = span or (0, spec.num_layers)
    return build_stage(
        spec,
        start_layer=start,
        end_layer=end,
        dtype="float32",
        device=CPU,
        attention=attention.ATTENTION_NAME,
        quantize=quantize,
    )


@pytest.mark.parametrize("matrix_type", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_blocks_of_a_file_are_held_as_they_are(
    tmp_path: Path, family: str, matrix_type: str
) -> None:
    """Each weight against gguf-py's, in the model's order of rows (llama's q and k change it)."""
    path = write_tiny_gguf(
        tmp_path / "m",
        family,
        num_layers=2,
        matrix_type=matrix_type,
        embedding_type="Q8_0",
        **SIZES,
    )
    spec = load_model_spec(path)
    model = build(spec, "auto").model
    reader, kernels = WeightReader(spec), LowBitKernels.of(CPU)
    found = set()
    for name, module in model.named_modules():
        if isinstance(module, Int4Linear):
            expected = reader.read(spec.tensors[f"{name}.weight"], torch.float32)
            got = kernels.matmul_int4(
                torch.eye(module.in_features), module.packed, module.scales_zeros
            ).T
            limit = 2**-7 * expected.abs().max()
        elif isinstance(module, Int8Linear | Int8Embedding):
            expected = reader.read(spec.tensors[f"{name}.weight"], torch.float32)
            held = module.weight if isinstance(module, Int8Embedding) else module.values
            got = weight_of_rows(held, module.scales)
            limit = 0.501 * module.scales.float()[:, None]
        else:
            continue
        found.add(type(module))
        assert ((got - expected).abs() <= limit).all(), name
        # Negative control: rows in another order are far off.
        assert not ((got.roll(1, 0) - expected).abs() <= limit).all(), name
    first = Int8Linear if matrix_type == "Q8_0" else Int4Linear
    assert found == {first, Int8Linear, Int8Embedding}


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
def test_a_stage_answers_as_one_with_the_same_weights_in_float32(
    tmp_path: Path, family: str, quantize: str
) -> None:
    extra: dict[str, Any] = {"pad_token_id": 0} if family == "phi3" else {}
    path = write_tiny_checkpoint(tmp_path / "m", family, **SIZES, **extra)
    before = logits_of(load_whole(load_model_spec(path), "none"), PROMPT)
    got = logits_of(load_whole(load_model_spec(path), quantize), PROMPT)
    infos = load_model_spec(path).tensors

    def there_and_back(name: str, value: torch.Tensor) -> torch.Tensor:
        role: Role = "layer" if ".layers." in name else "head"
        form = held_form(infos[name], role=role, quantize=quantize)
        if form == "plain":
            return value
        if form == "int8":
            return weight_of_rows(*quantize_rows(value))
        return weight_of_groups(*quantize_groups(value))

    edit_tensors(path, lambda tensors: {n: there_and_back(n, t) for n, t in tensors.items()})
    expected = logits_of(load_whole(load_model_spec(path), "none"), PROMPT)
    # Activations in bfloat16 on the one side.
    assert distance(got, expected) < 0.03
    if quantize == "int4":  # Negative control: the weights before they were rounded.
        assert distance(got, before) > 0.1


@pytest.mark.parametrize("quantize", ["auto", "int8", "int4"])
@pytest.mark.parametrize("span", [(0, 4), (0, 1), (1, 3), (2, 4)])
@pytest.mark.parametrize("tied", [True, False])
def test_what_is_planned_is_held(
    tmp_path: Path, quantize: str, span: tuple[int, int], tied: bool
) -> None:
    config: dict[str, Any] = {"tie_word_embeddings": True} if tied else {}
    if quantize == "auto":
        path = write_tiny_gguf(
            tmp_path / "m", matrix_type="Q4_1", embedding_type="Q8_0", **SIZES, **config
        )
    else:
        path = write_tiny_checkpoint(tmp_path / "m", "qwen2", **SIZES, **config)
    spec = load_model_spec(path)
    cost = held_model_cost(spec, dtype="float32", quantize=quantize)
    held = build(spec, quantize, span=span).weight_bytes
    costs = sum(cost.layer_bytes[slice(*span)])
    costs += cost.embedding_bytes if span[0] == 0 else 0
    if span[1] == 4:
        costs += cost.norm_bytes + (0 if cost.tied and span[0] == 0 else cost.head_bytes)
    assert costs == pytest.approx(held, rel=0.02)
    plain = held_model_cost(spec, dtype="float32")
    assert sum(plain.layer_bytes) > 2.5 * sum(cost.layer_bytes)
    # Low bits change what is read, and not what is computed.
    assert cost.token_flops(context_tokens=9) == plain.token_flops(context_tokens=9)


def test_what_is_left_alone_and_what_is_refused(tmp_path: Path) -> None:
    spec = load_model_spec(write_tiny_checkpoint(tmp_path / "m", **SIZES))
    infos = spec.tensors
    norm = infos["model.layers.0.input_layernorm.weight"]
    assert held_form(norm, role="layer", quantize="int4") == "plain"
    down = infos["model.layers.0.mlp.down_proj.weight"]
    assert held_form(down, role="layer", quantize="int4") == "int4"
    assert held_form(down, role="head", quantize="int4") == "int8"
    assert held_form(down, role="layer", quantize="auto") == "plain"
    with pytest.raises(ConfigError, match="quantize must be one of none, auto, int8, int4"):
        build(spec, "int3")
