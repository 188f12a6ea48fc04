"""Who runs which layers: the value that a placement is. Torch-free."""

from dataclasses import dataclass
from itertools import pairwise

from stagemesh.errors import PlacementError
from stagemesh.placement.tensor_shares import TensorShares


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAssignment:
    """One node's part of a stage."""

    node_id: str
    """The node that runs it."""
    weight_bytes: int
    """Bytes of weights in the run's dtype, with its part of embedding and head."""
    kv_bytes_per_token: int
    """KV-cache bytes that one token of one session takes on this rank."""
    kv_cache_bytes: int
    """Limit of this rank's KV cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAssignment:
    """One stage of a pipeline: layers [start_layer, end_layer) on one node, or shared by several.

    Raises:
        PlacementError: there is no rank, or the shares are not those of the ranks.
    """

    stage: int
    """Index of the stage, 0 first."""
    start_layer: int
    """First layer."""
    end_layer: int
    """One past the last layer."""
    ranks: tuple[RankAssignment, ...]
    """Who runs it, in rank order."""
    shares: TensorShares | None = None
    """What each rank has of the layers; None for a rank alone."""

    def __post_init__(self) -> None:
        expected = 1 if self.shares is None else self.shares.num_ranks
        if len(self.ranks) != expected:
            raise PlacementError(
                f"stage {self.stage} has {len(self.ranks)} ranks and shares for {expected}"
            )

    @property
    def num_layers(self) -> int:
        """Number of layers of the stage."""
        return self.end_layer - self.start_layer

    @property
    def num_ranks(self) -> int:
        """Ranks that run it together."""
        return len(self.ranks)

    @property
    def node_ids(self) -> tuple[str, ...]:
        """The ranks' nodes."""
        return tuple(rank.node_id for rank in self.ranks)

    @property
    def node_id(self) -> str:
        """The node of rank 0, which on the last stage reports the tokens."""
        return self.ranks[0].node_id

    @property
    def weight_bytes(self) -> int:
        """Weights of all ranks."""
        return sum(rank.weight_bytes for rank in self.ranks)

    @property
    def kv_bytes_per_token(self) -> int:
        """KV-cache bytes of a token on all ranks."""
        return sum(rank.kv_bytes_per_token for rank in self.ranks)

    @property
    def kv_cache_bytes(self) -> int:
        """KV caches of all ranks."""
        return sum(rank.kv_cache_bytes for rank in self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A placement: stages in pipeline order, covering layers [0, num_layers) exactly once."""

    num_layers: int
    """Layers of the model."""
    dtype: str
    """Run dtype: "float32", "bfloat16" or "float16"."""
    max_context_tokens: int
    """Longest session that is admitted."""
    stages: tuple[StageAssignment, ...]
    """In pipeline order."""
    unused_node_ids: tuple[str, ...] = ()
    """Nodes that were offered and get no layer."""

    def __post_init__(self) -> None:
        borders = [0, *(s.end_layer for s in self.stages)]
        starts = [s.start_layer for s in self.stages]
        if starts != borders[:-1] or borders[-1] != self.num_layers:
            spans = ", ".join(f"[{s.start_layer}, {s.end_layer})" for s in self.stages)
            raise PlacementError(
                f"stages {spans} do not cover layers [0, {self.num_layers}) exactly once"
            )
        if any(a >= b for a, b in pairwise(borders)):
            raise PlacementError(f"a stage has no layer: borders {borders}")
        nodes = self.node_ids
        if len(set(nodes)) < len(nodes):
            raise PlacementError(f"a node has several parts of a plan: {', '.join(nodes)}")

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stages)

    @property
    def node_ids(self) -> tuple[str, ...]:
        """All nodes that take part, stage by stage in rank order."""
        return tuple(node_id for stage in self.stages for node_id in stage.node_ids)
