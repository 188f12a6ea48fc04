"""Ranks of a stage with weights in low bits: they hold what one alone holds, cut."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.inference.stage_engine import StageEngine
from stagemesh.model_spec import ModelSpec, load_model_spec
from stagemesh.models.low_bit_kernels import LowBitKernels
from stagemesh.models.quantized_linear import Int4Linear, Int8Linear
from stagemesh.placement.tensor_shares import TensorShares
from tests.inference.quantized.comparing import distance, load_whole, logits_of, multiply_in_float32
from tests.support.checkpoints import write_tiny_checkpoint, write_tiny_gguf
from tests.support.ranks import run_ranks
from tests.support.tensor_stages import load_rank, shares_of

CPU = torch.device("cpu")
PROMPT = [3, 14, 15, 92, 65, 35, 89]
# Each rank's part of each matrix is whole blocks of every processor's 4-bit layout.
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 112,
}
ALIGNED, UNALIGNED = (192, 64), (90, 166)
BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


@pytest.fixture(params=["gguf", "safetensors"])
def spec(request: pytest.FixtureRequest, tmp_path: Path) -> ModelSpec:
    """The blocks of a file, or floats."""
    if request.param == "safetensors":
        return load_model_spec(write_tiny_checkpoint(tmp_path / "m", **SIZES))
    path = write_tiny_gguf(tmp_path / "m", matrix_type="Q4_1", embedding_type="Q8_0", **SIZES)
    return load_model_spec(path)


def cut(spec: ModelSpec, columns: tuple[int, int]) -> TensorShares:
    even = shares_of(spec, 2)
    return TensorShares(
        num_kv_heads=even.num_kv_heads,
        query_heads=even.query_heads,
        mlp_columns=columns,
        vocab_rows=even.vocab_rows,
    )


def on_ranks(
    spec: ModelSpec,
    columns: tuple[int, int],
    quantize: str,
    see: Callable[[StageEngine], Any],
) -> list[Any]:
    def run(group: ProcessGroup) -> Any:
        return see(load_rank(spec, group, cut(spec, columns), quantize=quantize))

    return run_ranks(2, run, timeout_seconds=20.0)


def held_weights(engine: StageEngine) -> dict[str, torch.Tensor]:
    """Each low-bit matrix by the name that it has alone, as the kernels read it."""
    return {
        name.removesuffix(".linear"): weight_of(module)
        for name, module in engine.stage.model.named_modules()
        if isinstance(module, Int4Linear | Int8Linear)
    }


def weight_of(module: nn.Module) -> torch.Tensor:
    if isinstance(module, Int8Linear):
        return module.values.float() * module.scales.float()[:, None]
    assert isinstance(module, Int4Linear)
    kernels = LowBitKernels.of(CPU)
    return kernels.unpack_int4(module.packed, module.scales_zeros).T


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_the_parts_of_the_ranks_are_the_whole(spec: ModelSpec, quantize: str) -> None:
    """To the bit: cuts are on borders of groups, and a row has one scale on all ranks."""
    whole = held_weights(load_whole(spec, quantize))
    parts = on_ranks(spec, ALIGNED, quantize, held_weights)
    assert len(whole) == 7 * spec.num_layers + 1
    for name, expected in whole.items():
        is_by_rows = name.endswith(BY_ROWS) or name == "lm_head"
        pieces = [part[name] for part in parts]
        assert torch.equal(torch.cat(pieces, dim=0 if is_by_rows else 1), expected), name
        # Negative control: the ranks the other way round.
        assert not torch.equal(torch.cat(pieces[::-1], dim=0 if is_by_rows else 1), expected), name


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_ranks_differ_from_one_alone_by_rounding_only(
    spec: ModelSpec, quantize: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 1e-5 where products are in float32, within some roundings where in bfloat16.

    The kernels for few rows give bfloat16, so partial sums are rounded before they are added up.
    """
    got = {"bfloat16": both_ways(spec, quantize)}
    multiply_in_float32(monkeypatch)
    got["float32"] = both_ways(spec, quantize)
    assert got["bfloat16"] < 2e-2
    assert got["float32"] < 1e-5


def both_ways(spec: ModelSpec, quantize: str) -> float:
    expected = logits_of(load_whole(spec, quantize), PROMPT)
    runs = on_ranks(spec, ALIGNED, quantize, lambda engine: logits_of(engine, PROMPT))
    # Negative control: the ranks the other way round.
    assert distance(torch.cat(runs[::-1], dim=-1), expected) > 0.2
    return distance(torch.cat(runs, dim=-1), expected)


def test_a_layer_cut_inside_a_group_is_held_in_8_bits(
    spec: ModelSpec, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="stagemesh.models.quantized_stage"):
        kinds = on_ranks(spec, UNALIGNED, "int4", lambda engine: type(down_of(engine)))
    assert kinds == [Int8Linear, Int8Linear]
    assert "down_proj is held in 8 bits" in caplog.text
    assert on_ranks(spec, ALIGNED, "int4", lambda e: type(down_of(e))) == [Int4Linear, Int4Linear]


def down_of(engine: StageEngine) -> nn.Module:
    return engine.stage.model.get_submodule("model.layers.0.mlp.down_proj.linear")
