"""Attention over ragged segments and the stage's own KV cache, inside the families' own layers.

transformers lets a model name its attention function and its mask function. Ours are registered
under `ATTENTION_NAME`:

- the mask function builds no mask. It returns a `MaskRule`: the family's own predicate over
  (query position, key position), be it causal, sliding or chunked;
- the attention function takes the flat token axis of a step, writes each segment's keys and values
  behind those of its session, and attends segment by segment, evaluating the rule on absolute
  positions. A session is therefore never masked against another, and nothing is padded.

Shapes, with the legend T tokens of the step, H query heads, Kv key/value heads, D head dim,
L tokens that a session holds: query [1, H, T, D], key and value [1, Kv, T, D], result [1, T, H, D].
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from stagemesh.errors import UnsupportedModel
from stagemesh.inference.kv_cache import Session
from stagemesh.models.kv_shape import KVShape

ATTENTION_NAME = "stagemesh"
STEP_ARGUMENT = "stagemesh_step"

# Arguments that families pass and that do not change the result of our attention.
_NEUTRAL_ARGUMENTS = frozenset(
    {
        STEP_ARGUMENT,
        "cache",
        "is_causal",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_ids",
        "return_dict",
        "sliding_window",  # the MaskRule has it already
        "use_cache",
    }
)


@dataclass(frozen=True, slots=True)
class MaskRule:
    """Which keys a query sees, as a predicate over absolute positions."""

    predicate: Callable[[Any, Any, torch.Tensor, torch.Tensor], torch.Tensor]
    """transformers' mask function: (batch, head, query position, key position) -> bool."""
    is_causal: bool
    """The predicate is plain causality: a query sees all keys up to its own position."""

    def mask(self, start: int, end: int, *, device: torch.device) -> torch.Tensor:
        """Evaluate for queries [start, end) and keys [0, end): bool [end - start, end]."""
        queries = torch.arange(start, end, device=device)[:, None]
        keys = torch.arange(end, device=device)[None, :]
        zero = torch.zeros((), dtype=torch.long, device=device)
        return self.predicate(zero, zero, queries, keys).expand(end - start, end)


@dataclass(frozen=True, slots=True)
class SegmentSpan:
    """Where a segment lies in the step, and whose it is."""

    session: Session
    offset: int
    """First index in the token axis."""
    num_tokens: int
    start_position: int
    """Position of the first token in the session."""


class AttentionSeen(Exception):
    """Ends a layer whose keys and values have been seen."""


class StepContext:
    """What attention needs of the running step; made per step, passed through the model's kwargs.

    Args:
        spans: the segments in token order.
        first_layer: model-wide index of the stage's first layer.
    """

    __slots__ = ("attended_layers", "first_layer", "kv_shapes", "masks", "spans")

    def __init__(self, spans: list[SegmentSpan], *, first_layer: int) -> None:
        self.spans = spans
        self.first_layer = first_layer
        # The layers that came by; the warm-up checks that they are exactly the stage's.
        self.attended_layers: list[int] = []
        # What each layer keeps of a token, noted by a step without segments; see `kv_probe`.
        self.kv_shapes: list[KVShape] = []
        # Masks of this step by (rule, span): layers of one kind share them.
        self.masks: dict[tuple[int, int], torch.Tensor] = {}

    def note_shape(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Note what a layer keeps, of which nothing is kept.

        Raises:
            AttentionSeen: always.
        """
        self.kv_shapes.append(
            KVShape(num_heads=key.shape[1], key_dim=key.shape[3], value_dim=value.shape[3])
        )
        raise AttentionSeen

    def mask_of(self, rule: MaskRule, index: int, *, device: torch.device) -> torch.Tensor:
        """The mask of segment `index` under `rule`, evaluated once per step."""
        key = (id(rule), index)
        if key not in self.masks:
            span = self.spans[index]
            end = span.start_position + span.num_tokens
            self.masks[key] = rule.mask(span.start_position, end, device=device)
        return self.masks[key]


def mask_rule(*, mask_function: Callable[..., torch.Tensor], **_: Any) -> MaskRule:
    """Mask function for transformers: keep the predicate, build nothing."""
    causal: Callable[..., Any] = causal_mask_function
    return MaskRule(mask_function, is_causal=mask_function is causal)


def segment_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: MaskRule | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function for transformers.

    Args:
        module: the family's attention layer; its `layer_idx` names the layer.
        query: [1, H, T, D].
        key: [1, Kv, T, D].
        value: [1, Kv, T, D].
        attention_mask: what `mask_rule` returned.
        scaling: factor of the scores; 1 / sqrt(D) when None.
        dropout: must be 0.
        softcap: scores become softcap * tanh(scores / softcap).
        s_aux: sink logits [H], one extra column in the softmax that has no value.
        **kwargs: must have the step under `STEP_ARGUMENT`.

    Returns:
        [1, T, H, D] and None.

    Raises:
        UnsupportedModel: the family builds its mask on its own or asks for something else than the
            arguments above.
    """
    step = _step_of(module, attention_mask, dropout, kwargs)
    assert attention_mask is not None
    layer = int(module.layer_idx) - step.first_layer  # type: ignore[arg-type]
    step.attended_layers.append(layer)
    if not step.spans:
        step.note_shape(key, value)
    is_plain = softcap is None and s_aux is None
    outputs = []
    for index, span in enumerate(step.spans):
        tokens = slice(span.offset, span.offset + span.num_tokens)
        end = span.start_position + span.num_tokens
        keys, values = span.session.keys[layer], span.session.values[layer]
        keys[:, span.start_position : end].copy_(key[0, :, tokens])
        values[:, span.start_position : end].copy_(value[0, :, tokens])
        held = (query[:, :, tokens], keys[None, :, :end], values[None, :, :end])
        if is_plain and attention_mask.is_causal and span.num_tokens == 1:
            outputs.append(_decode(*held, scaling=scaling))
        elif is_plain and attention_mask.is_causal and span.start_position == 0:
            outputs.append(_prefill_from_zero(*held, scaling=scaling))
        else:
            mask = step.mask_of(attention_mask, index, device=query.device)
            outputs.append(
                _masked(*held, mask=mask, scaling=scaling)
                if is_plain
                else _explicit(*held, mask=mask, scaling=scaling, softcap=softcap, sinks=s_aux)
            )
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1), None


