"""LayerPartitioner: which node has which layer, as which stage and tensor rank.

Nodes that follow each other form the ranks of a stage; ranks share each layer of the stage in
proportion to their speeds:

    6 nodes, tensor_parallel 2, pipeline_parallel 3

      stage 0: node 0, node 1      stage 1: node 2, node 3      stage 2: node 4, node 5
               rank 0  rank 1               rank 0  rank 1               rank 0  rank 1
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stagemesh.errors import ConfigError, PlacementError
from stagemesh.placement.counts import proportional_counts
from stagemesh.placement.least_heavy import StageKind, least_heavy_split


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAssignment:
    """One rank's part of one layer."""

    layer_id: int
    """The layer."""
    node_id: int
    """The node, by its place among the nodes."""
    memory_mb: float
    """What the part takes there, with the embedding or the head where the layer is at an end."""
    pipeline_stage: int
    """The stage."""
    tensor_rank: int
    """The rank within the stage."""


class LayerPartitioner:
    """Assigns layers to nodes.

    Args:
        num_layers: layers of the model.
        num_nodes: nodes that are there.
        tensor_parallel: ranks of a stage.
        pipeline_parallel: stages; None takes as many as nodes and layers allow.

    Raises:
        ConfigError: a value is out of range, or more stages than layers are asked for.
    """

    def __init__(
        self,
        num_layers: int,
        num_nodes: int,
        tensor_parallel: int = 1,
        pipeline_parallel: int | None = None,
    ) -> None:
        for name, value in (
            ("num_layers", num_layers),
            ("num_nodes", num_nodes),
            ("tensor_parallel", tensor_parallel),
            ("pipeline_parallel", 1 if pipeline_parallel is None else pipeline_parallel),
        ):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if pipeline_parallel is not None and pipeline_parallel > num_layers:
            raise ConfigError(
                f"{pipeline_parallel} stages were asked for, but the model has {num_layers} "
                f"layers: each stage needs at least one"
            )
        self.num_layers = num_layers
        self.num_nodes = num_nodes
        self.tensor_parallel = tensor_parallel
        self.pipeline_parallel = pipeline_parallel
        self._costs = [1.0] * num_layers
        self._memory_mb = [float("inf")] * num_nodes
        self._speeds = [1.0] * num_nodes
        self._check_nodes(num_nodes)

    def set_layer_costs(
        self, costs_mb: Sequence[float], *, embedding_mb: float = 0.0, head_mb: float = 0.0
    ) -> None:
        """Say what each layer takes, on all ranks together.

        Args:
            costs_mb: by layer.
            embedding_mb: what comes on top at the first layer.
            head_mb: what comes on top at the last.

        Raises:
            ConfigError: there is not one finite cost per layer, or one is negative.
        """
        if len(costs_mb) != self.num_layers:
            raise ConfigError(f"{len(costs_mb)} costs for {self.num_layers} layers")
        costs = [float(cost) for cost in costs_mb]
        costs[0] += embedding_mb
        costs[-1] += head_mb
        if any(not 0 <= cost < float("inf") for cost in (*costs, embedding_mb, head_mb)):
            raise ConfigError(f"costs must be finite and not negative, got {costs}")
        self._costs = costs

    def set_nodes(
        self, *, memory_mb: Sequence[float] | None = None, speeds: Sequence[float] | None = None
    ) -> None:
        """Say what each node has; a node without memory or without speed gets no layer.

        Raises:
            ConfigError: there is not one number per node, or one is negative.
            PlacementError: too few nodes are left.
        """
        for name, values in (("memory_mb", memory_mb), ("speeds", speeds)):
            if values is not None and (
                len(values) != self.num_nodes or any(not value >= 0 for value in values)
            ):
                raise ConfigError(
                    f"{name} must be {self.num_nodes} numbers of 0 or more, got {list(values)}"
                )
        self._memory_mb = list(memory_mb or self._memory_mb)
        self._speeds = list(speeds or self._speeds)
        self._check_nodes(len(self._usable()))

    def partition(self) -> list[LayerAssignment]:
        """As many layers for each stage; the remainder goes to the first ones.

        Raises:
            PlacementError: a node's memory does not hold its part.
        """
        kinds = self._kinds()
        num_stages = self.pipeline_parallel or min(len(kinds), self.num_layers)
        counts = proportional_counts(self.num_layers, [1] * num_stages)
        assignments = self._assign(list(zip(range(num_stages), counts, strict=True)), kinds)
        over = [
            f"node {node} would hold {held:.6g} MB of {self._memory_mb[node]:.6g} MB"
            for node, held in self.memory_per_node(assignments).items()
            if held > self._memory_mb[node]
        ]
        if over:
            raise PlacementError(
                f"the even split does not fit: {'; '.join(over)}; partition_balanced heeds memory"
            )
        return assignments

    def partition_balanced(self) -> list[LayerAssignment]:
        """The contiguous split whose heaviest stage (cost by speed) is lightest, under memory.

        Of several such, one whose stages differ least. With fewer stages than groups of nodes it
        also chooses the nodes, in their order.

        Raises:
            PlacementError: no split fits; the text says what is required and available.
        """
        kinds = self._kinds()
        split = least_heavy_split(self._costs, kinds, num_stages=self.pipeline_parallel)
        if split is None:
            usable = self._usable()
            raise PlacementError(
                f"the model does not fit: {self.num_layers} layers require "
                f"{sum(self._costs):.6g} MB, available are "
                f"{sum(self._memory_mb[i] for i in usable):.6g} MB on {len(usable)} node(s): "
                + ", ".join(f"node {i} {self._memory_mb[i]:.6g} MB" for i in usable)
                + ("" if self.pipeline_parallel is None else f"; {self.pipeline_parallel} stages")
            )
        return self._assign(split, kinds)

    def memory_per_node(self, assignments: Sequence[LayerAssignment]) -> dict[int, float]:
        """MB that each node holds; nodes without a layer are not listed."""
        held: dict[int, float] = {}
        for each in assignments:
            held[each.node_id] = held.get(each.node_id, 0.0) + each.memory_mb
        return held

    def imbalance_ratio(self, assignments: Sequence[LayerAssignment]) -> float:
        """(max - min) / mean of what the nodes hold that have a layer; 0 when nobody holds any."""
        held = list(self.memory_per_node(assignments).values())
        mean = sum(held) / len(held) if held else 0.0
        return (max(held) - min(held)) / mean if mean > 0 else 0.0

    def _assign(
        self, split: Sequence[tuple[int, int]], kinds: Sequence[StageKind]
    ) -> list[LayerAssignment]:
        """Spell out (group of nodes, layers) pairs in pipeline order."""
        result: list[LayerAssignment] = []
        start = 0
        for stage, (group, count) in enumerate(split):
            kind = kinds[group]
            result += [
                LayerAssignment(
                    layer_id=layer,
                    node_id=node,
                    memory_mb=self._costs[layer] * share,
                    pipeline_stage=stage,
                    tensor_rank=rank,
                )
                for layer in range(start, start + count)
                for rank, (node, share) in enumerate(zip(kind.nodes, kind.shares, strict=True))
            ]
            start += count
        return result

    def _kinds(self) -> list[StageKind]:
        """The groups of nodes that may be stages, in order."""
        usable, degree = self._usable(), self.tensor_parallel
        kinds = []
        for first in range(0, len(usable) - degree + 1, degree):
            nodes = tuple(usable[first : first + degree])
            speed = sum(self._speeds[node] for node in nodes)
            shares = tuple(self._speeds[node] / speed for node in nodes)
            limit = min(
                self._memory_mb[node] / share for node, share in zip(nodes, shares, strict=True)
            )
            kinds.append(StageKind(nodes=nodes, shares=shares, speed=speed, limit=limit))
        return kinds

    def _usable(self) -> list[int]:
        pairs = zip(self._memory_mb, self._speeds, strict=True)
        return [i for i, (memory, speed) in enumerate(pairs) if memory > 0 and speed > 0]

    def _check_nodes(self, num_usable: int) -> None:
        needed = self.tensor_parallel * (self.pipeline_parallel or 1)
        if num_usable < needed:
            raise PlacementError(
                f"{self.pipeline_parallel or 1} stage(s) of {self.tensor_parallel} rank(s) need "
                f"{needed} nodes, but {num_usable} of {self.num_nodes} offer memory and speed"
            )
