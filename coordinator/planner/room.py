"""Whether stages of one node each fit at all: memory alone, no times, any number of nodes. Pure.

What layers [s, e) take differs between nodes by their process only, and grows with the span. So a
node's stages from s are those up to a furthest end, and along one order of nodes

    reach[k, e]    some of the nodes so far hold layers [0, e), as k stages

is a dynamic program of booleans: n * layers steps instead of the n * layers^2 of a search for the
least time, which finds a chain in just these cases.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from coordinator.model_cost import ModelCost
from coordinator.planner.chain import StageCounts
from coordinator.planner.memory_model import rank_memory
from coordinator.planner.profiles import NodeProfile, Workload
from coordinator.planner.spans import Bools, Ints, ModelSpans


def furthest_ends(
    model: ModelCost, nodes: Sequence[NodeProfile], *, workload: Workload, streams: int
) -> Ints:
    """How far a stage of each node may go, [node, start]: the start itself where nothing fits.

    Args:
        model: the model.
        nodes: at least one.
        workload: context and step sizes.
        streams: sequences of full length whose cache a stage holds.
    """
    need = _needs(model, nodes[0], workload=workload, streams=streams)
    rooms = np.array([node.memory_bytes - node.process_overhead_bytes for node in nodes])
    ends = np.empty((len(nodes), model.num_layers + 1), dtype=np.int64)
    for start in range(model.num_layers + 1):
        ends[:, start] = start + np.searchsorted(need[start, start + 1 :], rooms, side="right")
    return ends


def chain_fits(order: Iterable[int], ends: Ints, *, counts: StageCounts) -> bool:
    """Whether a chain fits along an order of nodes, some of which it may skip.

    Args:
        order: rows of `ends`.
        ends: see `furthest_ends`.
        counts: numbers of stages that are allowed.
    """
    last = ends.shape[1] - 1
    borders = np.arange(1, last + 1)
    reach = np.zeros((counts.num_counters, last + 1), dtype=bool)
    reach[0, 0] = True
    final = list(counts.final())
    is_counted = counts.num_counters > 1
    for i in order:
        longer = _extended(reach[:-1] if is_counted else reach, ends[i], borders)
        if is_counted and counts.highest is None:
            longer[-1] |= _extended(reach[-1:], ends[i], borders)[0]
        reach[1 if is_counted else 0 :, 1:] |= longer
        if reach[final, last].any():
            return True
    return False


def _extended(reach: Bools, ends: Ints, borders: Ints) -> Bools:
    """Borders [1, layers] that one more stage leads to, from those that are reached."""
    furthest = np.maximum.accumulate(np.where(reach, ends, -1), axis=1)
    return np.asarray(furthest[:, :-1] >= borders)


def _needs(model: ModelCost, node: NodeProfile, *, workload: Workload, streams: int) -> Ints:
    """Bytes of stages by [start, end] without the process; those above the diagonal count."""
    size = model.num_layers + 1
    starts, ends = np.triu_indices(size, k=1)
    spans = ModelSpans(model).spans(starts, ends)
    memory = rank_memory(
        model,
        spans=spans,
        workload=workload,
        node=node,
        kv_groups=model.kv_groups,
        mlp_columns=np.full(len(spans), model.mlp_columns, dtype=np.int64),
        num_ranks=1,
        streams=streams,
    )
    need = np.zeros((size, size), dtype=np.int64)
    need[starts, ends] = memory.total - memory.overhead
    return need