def _step_of(
    module: nn.Module, rule: MaskRule | None, dropout: float, kwargs: dict[str, Any]
) -> StepContext:
    step = kwargs.get(STEP_ARGUMENT)
    name = type(module).__name__
    if not isinstance(step, StepContext):
        raise UnsupportedModel(f"{name} does not hand its keyword arguments on to attention")
    if not isinstance(rule, MaskRule):
        raise UnsupportedModel(
            f"{name} builds its attention mask without transformers' mask functions"
        )
    unknown = {k for k, v in kwargs.items() if k not in _NEUTRAL_ARGUMENTS and v is not None}
    if unknown or dropout:
        raise UnsupportedModel(
            f"{name} asks attention for {sorted(unknown) or 'dropout'}, which stagemesh does not do"
        )
    return step


def _decode(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, scaling: float | None
) -> torch.Tensor:
    """One query token that sees all keys: [1, H, 1, D] -> [1, 1, H, D].

    The G = H / Kv query heads of a key head become G query rows of that head, which needs neither a
    mask nor repeated keys.
    """
    _, num_heads, _, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    grouped = query.reshape(1, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = F.scaled_dot_product_attention(grouped, keys, values, scale=scaling)
    return out.reshape(1, 1, num_heads, values.shape[-1])


def _prefill_from_zero(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, scaling: float | None
) -> torch.Tensor:
    """The first tokens of a session, plainly causal: [1, H, n, D] -> [1, n, H, D]."""
    keys, values = _repeat(keys, values, query.shape[1])
    out = F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scaling)
    return out.transpose(1, 2)


def _masked(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    mask: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """Any rule: [1, H, n, D] -> [1, n, H, D]."""
    keys, values = _repeat(keys, values, query.shape[1])
    out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)
    return out.transpose(1, 2)


def _explicit(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    mask: torch.Tensor,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Soft caps and sinks, which fused attention lacks: [1, H, n, D] -> [1, n, H, D]."""
    keys, values = _repeat(keys, values, query.shape[1])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.matmul(query, keys.transpose(2, 3)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        column = sinks.reshape(1, -1, 1, 1).expand(1, query.shape[1], query.shape[2], 1)
        scores = torch.cat([scores, column.to(scores.dtype)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
    if sinks is not None:
        weights = weights[..., :-1]
    return torch.matmul(weights.to(values.dtype), values).transpose(1, 2)


def _repeat(
    keys: torch.Tensor, values: torch.Tensor, num_heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expand Kv heads to H, query head h reading head h // (H / Kv).

    Done here rather than by `enable_gqa`, whose CPU path is several times slower in bf16.
    """
    groups = num_heads // keys.shape[1]
    if groups == 1:
        return keys, values
    return keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)


def register() -> None:
    """Make both functions known to transformers; idempotent."""
    AttentionInterface.register(ATTENTION_NAME, segment_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, mask_rule)
