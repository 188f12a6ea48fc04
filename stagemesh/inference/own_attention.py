"""Families whose own code computes attention: one sequence at a time, on the stage's KV cache.

Their layers hand keys and values to a cache of transformers' interface and get all of the
sequence's back. `SessionCache` is one that keeps them in a `Session`, so positions, admission and
memory are the same as for other families. Masks and position biases (alibi, say) are the family's
own.
"""

from typing import Any

import torch
from transformers import Cache

from stagemesh.errors import UnsupportedModel
from stagemesh.inference.attention import SegmentSpan, StepContext


class SessionCache(Cache):
    """Keys and values of one segment's session, as transformers' layers see them.

    Args:
        step: the running step.
        span: the segment; None notes shapes only.
    """

    def __init__(self, step: StepContext, span: SegmentSpan | None) -> None:
        super().__init__(layers=[])
        self._step = step
        self._span = span
        self._start = 0 if span is None else span.start_position
        self._updated: set[int] = set()
        self._count = 0

    @property
    def is_compileable(self) -> bool:
        """No."""
        return False

    @property
    def is_sliding(self) -> list[bool]:
        """All layers keep all tokens; windows are masks."""
        return [False]

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep a layer's keys and values [1, Kv, n, D]; returns those of all tokens so far.

        Raises:
            UnsupportedModel: the layer has been here before, or its keys have another shape.
        """
        layer = layer_idx - self._step.first_layer
        if key_states.dim() != 4 or layer in self._updated:
            raise UnsupportedModel(
                f"layer {layer_idx} keeps keys of shape {list(key_states.shape)}, or more than once"
            )
        self._updated.add(layer)
        self._count = key_states.shape[2]
        if self._span is None or self._span is self._step.spans[0]:
            self._step.attended_layers.append(layer)
        if self._span is None:
            # Ends the layer.
            self._step.note_shape(key_states, value_states)
            raise AssertionError
        session, end = self._span.session, self._start + self._count
        keys, values = session.keys[layer], session.values[layer]
        keys[:, self._start : end].copy_(key_states[0])
        values[:, self._start : end].copy_(value_states[0])
        return keys[None, :, :end], values[None, :, :end]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that a layer keeps; layers of other stages keep what they did before the step."""
        done = (layer_idx or 0) - self._step.first_layer in self._updated
        return self._start + (self._count if done else 0)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Position of the first query."""
        del layer_idx
        return self._start

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Keys that a mask covers, and the first one's position."""
        del layer_idx
        return self._start + query_length, 0


def own_arguments(
    step: StepContext, span: SegmentSpan | None, *, num_tokens: int, device: torch.device
) -> dict[str, object]:
    """What a family's forward needs to compute attention for one segment."""
    start = 0 if span is None else span.start_position
    end = start + num_tokens
    return {
        "position_ids": torch.arange(start, end, device=device)[None],
        # Of all tokens so far: some families count positions and biases from it.
        "attention_mask": torch.ones(1, end, dtype=torch.long, device=device),
        "cache": SessionCache(step, span),
        "use_cache": True,
    }
