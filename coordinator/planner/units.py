"""Units: nodes that may run a stage together, what each stage costs them, and the ways between.

A unit of one node runs a stage alone; one of several shares it as tensor-parallel ranks. The search
sees a unit as a matrix: `seconds[start, end]` of a step on layers [start, end), infinite where the
stage does not fit or the user does not want it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from coordinator.model_cost import ModelCost
from coordinator.planner.memory_model import rank_memory
from coordinator.planner.plan import RankShare, StagePlan
from coordinator.planner.profiles import (
    COORDINATOR,
    ClusterProfile,
    Constraints,
    NodeProfile,
    Workload,
)
from coordinator.planner.rank_shares import SharedStages, best_shares, query_heads
from coordinator.planner.spans import Bools, Floats, Ints, ModelSpans, Spans
from coordinator.planner.step_times import StepShape, together, worst_link

_MAX_CACHED_BYTES = 2**28

Unit = tuple[int, ...]
"""Indices of nodes in the cluster, rank 0 first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shapes:
    """All spans of a model, those of equal sums told apart once."""

    spans: Spans
    """Different ones."""
    index: Ints
    """[start, end] -> which of them; -1 below the diagonal."""


class StageMatrices(Protocol):
    """What a search needs to know of units."""

    model: ModelCost
    """The model."""

    def matrix(self, unit: Unit, shape: StepShape) -> Floats:
        """Cost by [start, end] of a step, infinite where a stage is not possible."""
        ...


