"""What a model's layers cost in memory, and what a node has: the partitioner's inputs."""

from dataclasses import dataclass, replace
from itertools import accumulate

from stagemesh.errors import ConfigError
from stagemesh.model_spec import ELEMENT_BYTES, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCapacity:
    """A node as the partitioner sees it."""

    node_id: str
    """Name of the node."""
    memory_bytes: int
    """Memory it offers for weights and KV cache."""

    def __post_init__(self) -> None:
        if self.memory_bytes < 0:
            raise ConfigError(
                f"memory_bytes of node {self.node_id!r} must not be negative, "
                f"got {self.memory_bytes}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """Bytes of a model's parts in one run dtype."""

    num_layers: int
    """Layers of the model."""
    layer_bytes: tuple[int, ...]
    """Weights of each layer."""
    embedding_bytes: int
    """The token embedding, on the first stage."""
    head_bytes: int
    """The output projection, on the last stage; the table itself when tied."""
    norm_bytes: int
    """The final norm, on the last stage."""
    tied: bool
    """Embedding and head are one table: a stage that is first and last holds it once."""
    kv_bytes_per_token_layer: int
    """KV cache of one token in one layer."""
    dtype: str
    """Run dtype."""

    def __post_init__(self) -> None:
        if self.num_layers < 1 or len(self.layer_bytes) != self.num_layers:
            raise ConfigError(
                f"num_layers is {self.num_layers} and layer_bytes has {len(self.layer_bytes)} "
                f"entries: they must agree and be at least 1"
            )
        parts = (self.embedding_bytes, self.head_bytes, self.norm_bytes)
        if min(*self.layer_bytes, *parts, self.kv_bytes_per_token_layer) < 0:
            raise ConfigError("bytes of a model's part must not be negative")
        if self.dtype not in ELEMENT_BYTES:
            raise ConfigError(f"dtype is {self.dtype!r}: allowed are {', '.join(ELEMENT_BYTES)}")

    def total_weight_bytes(self) -> int:
        """Weights of the model on one node."""
        return StageCosts(self).weight_bytes(0, self.num_layers)

    def with_dtype(self, dtype: str) -> "ModelCost":
        """The same model in another run dtype."""
        old, new = ELEMENT_BYTES[self.dtype], ELEMENT_BYTES[dtype]
        return replace(
            self,
            layer_bytes=tuple(size * new // old for size in self.layer_bytes),
            embedding_bytes=self.embedding_bytes * new // old,
            head_bytes=self.head_bytes * new // old,
            norm_bytes=self.norm_bytes * new // old,
            kv_bytes_per_token_layer=self.kv_bytes_per_token_layer * new // old,
            dtype=dtype,
        )


class StageCosts:
    """Bytes of any span of layers, from prefix sums.

    Args:
        model: the model's parts.
        kv_tokens: tokens that each stage's KV cache must hold.
    """

    def __init__(self, model: ModelCost, *, kv_tokens: int = 0) -> None:
        self.model = model
        self.kv_tokens = kv_tokens
        self._prefix = list(accumulate(model.layer_bytes, initial=0))

    def weight_bytes(self, start_layer: int, end_layer: int) -> int:
        """Weights of layers [start_layer, end_layer), with what belongs to the ends."""
        model = self.model
        total = self._prefix[end_layer] - self._prefix[start_layer]
        is_first, is_last = start_layer == 0, end_layer == model.num_layers
        if is_first:
            total += model.embedding_bytes
        if is_last:
            total += model.norm_bytes
            if not (is_first and model.tied):
                total += model.head_bytes
        return total

    def kv_bytes(self, num_layers: int) -> int:
        """KV cache of so many layers."""
        return num_layers * self.model.kv_bytes_per_token_layer * self.kv_tokens

    def stage_bytes(self, start_layer: int, end_layer: int) -> int:
        """Need of a stage of layers [start_layer, end_layer); never falls as the span grows."""
        return self.weight_bytes(start_layer, end_layer) + self.kv_bytes(end_layer - start_layer)


def model_cost(spec: ModelSpec, *, dtype: str) -> ModelCost:
    """What the model costs in a run dtype.

    Raises:
        ConfigError: the dtype is not one to run in.
    """
    layer_bytes = tuple(spec.layer_bytes(layer, dtype) for layer in range(spec.num_layers))
    embedding, head, norm = (
        spec.embedding_bytes(dtype),
        spec.head_bytes(dtype),
        spec.norm_bytes(dtype),
    )
    # What one node with the whole model saves is the table that both ends share, whatever the
    # config says about tying; the rest of such a head (a bias) is the last stage's alone, as the
    # norm is.
    separate = embedding + sum(layer_bytes) + norm + head
    shared = separate - spec.stage_weight_bytes(0, spec.num_layers, dtype)
    return ModelCost(
        num_layers=spec.num_layers,
        layer_bytes=layer_bytes,
        embedding_bytes=embedding,
        head_bytes=shared or head,
        norm_bytes=norm + head - (shared or head),
        tied=shared > 0,
        kv_bytes_per_token_layer=spec.kv_bytes_per_token(1, dtype),
        dtype=dtype,
    )
