"""Experts in low bits: what they compute, what ranks have of them, and what is planned."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.model_cost import held_model_cost
from stagemesh.checkpoint.low_bit import fits_int4
from stagemesh.comm.process_group import ProcessGroup
from stagemesh.inference.stage_engine import StageEngine
from stagemesh.model_spec import ModelSpec, load_model_spec
from stagemesh.models.low_bit_values import (
    quantize_groups,
    quantize_rows,
    weight_of_groups,
    weight_of_rows,
)
from stagemesh.models.quantized_experts import LowBitExperts
from stagemesh.models.quantized_linear import Int4Linear, Int8Linear
from tests.inference.quantized.comparing import distance, load_whole, logits_of, multiply_in_float32
from tests.support.checkpoints import edit_tensors, write_tiny_checkpoint
from tests.support.ranks import run_ranks
from tests.support.tensor_stages import load_rank, shares_of
from tools.families.tiny_configs import tiny_model

CPU = torch.device("cpu")
PROMPT = [3, 14, 15, 92, 65, 35, 89]
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
# mixtral's experts are joined from w1 and w3; deepseek has shared experts and a dense layer, too.
FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3")
BACK: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "int8": lambda weight: weight_of_rows(*quantize_rows(weight)),
    "int4": lambda weight: weight_of_groups(*quantize_groups(weight)),
}


@pytest.fixture(autouse=True)
def in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply_in_float32(monkeypatch)


def write_with_each_expert_apart(folder: Path, family: str) -> ModelSpec:
    sizes = dict(SIZES)
    if family == "deepseek_v3":  # has a key for each query head, of a size that it derives
        del sizes["num_key_value_heads"], sizes["head_dim"]
    tiny_model(family, sizes).save_pretrained(folder)
    return load_model_spec(folder)


def experts_of(engine: StageEngine) -> list[LowBitExperts]:
    return [m for m in engine.stage.model.modules() if isinstance(m, LowBitExperts)]


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_compute_what_the_same_weights_do(
    tmp_path: Path, family: str, quantize: str
) -> None:
    spec = write_with_each_expert_apart(tmp_path, family)
    engine = load_whole(spec, quantize)
    before = logits_of(load_whole(spec, "none"), PROMPT)
    got = logits_of(engine, PROMPT)
    held = experts_of(engine)
    assert held
    low = {type(linear) for module in held for linear in (*module.gate_up, *module.down)}
    assert low == {Int8Linear if quantize == "int8" else Int4Linear}
    others = {
        name.replace(".experts.experts", ".experts")
        for name, module in engine.stage.model.named_modules()
        if isinstance(module, Int8Linear | Int4Linear)
    }

    def there_and_back(name: str, value: torch.Tensor) -> torch.Tensor:
        is_expert = ".experts." in name
        if is_expert or name.removesuffix(".weight") in others:
            in_4 = quantize == "int4" and ".layers." in name and fits_int4(*value.shape)
            return BACK["int4" if in_4 else "int8"](value)
        return BACK["int8"](value) if name == "model.embed_tokens.weight" else value

    edit_tensors(tmp_path, lambda tensors: {n: there_and_back(n, t) for n, t in tensors.items()})
    expected = logits_of(load_whole(load_model_spec(tmp_path), "none"), PROMPT)
    # Matrices of few rows go through the 4-bit kernel always, which multiplies in bfloat16.
    has_small = family == "deepseek_v3" and quantize == "int4"
    assert distance(got, expected) < (5e-3 if has_small else 1e-5)
    # Negative control: the weights before they were rounded.
    assert distance(got, before) > (5e-2 if has_small else 1e-3)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_planned_is_held(tmp_path: Path, family: str, quantize: str) -> None:
    spec = write_with_each_expert_apart(tmp_path, family)
    check_plan(spec, quantize)
    plain = held_model_cost(spec, dtype="float32")
    cost = held_model_cost(spec, dtype="float32", quantize=quantize)
    assert sum(plain.layer_bytes) > 2.5 * sum(cost.layer_bytes)


def test_experts_that_the_file_stacks_stay_as_they_are(tmp_path: Path) -> None:
    spec = load_model_spec(write_tiny_checkpoint(tmp_path / "m", "mixtral", **SIZES))
    assert not experts_of(check_plan(spec, "int8"))


def check_plan(spec: ModelSpec, quantize: str) -> StageEngine:
    engine = load_whole(spec, quantize)
    cost = held_model_cost(spec, dtype="float32", quantize=quantize)
    costs = sum(cost.layer_bytes) + cost.embedding_bytes + cost.norm_bytes
    costs += 0 if cost.tied else cost.head_bytes
    assert costs == pytest.approx(engine.stage.weight_bytes, rel=0.02)
    return engine


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES[:2])
def test_ranks_have_columns_of_each_expert(tmp_path: Path, family: str, quantize: str) -> None:
    spec = write_with_each_expert_apart(tmp_path, family)
    alone = logits_of(load_whole(spec, quantize), PROMPT)

    def run(group: ProcessGroup) -> tuple[torch.Tensor, set[type]]:
        engine = load_rank(spec, group, shares_of(spec, 2), quantize=quantize)
        down = {type(linear) for module in experts_of(engine) for linear in module.down}
        return logits_of(engine, PROMPT), down

    runs = run_ranks(2, run, timeout_seconds=20.0)
    assert [kinds for _, kinds in runs] == [{Int8Linear if quantize == "int8" else Int4Linear}] * 2
    parts = [logits for logits, _ in runs]
    assert distance(torch.cat(parts, dim=-1), alone) < 1e-5
    # Negative control: the ranks the other way round.
    assert distance(torch.cat(parts[::-1], dim=-1), alone) > 0.2
