"""Families whose files or classes are unlike Llama's: low bits are where the plan has them."""

import statistics
from pathlib import Path

import pytest
import torch

from coordinator.model_cost import held_model_cost
from stagemesh.model_spec import load_model_spec
from tests.inference.quantized.comparing import distance, load_whole, logits_of
from tools.families.tiny_configs import tiny_model

PROMPT = [3, 14, 15, 92, 65]
# Files with other names than the class (exaone, gpt_neox, hy_v3), joined matrices that the class
# has apart (sarvam_moe), transposed ones (gpt2), and classes of their own (falcon, xglm).
FAMILIES = ("exaone", "gpt_neox", "hy_v3", "sarvam_moe", "gpt2", "falcon", "xglm")


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_planned_is_held_and_computes_nearly_the_same(tmp_path: Path, family: str) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    spec = load_model_spec(tmp_path)
    plain, low = load_whole(spec, "none"), load_whole(spec, "int8")
    cost = held_model_cost(spec, dtype="float32", quantize="int8")
    planned = sum(cost.layer_bytes) + cost.embedding_bytes + cost.norm_bytes
    planned += 0 if cost.tied else cost.head_bytes
    assert low.stage.weight_bytes == pytest.approx(planned, rel=0.03)
    # Negative control: in float32 it is far more.
    assert plain.stage.weight_bytes > 1.5 * planned
    expected = logits_of(plain, PROMPT)
    assert middle_distance(logits_of(low, PROMPT), expected) < 0.06
    # Negative control: another token's logits.
    assert middle_distance(expected.roll(1, 0), expected) > 0.3


def middle_distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The median of the tokens': one whose router picks another expert is far off."""
    return statistics.median(distance(*rows) for rows in zip(got, expected, strict=True))
