"""Who runs which layers: the value that a placement is. Torch-free."""

from dataclasses import dataclass
from itertools import pairwise

from stagemesh.errors import PlacementError


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAssignment:
    """One stage of a pipeline on one node: layers [start_layer, end_layer)."""

    stage: int
    """Index of the stage, 0 first."""
    node_id: str
    """The node that runs it."""
    start_layer: int
    """First layer."""
    end_layer: int
    """One past the last layer."""
    weight_bytes: int
    """Bytes of weights in the run's dtype, with embedding and head where the stage has them."""
    kv_bytes_per_token: int
    """KV-cache bytes that one token of one session takes on this stage."""
    kv_cache_bytes: int
    """Limit of this stage's KV cache."""

    @property
    def num_layers(self) -> int:
        """Number of layers of the stage."""
        return self.end_layer - self.start_layer


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

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stages)
