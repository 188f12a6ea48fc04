"""Costs of models known by their dimensions alone: planning on paper, without any file."""

from dataclasses import dataclass

from coordinator.model_cost import ModelCost
from stagemesh.model_spec import ELEMENT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperModel:
    """Dimensions of a decoder with gated MLPs."""

    num_layers: int
    hidden_size: int
    num_heads: int
    kv_groups: int
    head_dim: int
    mlp_columns: int
    vocab_size: int
    num_experts: int = 1
    experts_per_token: int = 1

    def cost(self, *, dtype: str) -> ModelCost:
        """What it costs in a run dtype."""
        size, hidden = ELEMENT_BYTES[dtype], self.hidden_size
        query, key = self.num_heads * self.head_dim, self.kv_groups * self.head_dim
        attention = size * hidden * (2 * query + 2 * key)
        mlp = size * 3 * hidden * self.mlp_columns * self.num_experts
        norms, table = size * 2 * hidden, size * self.vocab_size * hidden
        layers = self.num_layers
        return ModelCost(
            num_layers=layers,
            layer_bytes=(attention + mlp + norms,) * layers,
            embedding_bytes=table,
            head_bytes=table,
            norm_bytes=size * hidden,
            tied=False,
            kv_bytes_per_token_layer=2 * size * key,
            dtype=dtype,
            attention_bytes=(attention,) * layers,
            mlp_bytes=(mlp,) * layers,
            hidden_size=hidden,
            num_heads=self.num_heads,
            kv_groups=self.kv_groups,
            head_dim=self.head_dim,
            mlp_columns=self.mlp_columns,
            vocab_size=self.vocab_size,
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
        )


PAPER_MODELS = {
    "7b": PaperModel(
        num_layers=32,
        hidden_size=4096,
        num_heads=32,
        kv_groups=8,
        head_dim=128,
        mlp_columns=14336,
        vocab_size=32000,
    ),
    "70b": PaperModel(
        num_layers=80,
        hidden_size=8192,
        num_heads=64,
        kv_groups=8,
        head_dim=128,
        mlp_columns=28672,
        vocab_size=128256,
    ),
    "405b": PaperModel(
        num_layers=126,
        hidden_size=16384,
        num_heads=128,
        kv_groups=8,
        head_dim=128,
        mlp_columns=53248,
        vocab_size=128256,
    ),
    "1t": PaperModel(
        num_layers=61,
        hidden_size=7168,
        num_heads=64,
        kv_groups=64,
        head_dim=112,
        mlp_columns=2048,
        vocab_size=163840,
        num_experts=384,
        experts_per_token=8,
    ),
}
"""By size: the shapes of well-known open models, from 7 billion parameters to a trillion."""
