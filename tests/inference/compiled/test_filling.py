"""Steps with fewer tokens than a form has are filled up, and attention does not see it."""

from typing import Any

import torch
from torch import nn

from stagemesh.inference.attention import (
    STEP_ARGUMENT,
    MaskRule,
    SegmentSpan,
    StepContext,
    segment_attention,
)
from stagemesh.inference.compiled.attention_op import RunningLayer, running
from stagemesh.inference.compiled.code import CompiledForward, Filler, Packages
from stagemesh.inference.compiled.layer_call import note_call
from stagemesh.inference.compiled.linear_forms import MANY
from stagemesh.inference.kv_cache import KVCache, KVLayout

RULE = MaskRule(lambda _b, _h, q, k: k <= q, is_causal=True)
LAYOUT = KVLayout(
    num_layers=1, num_kv_heads=2, head_dim=8, dtype=torch.float32, device=torch.device("cpu")
)


def test_a_head_of_three_tokens_runs_the_form_of_four() -> None:
    head = nn.Linear(8, 5).requires_grad_(requires_grad=False)
    seen: list[int] = []

    def code(weights: list[torch.Tensor], tensors: list[torch.Tensor]) -> torch.Tensor:
        seen.append(tensors[0].shape[1])
        return nn.functional.linear(tensors[0], *weights)

    forward = CompiledForward(
        head,
        call=note_call(((torch.zeros(1, 5, 8),), {}), ((torch.zeros(1, 7, 8),), {})),
        packages=Packages({1: code, 4: code, MANY: code}),
        layer=None,
        filler=Filler(),
    )
    for count in (1, 2, 3, 4, 5, 30):
        x = torch.randn(1, count, 8)
        torch.testing.assert_close(forward(x), head(x))
    assert seen == [1, 4, 4, 4, 5, 30]


def attend(query: torch.Tensor, key: torch.Tensor, *, count: int, compiled: bool) -> torch.Tensor:
    """Attention of a session's first `count` tokens, as its value the key."""
    session = KVCache(LAYOUT, limit_bytes=2**20).reserve(1, start_position=0, num_tokens=count)
    step = StepContext([SegmentSpan(session, 0, count, 0)], first_layer=7)
    layer: Any = RunningLayer(step, RULE, 7)
    if compiled:
        with running(layer):
            out: torch.Tensor = torch.ops.stagemesh.attend(query, key, key, None, 0.5, None)
    else:
        out, _ = segment_attention(
            layer, query, key, key, RULE, scaling=0.5, **{STEP_ARGUMENT: step}
        )
    assert step.attended_layers == [0]
    return out


def test_the_attention_operator_leaves_filled_rows_out() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(1, 4, 8, 8), torch.randn(1, 2, 8, 8)
    expected = attend(query[:, :, :5], key[:, :, :5], count=5, compiled=False)
    got = attend(query, key, count=5, compiled=True)
    assert got.is_contiguous()
    assert torch.equal(got[:, :5], expected)
    assert not got[:, 5:].any()
    # Rows behind the step's tokens may hold anything.
    key[:, :, 5:] = torch.nan
    assert torch.equal(attend(query, key, count=5, compiled=True), got)


def test_what_all_layers_are_given_is_filled_once() -> None:
    filler, tensor = Filler(), torch.ones(1, 3, 2)
    first = filler.fill(tensor, 1, 4)
    assert filler.fill(tensor, 1, 4) is first
    assert first[0].tolist() == [[1, 1], [1, 1], [1, 1], [0, 0]]
    assert filler.fill(tensor, 1, 8).shape == (1, 8, 2)
    assert filler.fill(tensor.clone(), 1, 4) is not first
