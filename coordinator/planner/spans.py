"""Sums over any span of layers, from prefix sums: bytes by what divides them, and FLOPs."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from coordinator.model_cost import ModelCost
from coordinator.planner.profiles import Workload

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


def _prefix(values: tuple[int, ...]) -> Ints:
    return np.concatenate(([0], np.cumsum(np.array(values, dtype=np.int64)))).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """What some spans of layers [start, end) amount to; all arrays have one entry per span."""

    num_layers: Ints
    is_first: Bools
    is_last: Bools
    attention_bytes: Ints
    """Divided by KV groups."""
    mlp_bytes: Ints
    """Divided by MLP columns."""
    rest_bytes: Ints
    """On every rank: norms, biases; the final norm on the last stage."""
    ends_bytes: Ints
    """Embedding and head, divided evenly over ranks."""
    attention_elements: Ints
    """Weights of attention, with those on every rank."""
    mlp_elements: Ints
    """Weights of which `mlp_bytes` are the bytes."""

    def __len__(self) -> int:
        return len(self.num_layers)


class ModelSpans:
    """Spans of one model; a span's sums are differences of two prefix sums."""

    def __init__(self, model: ModelCost) -> None:
        self.model = model
        self._attention = _prefix(model.split_attention_bytes)
        self._mlp = _prefix(model.split_mlp_bytes)
        self._whole = _prefix(model.layer_bytes)
        size = model.element_bytes
        self._attention_elements = _prefix(
            model.attention_elements or tuple(b // size for b in model.split_attention_bytes)
        )
        self._mlp_elements = _prefix(
            model.mlp_elements or tuple(b // size for b in model.split_mlp_bytes)
        )

    def spans(self, starts: Ints, ends: Ints) -> Spans:
        """The sums of layers [start, end) for each pair."""
        model = self.model
        is_first, is_last = starts == 0, ends == model.num_layers
        attention = self._attention[ends] - self._attention[starts]
        mlp = self._mlp[ends] - self._mlp[starts]
        whole = self._whole[ends] - self._whole[starts]
        has_head = is_last & ~(is_first & model.tied)
        return Spans(
            num_layers=ends - starts,
            is_first=is_first,
            is_last=is_last,
            attention_bytes=attention,
            mlp_bytes=mlp,
            rest_bytes=whole - attention - mlp + is_last * model.norm_bytes,
            ends_bytes=is_first * model.embedding_bytes + has_head * model.head_bytes,
            attention_elements=self._attention_elements[ends] - self._attention_elements[starts],
            mlp_elements=self._mlp_elements[ends] - self._mlp_elements[starts],
        )

    def one(self, start_layer: int, end_layer: int) -> Spans:
        """A single span."""
        return self.spans(np.array([start_layer]), np.array([end_layer]))


def expert_share(model: ModelCost, *, rows: float) -> float:
    """Part of the MLP weights that a step of so many tokens reads.

    Each token visits k of E experts; with independent choices an expert stays unread by all rows
    with probability (1 - k/E)^rows.
    """
    unread: float = (1.0 - model.experts_per_token / model.num_experts) ** rows
    return 1.0 - unread


def step_tokens(workload: Workload) -> int:
    """Rows of the largest step."""
    return min(workload.max_step_tokens, workload.max_context_tokens * workload.concurrency)
