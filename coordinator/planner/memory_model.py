"""Bytes that a rank of a stage takes, by kind.

With G KV groups, C MLP columns and R ranks, a rank of g groups and c columns holds, of a stage of n
layers:

    weights      rest + attention * g/G + mlp * c/C
    embedding,   on the first and the last stage, 1/R of each
    head
    KV cache     n * kv * g/G * max_context_tokens * concurrency
    activations  of the largest step of T tokens, what a layer's code holds at once and the
                 allocator keeps: T * 6 hidden (residual, normed, input, output and copies), 4
                 times queries, keys and values (as projected, rotated, repeated, transposed), gate,
                 up, their product and a copy; on the last stage float32 logits of one row per
                 stream
    overhead     the process

Of more ranks than KV heads each has q of the H query heads and a copy of one KV head: of the
attention (q + 1) / (H + G), and a whole head of the KV cache.

Every kind grows with the span and with the share, which the search relies on.
"""

from dataclasses import dataclass

import numpy as np

from coordinator.model_cost import ModelCost
from coordinator.planner.plan import MemoryByKind
from coordinator.planner.profiles import NodeProfile, Workload
from coordinator.planner.spans import Ints, Spans, step_tokens

_RESIDUAL_COPIES = 6
_ATTENTION_COPIES = 4
_MLP_COPIES = 4
_LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """What one rank takes, for each of some spans."""

    weights: Ints
    embedding_head: Ints
    kv: Ints
    activations: Ints
    overhead: int

    @property
    def total(self) -> Ints:
        """All kinds."""
        return self.weights + self.embedding_head + self.kv + self.activations + self.overhead

    def by_kind(self, index: int) -> MemoryByKind:
        """Of one span."""
        return MemoryByKind(
            weights=int(self.weights[index]),
            embedding_head=int(self.embedding_head[index]),
            kv=int(self.kv[index]),
            activations=int(self.activations[index]),
            overhead=self.overhead,
        )


def rank_memory(
    model: ModelCost,
    *,
    spans: Spans,
    workload: Workload,
    node: NodeProfile,
    kv_groups: int,
    mlp_columns: Ints,
    num_ranks: int,
    streams: int,
    query_heads: int | None = None,
) -> RankMemory:
    """What one rank takes.

    Args:
        model: the model.
        spans: layers of the stage.
        workload: context and step sizes.
        node: whose overhead counts.
        kv_groups: the rank's.
        mlp_columns: the rank's, by span.
        num_ranks: ranks of the stage.
        streams: sequences of full length whose cache it holds.
        query_heads: the rank's, where it has a copy of a KV head; None is those of its groups.
    """
    tokens = workload.max_context_tokens * streams
    kv = spans.num_layers * (model.kv_bytes_per_token_layer * tokens)
    if query_heads is None:
        part, whole = kv_groups, model.kv_groups
    else:
        part, whole = query_heads + kv_groups, model.num_heads + model.kv_groups
    attention = _share(spans.attention_bytes, part, whole)
    heads = _ATTENTION_COPIES * (model.num_heads + 2 * model.kv_groups) * model.head_dim
    if query_heads is not None:
        heads = _ATTENTION_COPIES * (query_heads + 2 * kv_groups) * model.head_dim
        part, whole = 1, 1
    row = _RESIDUAL_COPIES * model.hidden_size + -(-heads * part // whole)
    columns = mlp_columns * column_elements(model)
    logits = _LOGIT_BYTES * model.vocab_size * streams
    return RankMemory(
        weights=spans.rest_bytes + attention + mlp_weight_bytes(model, spans, mlp_columns),
        embedding_head=-(-spans.ends_bytes // num_ranks),
        kv=_share(kv, kv_groups, model.kv_groups),
        activations=step_tokens(workload) * (row + columns) * model.element_bytes
        + spans.is_last * logits,
        overhead=node.process_overhead_bytes,
    )


def mlp_weight_bytes(model: ModelCost, spans: Spans, mlp_columns: Ints) -> Ints:
    """MLP weights of so many columns."""
    return np.asarray(-(-spans.mlp_bytes * mlp_columns // model.mlp_columns), dtype=np.int64)


def column_elements(model: ModelCost) -> int:
    """Elements of a token's activations per MLP column, for each expert it visits."""
    if not model.hidden_size:
        return 0
    return _MLP_COPIES * (model.experts_per_token if model.num_experts > 1 else 1)


def _share(num_bytes: Ints, part: int, whole: int) -> Ints:
    return np.asarray(-(-num_bytes * part // whole), dtype=np.int64)