class UnitCosts:
    """Costs of all units for one number of streams; remembers what it has computed."""

    def __init__(
        self,
        model: ModelCost,
        *,
        cluster: ClusterProfile,
        workload: Workload,
        constraints: Constraints,
        streams: int,
    ) -> None:
        self.model = model
        self.cluster = cluster
        self.workload = workload
        self.streams = streams
        self._constraints = constraints
        self._shapes = _distinct_spans(ModelSpans(model))
        self._classes = [node_kind(node) for node in cluster.nodes]
        self._shared: dict[object, SharedStages] = {}
        self._matrices: dict[object, Floats] = {}
        self._by_unit: dict[tuple[Unit, StepShape], Floats] = {}

    def node(self, index: int) -> NodeProfile:
        """A node by its index."""
        return self.cluster.nodes[index]

    def matrix(self, unit: Unit, shape: StepShape) -> Floats:
        """Seconds by [start, end] of a step."""
        known = self._by_unit.get((unit, shape))
        if known is None:
            known = self._by_unit[unit, shape] = self._new_matrix(unit, shape)
        return known

    def _new_matrix(self, unit: Unit, shape: StepShape) -> Floats:
        pins = self._pins(unit)
        key = (self._key(unit, shape), pins)
        if key not in self._matrices:
            index = self._shapes.index
            seconds = np.where(index >= 0, self._stages(unit, shape).seconds[index], np.inf)
            if (len(self._matrices) + 1) * seconds.nbytes > _MAX_CACHED_BYTES:
                self._matrices.clear()
                self._by_unit.clear()
            self._matrices[key] = np.where(self._allowed(pins), seconds, np.inf)
        return self._matrices[key]

    def shares(self, unit: Unit, shape: StepShape) -> tuple[Ints, Ints]:
        """KV groups and MLP columns by [start, end, rank], as `matrix` prices them."""
        index = np.maximum(self._shapes.index, 0)
        shared = self._stages(unit, shape)
        return shared.kv_groups[index], shared.mlp_columns[index]

    def stage(self, unit: Unit, start_layer: int, end_layer: int, shape: StepShape) -> StagePlan:
        """The stage that `matrix` priced."""
        which = int(self._shapes.index[start_layer, end_layer])
        shared = self._stages(unit, shape)
        ranks = []
        heads = query_heads(self.model, [int(g) for g in shared.kv_groups[which]])
        for rank, node in enumerate(self.node(i) for i in unit):
            groups, columns = shared.kv_groups[which, rank], shared.mlp_columns[which, rank]
            memory = rank_memory(
                self.model,
                spans=self._shapes.spans,
                workload=self.workload,
                node=node,
                kv_groups=int(groups),
                mlp_columns=np.full(len(self._shapes.spans), columns),
                num_ranks=len(unit),
                streams=self.streams,
                query_heads=heads[rank] if len(unit) > self.model.kv_groups else None,
            )
            ranks.append(
                RankShare(
                    node_id=node.node_id,
                    kv_groups=int(groups),
                    query_heads=heads[rank],
                    mlp_columns=int(columns),
                    memory=memory.by_kind(which),
                    memory_limit_bytes=node.memory_bytes,
                )
            )
        return StagePlan(start_layer=start_layer, end_layer=end_layer, ranks=tuple(ranks))

    def _stages(self, unit: Unit, shape: StepShape) -> SharedStages:
        key = self._key(unit, shape)
        if key not in self._shared:
            nodes = [self.node(i) for i in unit]
            link = worst_link(self.cluster, [node.node_id for node in nodes])
            self._shared[key] = best_shares(
                self.model,
                together(nodes, link),
                spans=self._shapes.spans,
                shape=shape,
                workload=self.workload,
                streams=self.streams,
                rank_link=link,
            )
        return self._shared[key]

    def _key(self, unit: Unit, shape: StepShape) -> object:
        nodes = [self.node(i) for i in unit]
        link = worst_link(self.cluster, [node.node_id for node in nodes])
        machines = tuple((n.machine_id, n.num_cores, n.num_threads) for n in nodes)
        # Alone a node computes as it was measured, wherever it is.
        shared = machines if len(unit) > 1 else ()
        return (tuple(self._classes[i] for i in unit), shared, link, shape)

    def _pins(self, unit: Unit) -> frozenset[tuple[tuple[int, int], int]]:
        """Pinned ranges of the unit's nodes, and how many of its nodes each has."""
        pinned = self._constraints.pinned
        if not pinned:
            return frozenset()
        ranges = [pinned[self.node(i).node_id] for i in unit if self.node(i).node_id in pinned]
        return frozenset((r, ranges.count(r)) for r in ranges)

    def _allowed(self, pins: frozenset[tuple[tuple[int, int], int]]) -> Bools:
        """[start, end] that the user allows a unit with such pins."""
        size = self.model.num_layers + 1
        allowed = np.ones((size, size), dtype=bool)
        pinned = self._constraints.pinned
        if pins:
            allowed[:] = False
            if len(pins) == 1:
                ((start, end), count) = next(iter(pins))
                # All nodes of one range share the stage, or none is complete.
                if count == sum(r == (start, end) for r in pinned.values()):
                    allowed[start, end] = True
            return allowed
        starts, ends = np.arange(size)[:, None], np.arange(size)[None, :]
        for start, end in set(pinned.values()):
            allowed &= (ends <= start) | (starts >= end)
        return allowed


