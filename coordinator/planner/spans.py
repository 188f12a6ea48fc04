"""Sums over any span of layers, from prefix sums: bytes by what divides them, and FLOPs."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coordinator.model_cost import ModelCost
from coordinator.planner.profiles import Workload

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def _prefix(values: tuple[int, ...]) -> Ints:
    return np.concatenate(([0], np.cumsum(np.array(values, dtype=np.int64)))).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What layers [start, end) amount to."""

    num_layers: int
    is_first: bool
    is_last: bool
    attention_bytes: int
    """Divided by KV groups."""
    mlp_bytes: int
    """Divided by MLP columns."""
    rest_bytes: int
    """On every rank: norms, biases; the final norm on the last stage."""
    ends_bytes: int
    """Embedding and head, divided evenly over ranks."""


class ModelSpans:
    """Spans of one model; a span's sums are differences of two prefix sums."""

    def __init__(self, model: ModelCost) -> None:
        self.model = model
        self.attention = _prefix(model.split_attention_bytes)
        self.mlp = _prefix(model.split_mlp_bytes)
        self.whole = _prefix(model.layer_bytes)

    def span(self, start_layer: int, end_layer: int) -> Span:
        """The sums of layers [start_layer, end_layer)."""
        model = self.model
        is_first, is_last = start_layer == 0, end_layer == model.num_layers
        attention = int(self.attention[end_layer] - self.attention[start_layer])
        mlp = int(self.mlp[end_layer] - self.mlp[start_layer])
        whole = int(self.whole[end_layer] - self.whole[start_layer])
        ends = model.embedding_bytes if is_first else 0
        if is_last and not (is_first and model.tied):
            ends += model.head_bytes
        return Span(
            num_layers=end_layer - start_layer,
            is_first=is_first,
            is_last=is_last,
            attention_bytes=attention,
            mlp_bytes=mlp,
            rest_bytes=whole - attention - mlp + (model.norm_bytes if is_last else 0),
            ends_bytes=ends,
        )


def expert_share(model: ModelCost, *, rows: float) -> float:
    """Part of the MLP weights that a step of so many tokens reads.

    Each token visits k of E experts; with independent choices an expert stays unread by all rows
    with probability (1 - k/E)^rows.
    """
    return 1.0 - (1.0 - model.experts_per_token / model.num_experts) ** rows


def step_tokens(workload: Workload) -> int:
    """Rows of the largest step."""
    return min(workload.max_step_tokens, workload.max_context_tokens * workload.concurrency)
