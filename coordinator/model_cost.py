"""What a model's layers cost in memory and arithmetic, and what a node has: a placement's inputs.

All of it comes from configs and headers; no weight is read.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from stagemesh.checkpoint.low_bit import held_bytes, held_form
from stagemesh.checkpoint.tensor_info import TensorInfo
from stagemesh.errors import ConfigError
from stagemesh.model_spec import ELEMENT_BYTES, ModelSpec

# Of latent attention (DeepSeek-V2): the vectors that all heads share are made whole on each rank.
_LATENT = re.compile(r"\.(?:q_a_proj|kv_a_proj_with_mqa)\.")
_ATTENTION = re.compile(
    rf"^(?!.*{_LATENT.pattern}).*\.(?:self_attn|self_attention|attention|attn|linear_attn)\."
)
_MLP = re.compile(r"\.(?:mlp|feed_forward|block_sparse_moe|ffn|moe|experts)\.")
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")
_MLP_COLUMNS = ("moe_intermediate_size", "intermediate_size", "n_inner", "ffn_dim")


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
    attention_bytes: tuple[int, ...] = ()
    """What of `layer_bytes` attention heads divide among ranks; empty is none."""
    mlp_bytes: tuple[int, ...] = ()
    """What of `layer_bytes` MLP columns divide among ranks; empty is all but attention."""
    file_layer_bytes: tuple[int, ...] = ()
    """Each layer in the file's own types; empty is as in the run dtype."""
    hidden_size: int = 0
    """Width of an activation."""
    num_heads: int = 1
    """Query heads."""
    kv_groups: int = 1
    """Key and value heads, each with its query heads: what tensor parallelism cuts between."""
    head_dim: int = 0
    """Width of a head."""
    mlp_columns: int = 1
    """Intermediate width of the MLP."""
    vocab_size: int = 0
    """Rows of the head."""
    attention_elements: tuple[int, ...] = ()
    """Weights of attention, with those that no rank divides; empty is one an element of the dtype
    in `attention_bytes`."""
    mlp_elements: tuple[int, ...] = ()
    """Weights of which `mlp_bytes` are the bytes; empty is one an element of the dtype."""
    head_elements: int = 0
    """Likewise of `head_bytes`; 0 is one an element of the dtype."""
    quantize: str = "none"
    """How weights are held; see `stagemesh.checkpoint.low_bit`."""
    num_experts: int = 1
    """Experts per layer; 1 for a dense MLP."""
    experts_per_token: int = 1
    """Experts that a token visits."""

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
        for name in (
            "attention_bytes",
            "mlp_bytes",
            "file_layer_bytes",
            "attention_elements",
            "mlp_elements",
        ):
            if len(getattr(self, name)) not in (0, self.num_layers):
                raise ConfigError(
                    f"{name} has {len(getattr(self, name))} entries for {self.num_layers} layers"
                )
        counts = (self.num_heads, self.kv_groups, self.mlp_columns, self.experts_per_token)
        if min(counts) < 1 or self.experts_per_token > self.num_experts:
            raise ConfigError(
                f"num_heads, kv_groups, mlp_columns and experts_per_token must be at least 1 and "
                f"no more experts be visited than the {self.num_experts} there are, got {counts}"
            )

    @property
    def element_bytes(self) -> int:
        """Bytes of one element in the run dtype."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def split_attention_bytes(self) -> tuple[int, ...]:
        """`attention_bytes`, spelled out."""
        return self.attention_bytes or (0,) * self.num_layers

    @property
    def split_mlp_bytes(self) -> tuple[int, ...]:
        """`mlp_bytes`, spelled out."""
        if self.mlp_bytes:
            return self.mlp_bytes
        pairs = zip(self.layer_bytes, self.split_attention_bytes, strict=True)
        return tuple(whole - attention for whole, attention in pairs)

    def attention_flops(self, layer: int, *, context_tokens: float) -> float:
        """FLOPs of a layer's attention for one token: projections, scores and weighted sum."""
        projections = 2 * self._elements(self.attention_elements, self.split_attention_bytes, layer)
        return projections + 4 * self.num_heads * self.head_dim * context_tokens

    def mlp_flops(self, layer: int) -> float:
        """FLOPs of a layer's MLP for one token: two for each weight that the token meets."""
        visited = self.experts_per_token / self.num_experts
        return 2 * self._elements(self.mlp_elements, self.split_mlp_bytes, layer) * visited

    def head_flops(self) -> float:
        """FLOPs of the head for one token."""
        return 2 * (self.head_elements or self.head_bytes / self.element_bytes)

    def _elements(self, elements: tuple[int, ...], sizes: tuple[int, ...], layer: int) -> float:
        return elements[layer] if elements else sizes[layer] / self.element_bytes

    def token_flops(self, *, context_tokens: float) -> float:
        """FLOPs of the whole model for one token."""
        layers = range(self.num_layers)
        attention = sum(self.attention_flops(i, context_tokens=context_tokens) for i in layers)
        return attention + sum(self.mlp_flops(i) for i in layers) + self.head_flops()

    def total_weight_bytes(self) -> int:
        """Weights of the model on one node."""
        return StageCosts(self).weight_bytes(0, self.num_layers)

    def with_dtype(self, dtype: str) -> "ModelCost":
        """The same model in another run dtype."""
        old, new = ELEMENT_BYTES[self.dtype], ELEMENT_BYTES[dtype]
        if self.quantize != "none":
            # Weights in low bits stay as they are; the few others are not worth telling apart.
            kv_bytes = self.kv_bytes_per_token_layer * new // old
            return replace(self, kv_bytes_per_token_layer=kv_bytes, dtype=dtype)
        return replace(
            self,
            layer_bytes=tuple(size * new // old for size in self.layer_bytes),
            attention_bytes=tuple(size * new // old for size in self.attention_bytes),
            mlp_bytes=tuple(size * new // old for size in self.mlp_bytes),
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


def model_cost(spec: ModelSpec, *, dtype: str, quantize: str = "none") -> ModelCost:
    """What the model costs in a run dtype.

    Args:
        spec: the model.
        dtype: run dtype.
        quantize: how weights are held; see `stagemesh.checkpoint.low_bit`.

    Raises:
        ConfigError: the dtype is not one to run in, or the mode is unknown.
    """
    if quantize != "none":
        return _quantized_cost(spec, dtype=dtype, quantize=quantize)
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
    mlp_columns = _mlp_columns(spec)
    num_experts = _first_number(spec.config, _NUM_EXPERTS, default=1)
    attention = tuple(_matrix_bytes(layer, _ATTENTION, dtype) for layer in spec.groups.layers)
    # What each rank holds whole costs arithmetic all the same.
    latent = tuple(_matrix_bytes(layer, _LATENT, dtype) for layer in spec.groups.layers)
    mlp = tuple(_matrix_bytes(layer, _MLP, dtype) for layer in spec.groups.layers)
    return ModelCost(
        num_layers=spec.num_layers,
        layer_bytes=layer_bytes,
        embedding_bytes=embedding,
        head_bytes=shared or head,
        norm_bytes=norm + head - (shared or head),
        tied=shared > 0,
        kv_bytes_per_token_layer=spec.kv_bytes_per_token(1, dtype),
        dtype=dtype,
        attention_bytes=attention,
        attention_elements=tuple(
            (own + whole) // ELEMENT_BYTES[dtype]
            for own, whole in zip(attention, latent, strict=True)
        ),
        mlp_bytes=mlp,
        file_layer_bytes=tuple(sum(i.num_bytes for i in layer) for layer in spec.groups.layers),
        hidden_size=spec.hidden_size,
        num_heads=spec.num_heads,
        kv_groups=spec.num_kv_heads,
        head_dim=spec.head_dim,
        mlp_columns=mlp_columns,
        vocab_size=spec.vocab_size,
        num_experts=num_experts,
        experts_per_token=min(
            num_experts, _first_number(spec.config, _EXPERTS_PER_TOKEN, default=num_experts)
        ),
    )


def _quantized_cost(spec: ModelSpec, *, dtype: str, quantize: str) -> ModelCost:
    """The same model with its weights in low bits, where a tied head shares the table's memory."""
    plain = model_cost(spec, dtype=dtype)
    is_low = held_form(spec.groups.embedding, role="table", quantize=quantize) != "plain"
    sizes = {
        kind: tuple(_matrix_bytes(layer, kind, dtype, quantize) for layer in spec.groups.layers)
        for kind in (_ATTENTION, _MLP)
    }
    return replace(
        plain,
        layer_bytes=tuple(
            spec.layer_bytes(layer, dtype, quantize=quantize) for layer in range(spec.num_layers)
        ),
        embedding_bytes=spec.embedding_bytes(dtype, quantize=quantize),
        head_bytes=spec.head_bytes(dtype, quantize=quantize),
        norm_bytes=spec.norm_bytes(dtype),
        tied=is_low and not spec.has_separate_head,
        attention_bytes=sizes[_ATTENTION],
        mlp_bytes=sizes[_MLP],
        mlp_elements=tuple(size // plain.element_bytes for size in plain.mlp_bytes),
        head_elements=spec.head_bytes(dtype) // plain.element_bytes,
        quantize=quantize,
    )


def held_model_cost(spec: ModelSpec, *, dtype: str, quantize: str = "none") -> ModelCost:
    """What nodes hold of the model while they run it.

    A stage that is first and last holds a tied table twice: packing re-lays the head for the
    matrix kernels, while the embedding needs the rows as they are. In low bits it holds it once.

    Raises:
        ConfigError: the dtype is not one to run in, or the mode is unknown.
    """
    cost = model_cost(spec, dtype=dtype, quantize=quantize)
    return cost if quantize != "none" else replace(cost, tied=False)


def _matrix_bytes(
    tensors: Iterable[TensorInfo], kind: re.Pattern[str], dtype: str, quantize: str = "none"
) -> int:
    """Bytes of the matrices of one kind; vectors (norms, biases) are not worth dividing."""
    size = ELEMENT_BYTES[dtype]
    return sum(
        held_bytes(info, role="layer", quantize=quantize, element_bytes=size)
        for info in tensors
        if len(info.shape) > 1 and kind.search(info.name)
    )


def _mlp_columns(spec: ModelSpec) -> int:
    return _first_number(spec.config, _MLP_COLUMNS, default=4 * spec.hidden_size)


def _first_number(config: Mapping[str, Any], names: Iterable[str], *, default: int) -> int:
    values = (config.get(name) for name in names)
    return next((v for v in values if isinstance(v, int) and v >= 1), default)
