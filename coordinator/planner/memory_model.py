"""Bytes that a rank of a stage takes, by kind.

With G KV groups, C MLP columns and R ranks, a rank of g groups and c columns holds, of a stage of n
layers:

    weights      rest + attention * g/G + mlp * c/C
    embedding,   on the first and the last stage, 1/R of each
    head
    KV cache     n * kv * g/G * max_context_tokens * concurrency
    activations  of the largest step of T tokens: residual, its normed copy and the stage's input
                 and output (T * 4 * hidden), queries, keys and values, gate and up; on the last
                 stage float32 logits of one row per stream
    overhead     the process

Every kind grows with the span and with the share, which the search relies on.
"""

from coordinator.model_cost import ModelCost
from coordinator.planner.plan import MemoryByKind
from coordinator.planner.profiles import NodeProfile, Workload
from coordinator.planner.spans import Span, step_tokens

_RESIDUAL_COPIES = 4
_LOGIT_BYTES = 4


def _share(num_bytes: int, part: int, whole: int) -> int:
    return -(-num_bytes * part // whole)


def rank_memory(
    model: ModelCost,
    *,
    span: Span,
    workload: Workload,
    node: NodeProfile,
    kv_groups: int,
    mlp_columns: int,
    num_ranks: int,
    streams: int,
) -> MemoryByKind:
    """What one rank takes.

    Args:
        model: the model.
        span: the stage's layers.
        workload: context and step sizes.
        node: whose overhead counts.
        kv_groups: the rank's.
        mlp_columns: the rank's.
        num_ranks: ranks of the stage.
        streams: sequences of full length whose cache it holds.
    """
    tokens = workload.max_context_tokens * streams
    kv = span.num_layers * model.kv_bytes_per_token_layer * tokens
    return MemoryByKind(
        weights=span.rest_bytes
        + _share(span.attention_bytes, kv_groups, model.kv_groups)
        + _share(span.mlp_bytes, mlp_columns, model.mlp_columns),
        embedding_head=_share(span.ends_bytes, 1, num_ranks),
        kv=_share(kv, kv_groups, model.kv_groups),
        activations=_activation_bytes(
            model, workload, span=span, kv_groups=kv_groups, mlp_columns=mlp_columns
        ),
        overhead=node.process_overhead_bytes,
    )


def _activation_bytes(
    model: ModelCost, workload: Workload, *, span: Span, kv_groups: int, mlp_columns: int
) -> int:
    heads = (model.num_heads + 2 * model.kv_groups) * model.head_dim
    # A token's experts work on copies of it.
    columns = 2 * mlp_columns * (model.experts_per_token if model.num_experts > 1 else 1)
    if not model.hidden_size:
        return 0
    row = (
        _RESIDUAL_COPIES * model.hidden_size + _share(heads, kv_groups, model.kv_groups) + columns
    )
    logits = _LOGIT_BYTES * model.vocab_size * workload.concurrency if span.is_last else 0
    return step_tokens(workload) * row * model.element_bytes + logits
