"""Our attention over ragged segments against transformers' own attention functions."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as eager_softcap
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as eager_sinks
from transformers.models.llama.modeling_llama import eager_attention_forward as eager

from stagemesh.errors import UnsupportedModel
from stagemesh.inference.attention import (
    STEP_ARGUMENT,
    MaskRule,
    SegmentSpan,
    StepContext,
    mask_rule,
    segment_attention,
)
from stagemesh.inference.kv_cache import KVCache, KVLayout

KV_HEADS, HEAD_DIM = 2, 8
FIRST_LAYER = 5

RULES: dict[str, Callable[..., Any]] = {
    "causal": causal_mask_function,
    "sliding 3": sliding_window_causal_mask_function(3),
    "sliding 1": sliding_window_causal_mask_function(1),
    "chunked 4": chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long)),
}

# Per step the tokens that each session adds: whole prefills, chunks, decodes, and mixes of them.
SCHEDULES: dict[str, list[dict[int, int]]] = {
    "one prefill": [{1: 11}],
    "prefill, then decode": [{1: 7}, {1: 1}, {1: 1}, {1: 1}],
    "chunks": [{1: 4}, {1: 3}, {1: 1}, {1: 5}],
    "ragged prefills": [{1: 3, 2: 8, 3: 1}],
    "mixed": [{1: 5}, {2: 4, 1: 1}, {1: 1, 3: 6, 2: 3}, {3: 1, 2: 1, 1: 1}, {4: 2, 1: 2}],
}


class Layer(nn.Module):
    """What a family's attention layer shows to an attention function."""

    def __init__(self, num_heads: int, sinks: torch.Tensor | None) -> None:
        super().__init__()
        self.layer_idx = FIRST_LAYER
        self.num_key_value_groups = num_heads // KV_HEADS
        self.is_causal = True
        self.sinks = sinks
        self.eval()


