"""Seconds of one step: on a stage, inside it between ranks, and from stage to stage.

A step of `rows` tokens on a stage of n layers, of which rank r has the share g/G of the attention
and c/C of the MLP (all of both when it is alone):

    step overhead + n * layer overhead
    + max over ranks of max(attention bytes / stream rate, attention FLOPs / FLOP rate)
    + max over ranks of max(MLP bytes / stream rate, MLP FLOPs / FLOP rate)
    + exchanges of rows * hidden                            with several ranks
    + the head, divided evenly over the ranks               on the last stage

Reading and computing overlap, so each part takes the larger of the two: the roofline model
(Williams, Waterman, Patterson 2009). Attention bytes include the keys and values of the tokens so
far, and what each rank reads whole. Ranks meet after the attention and after the MLP of each layer
(Megatron-LM, Shoeybi et al. 2019), hence two maxima and two all-reduces a layer; the first stage
has one more for the tokens' rows, the last one for their draw. An all-reduce of B bytes over R
ranks is what `stagemesh.comm.direct_group` does: of two ranks, or of few bytes, one exchange of all
of it, latency + (R-1) B / rate; else one of pieces and one of their sums,
2 (latency + (R-1) B/R / rate). Latency and rate are those of sums where they were measured, of
messages elsewhere. On one machine ranks with more threads together than it has cores compute so
many times slower, and read weights as much slower as two nodes were measured to do at once
(`together`). A message takes latency + bytes / rate (Hockney 1994); only the second part occupies
the link.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from coordinator.model_cost import ModelCost
from coordinator.planner.profiles import (
    COORDINATOR,
    ClusterProfile,
    LinkProfile,
    NodeProfile,
    Workload,
)
from coordinator.planner.spans import Floats, Spans, expert_share

_WHOLE_BYTES = 256 * 1024
"""Up to which size sums travel whole, as in `stagemesh.comm.direct_group`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What a step carries."""

    rows: int
    """Tokens."""
    sequences: int
    """Sequences whose keys and values it reads."""
    head_rows: int
    """Tokens whose logits are computed."""
    context_tokens: float
    """Length of each sequence so far."""


def decode_shape(workload: Workload, *, rows: int) -> StepShape:
    """One token of each of `rows` streams."""
    return StepShape(
        rows=rows,
        sequences=rows,
        head_rows=rows,
        context_tokens=workload.decode_context_tokens,
    )


def prefill_shape(workload: Workload) -> StepShape:
    """A chunk of the typical prompt, in the middle of it."""
    return StepShape(
        rows=min(workload.prompt_tokens, workload.max_step_tokens),
        sequences=1,
        head_rows=1,
        context_tokens=workload.prompt_tokens / 2,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """Bytes and FLOPs of a step on each of some spans, before shares divide them."""

    rest_bytes: Floats
    """What every rank reads whole: norms, latent projections."""
    attention_bytes: Floats
    attention_flops: Floats
    kv_bytes: Floats
    """Keys and values that are read."""
    score_flops: Floats
    """Of queries with keys, and of weights with values."""
    mlp_bytes: Floats
    mlp_flops: Floats
    head_bytes: Floats
    head_flops: Floats
    num_layers: Floats
    num_exchanges: Floats
    """Of several ranks: how often they add up or tell each other."""
    message_bytes: float
    """One activation of the step."""


def stage_work(model: ModelCost, spans: Spans, shape: StepShape) -> StageWork:
    """The work of a step."""
    layers = spans.num_layers.astype(np.float64)
    scores = layers * (4 * model.num_heads * model.head_dim * shape.context_tokens)
    kv = layers * (model.kv_bytes_per_token_layer * shape.context_tokens * shape.sequences)
    visited = model.experts_per_token / model.num_experts
    mlp, last = spans.mlp_bytes.astype(np.float64), spans.is_last.astype(np.float64)
    return StageWork(
        rest_bytes=spans.rest_bytes.astype(np.float64),
        attention_bytes=spans.attention_bytes.astype(np.float64),
        attention_flops=2.0 * shape.rows * spans.attention_elements.astype(np.float64),
        kv_bytes=kv,
        score_flops=shape.rows * scores,
        mlp_bytes=mlp * expert_share(model, rows=shape.rows),
        mlp_flops=2.0 * shape.rows * visited * spans.mlp_elements.astype(np.float64),
        head_bytes=last * model.head_bytes,
        head_flops=last * (shape.head_rows * model.head_flops()),
        num_layers=layers,
        num_exchanges=2 * layers + spans.is_first + last,
        message_bytes=message_bytes(model, rows=shape.rows),
    )


def message_bytes(model: ModelCost, *, rows: int) -> float:
    """An activation of so many tokens."""
    return rows * model.hidden_size * model.element_bytes


def roofline_seconds(node: NodeProfile, num_bytes: Floats, flops: Floats, *, dtype: str) -> Floats:
    """The larger of reading and computing."""
    reading = num_bytes / node.stream_bytes_per_second[dtype]
    return np.maximum(reading, flops / node.flops_per_second[dtype])


def common_seconds(
    work: StageWork, nodes: Sequence[NodeProfile], *, dtype: str, rank_link: LinkProfile | None
) -> Floats:
    """What of a step on a stage does not depend on the ranks' shares.

    Args:
        work: of the whole stage.
        nodes: by rank.
        dtype: run dtype.
        rank_link: the worst link among the ranks; None for a single one.
    """
    part = 1.0 / len(nodes)
    head = _slowest(
        [
            roofline_seconds(n, work.head_bytes * part, work.head_flops * part, dtype=dtype)
            for n in nodes
        ]
    )
    per_layer = max(n.layer_overhead_seconds for n in nodes)
    seconds = head + work.num_layers * per_layer + max(n.step_overhead_seconds for n in nodes)
    if rank_link is None:
        return seconds
    exchange = all_reduce_seconds(rank_link, work.message_bytes, num_ranks=len(nodes))
    return seconds + work.num_exchanges * exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShare:
    """What a rank has of a stage's attention, as parts of the whole."""

    weights: float
    """Of the matrices."""
    cache: float
    """Of keys and values."""
    scores: float
    """Of the products of queries, keys and values."""


