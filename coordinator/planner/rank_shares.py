"""How ranks of one stage divide its KV groups and MLP columns: the fastest way that fits.

Ranks meet after the attention and after the MLP, so a stage takes

    max over r of attention(g_r)  +  max over r of MLP(c_r)  +  what does not depend on shares

with sum g = G, sum c = C and each part at least 1. The two maxima are coupled by memory alone: KV
groups that a rank holds leave less room for columns. All ways to write G as a sum are tried; for
each, columns fill up from the fastest ranks, each up to what its memory leaves, and a remainder
goes one by one to where it hurts least. That is optimal for a maximum of linear functions. All
spans of layers are done at once.

With more than `_MAX_COMPOSITIONS` ways only the one that balances the attention is tried.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import comb

import numpy as np

from coordinator.model_cost import ModelCost
from coordinator.planner.memory_model import column_elements, rank_memory
from coordinator.planner.profiles import LinkProfile, NodeProfile, Workload
from coordinator.planner.spans import Bools, Floats, Ints, Spans, step_tokens
from coordinator.planner.step_times import (
    AttentionShare,
    StageWork,
    StepShape,
    attention_seconds,
    attention_shares,
    common_seconds,
    mlp_seconds,
    stage_work,
)
from stagemesh.errors import ConfigError
from stagemesh.placement.tensor_shares import TensorShares

_MAX_COMPOSITIONS = 512
_ALL = AttentionShare(weights=1.0, cache=1.0, scores=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedStages:
    """The best division for each of some spans."""

    seconds: Floats
    """Of a step; infinite where no division fits."""
    kv_groups: Ints
    """[span, rank]."""
    mlp_columns: Ints
    """[span, rank]."""


def can_divide(model: ModelCost, num_ranks: int) -> bool:
    """Whether each rank gets at least one MLP column, and a KV group or some heads of one."""
    if num_ranks <= min(model.kv_groups, model.mlp_columns):
        return True
    try:
        _copied_heads(model, num_ranks)
    except ConfigError:
        return False
    return True


def query_heads(model: ModelCost, kv_groups: Sequence[int]) -> tuple[int, ...]:
    """The query heads of ranks that hold so many KV heads."""
    if len(kv_groups) > model.kv_groups:
        return _copied_heads(model, len(kv_groups))
    # With all of the groups go all of the heads, also of a model whose heads form none.
    return tuple(groups * model.num_heads // model.kv_groups for groups in kv_groups)


def _copied_heads(model: ModelCost, num_ranks: int) -> tuple[int, ...]:
    """More ranks than KV heads: each holds a copy of one head, with some of its query heads."""
    return TensorShares.divide(
        num_ranks=num_ranks,
        num_heads=model.num_heads,
        num_kv_heads=model.kv_groups,
        mlp_columns=model.mlp_columns,
        vocab_size=max(model.vocab_size, num_ranks),
    ).query_heads


def best_shares(
    model: ModelCost,
    nodes: Sequence[NodeProfile],
    *,
    spans: Spans,
    shape: StepShape,
    workload: Workload,
    streams: int,
    rank_link: LinkProfile | None,
) -> SharedStages:
    """The fastest division of each span that fits every rank.

    Args:
        model: the model; `can_divide` must hold.
        nodes: by rank; their rates must be above 0.
        spans: layers of the stage.
        shape: of the step whose time counts.
        workload: context and step sizes.
        streams: sequences whose cache the stage holds.
        rank_link: the worst link among the ranks; None for a single one.
    """
    work = stage_work(model, spans, shape)
    if len(nodes) == 1:
        return _alone(model, nodes[0], spans=spans, work=work, workload=workload, streams=streams)
    count, num_ranks = len(spans), len(nodes)
    best = SharedStages(
        seconds=np.full(count, np.inf),
        kv_groups=np.ones((count, num_ranks), dtype=np.int64),
        mlp_columns=np.ones((count, num_ranks), dtype=np.int64),
    )
    common = common_seconds(work, nodes, dtype=model.dtype, rank_link=rank_link)
    per_column = _column_seconds(model, work, nodes)
    for groups in _divisions(model, nodes):
        heads = query_heads(model, groups)
        shares = attention_shares(model, groups, heads)
        seconds = common + attention_seconds(work, nodes, shares, dtype=model.dtype)
        caps = np.stack(
            [
                _most_columns(
                    model,
                    node,
                    spans,
                    workload,
                    groups=g,
                    query_heads=h if num_ranks > model.kv_groups else None,
                    num_ranks=num_ranks,
                    streams=streams,
                )
                for node, g, h in zip(nodes, groups, heads, strict=True)
            ],
            axis=1,
        )
        fits = (caps >= 1).all(axis=1) & (caps.sum(axis=1) >= model.mlp_columns)
        fits &= seconds < best.seconds
        if not fits.any():
            continue
        columns = _fill_columns(model.mlp_columns, per_column, np.maximum(caps, 1), active=fits)
        parts = [columns[:, r] / model.mlp_columns for r in range(num_ranks)]
        seconds = seconds + mlp_seconds(work, nodes, parts, dtype=model.dtype)
        better = fits & (seconds < best.seconds)
        best.seconds[better] = seconds[better]
        best.kv_groups[better] = groups
        best.mlp_columns[better] = columns[better]
    return best


def _alone(
    model: ModelCost,
    node: NodeProfile,
    *,
    spans: Spans,
    work: StageWork,
    workload: Workload,
    streams: int,
) -> SharedStages:
    """A single rank has nothing to divide."""
    columns = np.full(len(spans), model.mlp_columns, dtype=np.int64)
    memory = rank_memory(
        model,
        spans=spans,
        workload=workload,
        node=node,
        kv_groups=model.kv_groups,
        mlp_columns=columns,
        num_ranks=1,
        streams=streams,
    )
    seconds = (
        common_seconds(work, [node], dtype=model.dtype, rank_link=None)
        + attention_seconds(work, [node], [_ALL], dtype=model.dtype)
        + mlp_seconds(work, [node], [np.ones(len(spans))], dtype=model.dtype)
    )
    return SharedStages(
        seconds=np.where(memory.total <= node.memory_bytes, seconds, np.inf),
        kv_groups=np.full((len(spans), 1), model.kv_groups, dtype=np.int64),
        mlp_columns=columns[:, None],
    )


def _divisions(model: ModelCost, nodes: Sequence[NodeProfile]) -> Iterator[tuple[int, ...]]:
    """Ways to divide the KV groups over the ranks, each at least 1; copies count as one each."""
    total, parts = model.kv_groups, len(nodes)
    if parts > total:
        yield (1,) * parts
        return
    if comb(total - 1, parts - 1) <= _MAX_COMPOSITIONS:
        for cut in combinations(range(1, total), parts - 1):
            yield tuple(b - a for a, b in pairwise((0, *cut, total)))
        return
    seconds = np.array([[1.0 / node.stream_bytes_per_second[model.dtype] for node in nodes]])
    caps = np.full((1, parts), total, dtype=np.int64)
    balanced = _fill_columns(total, seconds, caps, active=np.array([True]))
    yield tuple(int(g) for g in balanced[0])


def _column_seconds(model: ModelCost, work: StageWork, nodes: Sequence[NodeProfile]) -> Floats:
    """Seconds of one MLP column, [span, rank]."""
    one = np.full_like(work.mlp_bytes, 1.0 / model.mlp_columns)
    return np.stack([mlp_seconds(work, [n], [one], dtype=model.dtype) for n in nodes], axis=1)


def _most_columns(
    model: ModelCost,
    node: NodeProfile,
    spans: Spans,
    workload: Workload,
    *,
    groups: int,
    query_heads: int | None,
    num_ranks: int,
    streams: int,
) -> Ints:
    """The most MLP columns beside so many KV groups, by span; 0 where not even one fits."""

    def total(columns: Ints) -> Ints:
        return rank_memory(
            model,
            spans=spans,
            workload=workload,
            node=node,
            kv_groups=groups,
            mlp_columns=columns,
            num_ranks=num_ranks,
            streams=streams,
            query_heads=query_heads,
        ).total

    zero = np.zeros(len(spans), dtype=np.int64)
    room = node.memory_bytes - total(zero)
    per_column = spans.mlp_bytes / model.mlp_columns
    per_column += step_tokens(workload) * column_elements(model) * model.element_bytes
    # One more than the linear estimate against rounding of floats; then down to what fits.
    guess = np.full(len(spans), float(model.mlp_columns))
    np.divide(room, per_column, out=guess, where=per_column > 0)
    caps: Ints = np.clip(np.floor(guess) + 1, 0, model.mlp_columns).astype(np.int64)
    caps[room < 0] = 0
    while True:
        too_many = (total(caps) > node.memory_bytes) & (caps > 0)
        if not too_many.any():
            return caps
        caps[too_many] -= 1


def _fill_columns(total: int, seconds: Floats, caps: Ints, *, active: Bools) -> Ints:
    """Columns by span and rank that minimise the largest seconds * columns.

    Args:
        total: columns to divide.
        seconds: of one column, [span, rank].
        caps: most columns, [span, rank].
        active: spans that have a solution; the others get whatever comes out.
    """
    rates = 1.0 / np.maximum(seconds, 1e-300)
    level = np.zeros(len(seconds))
    is_full = np.zeros(caps.shape, dtype=bool)
    for _ in range(caps.shape[1]):
        left = total - np.where(is_full, caps, 0).sum(axis=1)
        open_rate = np.where(is_full, 0.0, rates).sum(axis=1)
        np.divide(left, open_rate, out=level, where=open_rate > 0)
        is_full |= level[:, None] * rates >= caps
    # Slightly less than the level: rounding must not put a column where it does not belong.
    columns = np.floor(level[:, None] * rates * (1 - 1e-12))
    columns = np.clip(np.where(is_full, caps, columns), 1, caps).astype(np.int64)
    rows = np.arange(len(columns))
    while True:
        sums = columns.sum(axis=1)
        more, less = active & (sums < total), active & (sums > total)
        if not (more.any() or less.any()):
            return columns
        after = np.where(columns < caps, (columns + 1) * seconds, np.inf)
        target = after.argmin(axis=1)
        columns[rows[more], target[more]] += 1
        before = np.where(columns > 1, columns * seconds, -1.0)
        source = before.argmax(axis=1)
        columns[rows[less], source[less]] -= 1
