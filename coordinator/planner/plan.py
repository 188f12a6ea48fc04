"""What the planner answers: who runs what, what it takes, how fast it should be. Values only."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from stagemesh.errors import PlacementError


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryByKind:
    """Bytes that a rank takes."""

    weights: int
    """Layers, and the final norm on the last stage."""
    embedding_head: int
    """The token table on the first stage, the head on the last."""
    kv: int
    """Cache for all streams at full context."""
    activations: int
    """Of the largest step."""
    overhead: int
    """The process itself."""

    @property
    def total(self) -> int:
        """All kinds."""
        return self.weights + self.embedding_head + self.kv + self.activations + self.overhead


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """One node's part of a stage."""

    node_id: str
    """The node."""
    kv_groups: int
    """KV heads that it holds; all of them when the stage has one rank. Of more ranks than KV heads
    each holds a copy of one."""
    query_heads: int
    """Query heads that it computes."""
    mlp_columns: int
    """Columns of the MLP."""
    memory: MemoryByKind
    """What it takes."""
    memory_limit_bytes: int
    """What it may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """Layers [start_layer, end_layer) on one or more ranks."""

    start_layer: int
    """First layer."""
    end_layer: int
    """One past the last layer."""
    ranks: tuple[RankShare, ...]
    """Rank 0 receives and sends activations."""

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self.end_layer - self.start_layer

    @property
    def node_ids(self) -> tuple[str, ...]:
        """The ranks' nodes."""
        return tuple(rank.node_id for rank in self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan:
    """One whole copy of the model."""

    stages: tuple[StagePlan, ...]
    """In pipeline order; they cover all layers exactly once."""
    concurrency: int
    """Streams that this replica serves."""

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    """A whole placement."""

    num_layers: int
    """Layers of the model."""
    dtype: str
    """Run dtype."""
    max_context_tokens: int
    """Longest sequence."""
    replicas: tuple[ReplicaPlan, ...]
    """At least one."""

    def __post_init__(self) -> None:
        used = [n for r in self.replicas for s in r.stages for n in s.node_ids]
        if len(set(used)) < len(used) or not self.replicas:
            raise PlacementError(f"a node has several parts of a plan, or none has any: {used}")
        for replica in self.replicas:
            borders = [0, *(stage.end_layer for stage in replica.stages)]
            starts = [stage.start_layer for stage in replica.stages]
            is_whole = starts == borders[:-1] and borders[-1] == self.num_layers
            if not is_whole or any(a >= b for a, b in pairwise(borders)):
                spans = ", ".join(f"[{s.start_layer}, {s.end_layer})" for s in replica.stages)
                raise PlacementError(
                    f"stages {spans} do not cover layers [0, {self.num_layers}) exactly once"
                )

    @property
    def node_ids(self) -> tuple[str, ...]:
        """All nodes that take part."""
        return tuple(n for r in self.replicas for s in r.stages for n in s.node_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """How fast a plan should be. Of several replicas the slowest stream and the sum of rates."""

    time_per_token_seconds: float
    """Of a stream that is alone: one step through all stages and back."""
    tokens_per_second: float
    """Of all streams of all replicas together."""
    time_to_first_token_seconds: float
    """Of a typical prompt that is alone."""
    stage_seconds: tuple[tuple[float, ...], ...]
    """By replica and stage: a decode step of one stream."""
    link_seconds: tuple[tuple[float, ...], ...]
    """By replica: into each stage, the first from the coordinator, and back to it from the last."""
    micro_steps: tuple[int, ...]
    """By replica: decode steps in flight with all streams busy."""
    limiting: str
    """What to improve first, such as "stage 1 on b" or "link a -> b"."""
    limiting_stage: str
    """The slowest stage."""
    limiting_link: str
    """The slowest link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """The planner's whole answer."""

    plan: PlacementPlan
    """Who runs what."""
    prediction: Prediction
    """How fast."""
    unused: Mapping[str, str]
    """Nodes that get nothing, and why."""
    is_exact: bool
    """Whether no better plan exists within the model; otherwise a heuristic found it."""
    objective_value: float
    """Seconds per token (of one stream, or of all together): what was minimised."""
    lower_bound: float
    """No plan can be below this objective value."""

    @property
    def gap(self) -> float:
        """How far above the lower bound, as a fraction of it."""
        return self.objective_value / self.lower_bound - 1 if self.lower_bound > 0 else 0.0