def attention_shares(
    model: ModelCost, kv_groups: Sequence[int], query_heads: Sequence[int]
) -> list[AttentionShare]:
    """By rank: whole groups, or of more ranks than KV heads some query heads and a copy."""
    if len(kv_groups) <= model.kv_groups:
        parts = [groups / model.kv_groups for groups in kv_groups]
        return [AttentionShare(weights=part, cache=part, scores=part) for part in parts]
    whole = model.num_heads + model.kv_groups
    return [
        AttentionShare(
            weights=(heads + groups) / whole,
            cache=groups / model.kv_groups,
            scores=heads / model.num_heads,
        )
        for groups, heads in zip(kv_groups, query_heads, strict=True)
    ]


def attention_seconds(
    work: StageWork, nodes: Sequence[NodeProfile], shares: Sequence[AttentionShare], *, dtype: str
) -> Floats:
    """The slowest rank's attention; shares by rank."""
    return _slowest(
        [
            roofline_seconds(
                n,
                work.rest_bytes
                + work.attention_bytes * share.weights
                + work.kv_bytes * share.cache,
                work.attention_flops * share.weights + work.score_flops * share.scores,
                dtype=dtype,
            )
            for n, share in zip(nodes, shares, strict=True)
        ]
    )


def mlp_seconds(
    work: StageWork, nodes: Sequence[NodeProfile], shares: Sequence[Floats], *, dtype: str
) -> Floats:
    """The slowest rank's MLP; shares by rank and span."""
    return _slowest(
        [
            roofline_seconds(n, work.mlp_bytes * share, work.mlp_flops * share, dtype=dtype)
            for n, share in zip(nodes, shares, strict=True)
        ]
    )