class Sequences:
    """Random queries, keys and values of a few sessions, and the whole attention of each."""

    def __init__(self, schedule: list[dict[int, int]], num_heads: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.lengths: dict[int, int] = {}
        for step in schedule:
            for session, count in step.items():
                self.lengths[session] = self.lengths.get(session, 0) + count

        def rows(heads: int, length: int) -> torch.Tensor:
            return torch.randn(1, heads, length, HEAD_DIM, generator=generator)

        self.query = {s: rows(num_heads, n) for s, n in self.lengths.items()}
        self.key = {s: rows(KV_HEADS, n) for s, n in self.lengths.items()}
        self.value = {s: rows(KV_HEADS, n) for s, n in self.lengths.items()}


def run_ragged(
    sequences: Sequences,
    schedule: list[dict[int, int]],
    layer: Layer,
    rule: Callable[..., Any],
    **arguments: Any,
) -> dict[int, torch.Tensor]:
    """Our attention, step by step; the rows of each session, [1, length, H, D]."""
    layout = KVLayout(
        num_layers=1,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    cache = KVCache(layout, limit_bytes=2**20, block_tokens=4)
    done = dict.fromkeys(sequences.lengths, 0)
    outputs: dict[int, list[torch.Tensor]] = {s: [] for s in sequences.lengths}
    for step in schedule:
        spans, offset = [], 0
        parts: list[tuple[int, int, int]] = []
        for session, count in step.items():
            start = done[session]
            held = cache.reserve(session, start_position=start, num_tokens=count)
            spans.append(SegmentSpan(held, offset, count, start))
            parts.append((session, start, start + count))
            offset += count
        context = StepContext(spans, first_layer=FIRST_LAYER)
        result, _ = segment_attention(
            layer,
            torch.cat([sequences.query[s][:, :, a:b] for s, a, b in parts], dim=2),
            torch.cat([sequences.key[s][:, :, a:b] for s, a, b in parts], dim=2),
            torch.cat([sequences.value[s][:, :, a:b] for s, a, b in parts], dim=2),
            mask_rule(mask_function=rule),
            **arguments,
            **{STEP_ARGUMENT: context},
        )
        assert context.attended_layers == [0]
        for (session, _, end), span in zip(parts, spans, strict=True):
            rows = slice(span.offset, span.offset + span.num_tokens)
            outputs[session].append(result[:, rows])
            span.session.length = done[session] = end
    return {session: torch.cat(rows, dim=1) for session, rows in outputs.items()}


def whole_mask(rule: Callable[..., Any], length: int) -> torch.Tensor:
    """What each query of a whole sequence sees, one pair after the other."""
    index = [torch.tensor(i) for i in range(length)]
    return torch.tensor([[bool(rule(index[0], index[0], q, k)) for k in index] for q in index])


@pytest.mark.parametrize("num_heads", [2, 6])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", ["plain", "softcap", "sinks"])
def test_ragged_steps_equal_whole_sequences(
    num_heads: int, rule: str, schedule: str, kind: str
) -> None:
    steps = SCHEDULES[schedule]
    sequences = Sequences(steps, num_heads)
    sinks = torch.randn(num_heads) if kind == "sinks" else None
    layer = Layer(num_heads, sinks)
    scaling = 0.3
    arguments: dict[str, Any] = {"scaling": scaling}
    if kind == "softcap":
        arguments["softcap"] = 1.5
    if sinks is not None:
        arguments["s_aux"] = sinks
    outputs = run_ragged(sequences, steps, layer, RULES[rule], **arguments)
    for session, length in sequences.lengths.items():
        allowed = whole_mask(RULES[rule], length)
        minus = torch.zeros(1, 1, length, length).masked_fill(~allowed, torch.finfo().min)
        held = (sequences.query[session], sequences.key[session], sequences.value[session])
        if kind == "softcap":
            expected, _ = eager_softcap(layer, *held, minus, scaling=scaling, softcap=1.5)
        elif kind == "sinks":
            expected, _ = eager_sinks(layer, *held, minus, scaling=scaling)
        else:
            expected, _ = eager(layer, *held, minus, scaling=scaling)
            fused, _ = sdpa_attention_forward(layer, *held, allowed[None, None], scaling=scaling)
            torch.testing.assert_close(outputs[session], fused, rtol=0, atol=1e-5)
        torch.testing.assert_close(outputs[session], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("wrong", ["sliding 3", "chunked 4"])
def test_the_comparison_sees_a_wrong_rule(wrong: str) -> None:
    steps = SCHEDULES["mixed"]
    sequences = Sequences(steps, 2)
    layer = Layer(2, None)
    right = run_ragged(sequences, steps, layer, RULES["causal"])
    other = run_ragged(sequences, steps, layer, RULES[wrong])
    assert float((right[1] - other[1]).abs().max()) > 1e-2


def test_scores_are_scaled_by_the_head_dim_when_nothing_else_is_said() -> None:
    steps = SCHEDULES["mixed"]
    sequences = Sequences(steps, 2)
    layer = Layer(2, None)
    said = run_ragged(sequences, steps, layer, RULES["sliding 3"], scaling=HEAD_DIM**-0.5)
    unsaid = run_ragged(sequences, steps, layer, RULES["sliding 3"])
    capped = run_ragged(sequences, steps, layer, RULES["sliding 3"], softcap=1e6)
    for session in sequences.lengths:
        torch.testing.assert_close(said[session], unsaid[session])
        torch.testing.assert_close(said[session], capped[session], rtol=0, atol=1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_masks_of_a_rule(rule: str) -> None:
    mask = mask_rule(mask_function=RULES[rule]).mask(3, 9, device=torch.device("cpu"))
    assert torch.equal(mask, whole_mask(RULES[rule], 9)[3:])
    assert mask_rule(mask_function=RULES[rule]).is_causal == (rule == "causal")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({STEP_ARGUMENT: None}, "Layer does not hand its keyword arguments on"),
        ({"attention_mask": None}, "Layer builds its attention mask without"),
        ({"attention_mask": torch.zeros(1, 1, 2, 2)}, "Layer builds its attention mask without"),
        ({"position_bias": torch.zeros(1)}, r"Layer asks attention for \['position_bias'\]"),
        ({"dropout": 0.1}, "Layer asks attention for dropout"),
    ],
)
def test_what_we_do_not_do_is_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    tensor = torch.zeros(1, 2, 2, HEAD_DIM)
    known: dict[str, Any] = {
        STEP_ARGUMENT: StepContext([], first_layer=0),
        "attention_mask": MaskRule(causal_mask_function, is_causal=True),
        "sliding_window": 4,
        "position_ids": torch.zeros(1, 2),
        "use_cache": False,
    }
    with pytest.raises(UnsupportedModel, match=message):
        segment_attention(Layer(2, None), tensor, tensor, tensor, **(known | arguments))
