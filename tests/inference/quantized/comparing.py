"""A whole model as one stage, what it computes for a prompt, and how far two results are apart."""

from dataclasses import replace

import pytest
import torch

from stagemesh.inference.stage_engine import StageEngine
from stagemesh.model_spec import ModelSpec
from stagemesh.models.low_bit_kernels import LowBitKernels
from stagemesh.steps import SamplingParams, Segment, Step


def load_whole(spec: ModelSpec, quantize: str) -> StageEngine:
    return StageEngine.load(
        spec,
        start_layer=0,
        end_layer=spec.num_layers,
        dtype="float32",
        device=torch.device("cpu"),
        kv_limit_bytes=2**26,
        quantize=quantize,
    )


def multiply_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """All products by unpacked tiles, so that only the weights are in few bits."""
    of_processor = LowBitKernels.of
    monkeypatch.setattr(
        LowBitKernels,
        "of",
        lambda device: replace(of_processor(device), int8_rows=0, int4_rows=0, wide=torch.float32),
    )


def logits_of(engine: StageEngine, prompt: list[int]) -> torch.Tensor:
    kept: list[torch.Tensor] = []
    hook = engine.stage.model.register_forward_hook(
        lambda _module, _args, output: kept.append(output.logits[0].float().clone())
    )
    segment = Segment(
        session_id=1,
        start_position=0,
        num_tokens=len(prompt),
        sampling=SamplingParams(),
        target_token_ids=tuple(prompt),
    )
    engine.run(Step(step_id=1, segments=(segment,), token_ids=tuple(prompt)), None)
    hook.remove()
    return kept[0]


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())