def _slowest(seconds: Sequence[Floats]) -> Floats:
    result = seconds[0]
    for other in seconds[1:]:
        result = np.maximum(result, other)
    return result


def all_reduce_seconds(link: LinkProfile, num_bytes: float, *, num_ranks: int) -> float:
    """One exchange of all bytes where they are few, two of pieces where they are many."""
    others = num_ranks - 1
    if others == 1 or others * num_bytes <= _WHOLE_BYTES:
        return link.sum_latency + others * num_bytes / link.sum_rate
    return 2 * (link.sum_latency + others * num_bytes / num_ranks / link.sum_rate)


def worst_link(cluster: ClusterProfile, node_ids: Sequence[str]) -> LinkProfile | None:
    """Largest latency and least rate among all pairs of ranks; None for a single rank."""
    links = [cluster.link(a, b) for a in node_ids for b in node_ids if a != b]
    if not links:
        return None
    return LinkProfile(
        latency_seconds=max(link.latency_seconds for link in links),
        bytes_per_second=min(link.bytes_per_second for link in links),
        sum_seconds=max(link.sum_latency for link in links),
        sum_bytes_per_second=min(link.sum_rate for link in links),
        sum_slowdown=max(link.slowdown for link in links),
    )


def together(
    nodes: Sequence[NodeProfile], rank_link: LinkProfile | None
) -> tuple[NodeProfile, ...]:
    """Nodes as fast as they are when all of them compute at once.

    Each was measured alone. On a machine where they have more threads together than it has cores,
    each gets its part of these. How they share its memory was measured with the link.

    Args:
        nodes: by rank.
        rank_link: the worst among them; None for a single one.
    """
    slowdown = 1.0 if rank_link is None else rank_link.slowdown
    threads: Counter[str] = Counter()
    for node in nodes:
        threads[node.machine_id] += node.num_threads if node.device == "cpu" else 0
    result = []
    for node in nodes:
        is_shared = node.machine_id and node.num_cores and node.device == "cpu"
        factor = threads[node.machine_id] / node.num_cores if is_shared else 1.0
        factor = max(factor, 1.0)
        result.append(_slowed(node, factor, max(factor, slowdown)))
    return tuple(result)


def _slowed(node: NodeProfile, factor: float, reading: float) -> NodeProfile:
    """A node that computes so many times slower, and reads weights so many times."""
    if reading == 1:
        return node
    return replace(
        node,
        stream_bytes_per_second={d: r / reading for d, r in node.stream_bytes_per_second.items()},
        flops_per_second={d: r / factor for d, r in node.flops_per_second.items()},
        layer_overhead_seconds=node.layer_overhead_seconds * factor,
        step_overhead_seconds=node.step_overhead_seconds * factor,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """A message's way into a stage."""

    seconds: float
    """Until the last rank has it."""
    occupied_seconds: float
    """How long the next message must wait."""


def hop(cluster: ClusterProfile, source: str, targets: Sequence[str], *, num_bytes: float) -> Hop:
    """From rank 0 of a stage to each rank of the next, one after the other."""
    links = [cluster.link(source, target) for target in targets]
    occupied = sum(num_bytes / link.bytes_per_second for link in links)
    latency = max(link.latency_seconds for link in links)
    return Hop(seconds=latency + occupied, occupied_seconds=occupied)


def entry_seconds(cluster: ClusterProfile, targets: Sequence[str]) -> float:
    """From the coordinator to a first stage: token ids, so latency alone."""
    return max(cluster.link(COORDINATOR, target).latency_seconds for target in targets)


def exit_seconds(cluster: ClusterProfile, source: str) -> float:
    """From a last stage to the coordinator."""
    return cluster.link(source, COORDINATOR).latency_seconds
