"""Seconds of one step: on a stage, inside it between ranks, and from stage to stage.

A step of `rows` tokens on a stage of n layers, of which rank r has the share g/G of the attention
and c/C of the MLP (all of both when it is alone):

    step overhead + n * layer overhead
    + max over ranks of max(attention bytes / stream rate, attention FLOPs / FLOP rate)
    + max over ranks of max(MLP bytes / stream rate, MLP FLOPs / FLOP rate)
    + 2 n all-reduces of rows * hidden                      with several ranks
    + the head, divided evenly over the ranks               on the last stage

Reading and computing overlap, so each part takes the larger of the two: the roofline model
(Williams, Waterman, Patterson 2009). Attention bytes include the keys and values of the tokens so
far. Ranks meet after the attention and after the MLP of each layer (Megatron-LM, Shoeybi et al.
2019), hence two maxima and two all-reduces. An all-reduce of B bytes over R ranks takes the better
of a direct exchange, latency + (R-1) B / rate, and a ring, 2 (R-1) (latency + B / R / rate)
(Patarasuk, Yuan 2009). A message takes latency + bytes / rate (Hockney 1994); only the second part
occupies the link.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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

    attention_bytes: Floats
    attention_flops: Floats
    mlp_bytes: Floats
    mlp_flops: Floats
    head_bytes: Floats
    head_flops: Floats
    num_layers: Floats
    message_bytes: float
    """One activation of the step."""


def stage_work(model: ModelCost, spans: Spans, shape: StepShape) -> StageWork:
    """The work of a step."""
    layers, size = spans.num_layers.astype(np.float64), model.element_bytes
    scores = 4 * model.num_heads * model.head_dim * shape.context_tokens
    kv = layers * (model.kv_bytes_per_token_layer * shape.context_tokens * shape.sequences)
    visited = model.experts_per_token / model.num_experts
    mlp, last = spans.mlp_bytes.astype(np.float64), spans.is_last.astype(np.float64)
    return StageWork(
        attention_bytes=spans.attention_bytes + spans.rest_bytes + kv,
        attention_flops=shape.rows * (2 * spans.attention_bytes / size + layers * scores),
        mlp_bytes=mlp * expert_share(model, rows=shape.rows),
        mlp_flops=shape.rows * 2 * mlp / size * visited,
        head_bytes=last * model.head_bytes,
        head_flops=last * (shape.head_rows * model.head_flops()),
        num_layers=layers,
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
    if rank_link is not None:
        exchange = all_reduce_seconds(rank_link, work.message_bytes, num_ranks=len(nodes))
        per_layer += 2 * exchange
    return head + work.num_layers * per_layer + max(n.step_overhead_seconds for n in nodes)


def attention_seconds(
    work: StageWork, nodes: Sequence[NodeProfile], shares: Sequence[float], *, dtype: str
) -> Floats:
    """The slowest rank's attention; shares by rank."""
    return _slowest(
        [
            roofline_seconds(
                n, work.attention_bytes * share, work.attention_flops * share, dtype=dtype
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
    """The better of a direct exchange and a ring."""
    others = num_ranks - 1
    direct = link.latency_seconds + others * num_bytes / link.bytes_per_second
    ring = 2 * others * (link.latency_seconds + num_bytes / num_ranks / link.bytes_per_second)
    return min(direct, ring)


def worst_link(cluster: ClusterProfile, node_ids: Sequence[str]) -> LinkProfile | None:
    """Largest latency and least rate among all pairs of ranks; None for a single rank."""
    links = [cluster.link(a, b) for a in node_ids for b in node_ids if a != b]
    if not links:
        return None
    return LinkProfile(
        latency_seconds=max(link.latency_seconds for link in links),
        bytes_per_second=min(link.bytes_per_second for link in links),
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