class Ways:
    """Seconds and occupation from unit to unit.

    Nodes that no measured link names are alike: they share row and column 0 of the tables, so that
    ten thousand of them take no more room than one. A node's way to itself does not exist; its
    entry is the best of its row (see `sites`).
    """

    def __init__(self, cluster: ClusterProfile) -> None:
        named = {name for pair in cluster.links for name in pair}
        self._rows = np.zeros(len(cluster.nodes), dtype=np.int64)
        index: dict[str, int] = {}
        for i, node in enumerate(cluster.nodes):
            if node.node_id in named:
                index[node.node_id] = self._rows[i] = len(index) + 1
        count = len(index) + 1
        default = cluster.default_link
        self._latency = np.full((count, count), float(default.latency_seconds))
        self._byte_seconds = np.full((count, count), 1.0 / default.bytes_per_second)
        self._entry = np.full(count, float(default.latency_seconds))
        self._exit = np.full(count, float(default.latency_seconds))
        # A measured direction goes before the other one that stands in for it.
        measured = {(b, a): link for (a, b), link in cluster.links.items()} | dict(cluster.links)
        for (source, target), link in measured.items():
            if source in index and target in index:
                self._latency[index[source], index[target]] = link.latency_seconds
                self._byte_seconds[index[source], index[target]] = 1.0 / link.bytes_per_second
            elif source == COORDINATOR and target in index:
                self._entry[index[target]] = link.latency_seconds
            elif target == COORDINATOR and source in index:
                self._exit[index[source]] = link.latency_seconds
        for table in (self._latency, self._byte_seconds):
            np.fill_diagonal(table[1:, 1:], np.inf)
            np.fill_diagonal(table[1:, 1:], table[1:].min(axis=1))

    def entry(self, unit: Unit) -> float:
        """From the coordinator."""
        return float(self._entry[self._rows[list(unit)]].max())

    def exit(self, unit: Unit) -> float:
        """To the coordinator."""
        return float(self._exit[self._rows[unit[0]]])

    def sites(self) -> Ints:
        """For each node one that the same ways lead away from, to whatever other node.

        With the best of a row in place of the way to itself, nodes of a rack that are nearer to
        each other than to the rest have equal rows.
        """
        first: dict[bytes, int] = {}
        result = np.zeros(len(self._rows), dtype=np.int64)
        for i, row in enumerate(self._rows):
            key = self._latency[row].tobytes() + self._byte_seconds[row].tobytes()
            result[i] = first.setdefault(key, i)
        return result

    def hops(
        self, sources: Ints, units: Sequence[Unit], *, num_bytes: float
    ) -> tuple[Floats, Floats]:
        """Seconds and occupied seconds from nodes to units, [source, unit]."""
        rows = self._rows[sources]
        latency, occupied = self._latency[rows], self._byte_seconds[rows]
        if all(len(unit) == 1 for unit in units):
            heads = self._rows[np.array([unit[0] for unit in units])]
            occupied = occupied[:, heads] * num_bytes
            return latency[:, heads] + occupied, occupied
        ranks = [self._rows[list(unit)] for unit in units]
        worst = np.stack([latency[:, unit].max(axis=1) for unit in ranks], axis=1)
        total = np.stack([occupied[:, unit].sum(axis=1) for unit in ranks], axis=1)
        total *= num_bytes
        return worst + total, total

    def occupied(self, source: Unit, target: Unit, *, num_bytes: float) -> float:
        """Seconds that a message keeps a unit's sender busy."""
        targets = self._rows[list(target)]
        return float(self._byte_seconds[self._rows[source[0]], targets].sum()) * num_bytes

    def between(self, units: Sequence[Unit], *, num_bytes: float) -> tuple[Floats, Floats]:
        """Seconds and occupied seconds from unit to unit, [from, to]."""
        return self.hops(np.array([unit[0] for unit in units]), units, num_bytes=num_bytes)


def _distinct_spans(spans: ModelSpans) -> _Shapes:
    size = spans.model.num_layers + 1
    starts, ends = np.triu_indices(size, k=1)
    every = spans.spans(starts, ends)
    # The columns that a time or a size depends on.
    rows = np.stack(
        [
            every.num_layers,
            every.is_first,
            every.is_last,
            every.attention_bytes,
            every.mlp_bytes,
            every.rest_bytes,
            every.ends_bytes,
            every.attention_elements,
            every.mlp_elements,
        ],
        axis=1,
    )
    _, first, inverse = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    index = np.full((size, size), -1, dtype=np.int64)
    index[starts, ends] = inverse.reshape(-1)
    return _Shapes(spans=spans.spans(starts[first], ends[first]), index=index)


def node_kind(node: NodeProfile) -> object:
    """Equal for nodes that differ in their name only."""
    return (
        node.memory_bytes,
        node.process_overhead_bytes,
        tuple(sorted(node.stream_bytes_per_second.items())),
        tuple(sorted(node.flops_per_second.items())),
        node.layer_overhead_seconds,
        node.step_overhead_seconds,
    )
