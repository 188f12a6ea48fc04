"""What a rank of a stage holds of any span of layers: its part of what divides, all of the rest."""

from itertools import accumulate

from coordinator.model_cost import ModelCost, StageCosts
from stagemesh.errors import ConfigError, PlacementError
from stagemesh.layout import RankAssignment
from stagemesh.placement.tensor_shares import TensorShares


def divided(model: ModelCost, num_ranks: int, *, weights: list[int] | None = None) -> TensorShares:
    """A model's layers over some ranks, in proportion to their weights.

    Raises:
        PlacementError: there is less of something than ranks; names the numbers.
    """
    try:
        return TensorShares.divide(
            num_ranks=num_ranks,
            num_heads=model.num_heads,
            num_kv_heads=model.kv_groups,
            mlp_columns=model.mlp_columns,
            vocab_size=model.vocab_size,
            weights=weights,
        )
    except ConfigError as error:
        raise PlacementError(
            f"a stage cannot be shared by {num_ranks} ranks (tp {num_ranks}): {error}"
        ) from error


class RankCosts:
    """Bytes of each rank of a stage, for any span of layers.

    Args:
        costs: of the whole layers; its `kv_tokens` are what each rank's cache must hold.
        shares: what each rank has; None for a rank alone.
    """

    def __init__(self, costs: StageCosts, shares: TensorShares | None) -> None:
        self.shares = shares
        self._costs = costs
        model = costs.model
        self._attention = list(accumulate(model.split_attention_bytes, initial=0))
        self._mlp = list(accumulate(model.split_mlp_bytes, initial=0))

    def weight_bytes(self, start_layer: int, end_layer: int, *, rank: int) -> int:
        """Weights of one rank."""
        model, whole = self._costs.model, self._costs.weight_bytes(start_layer, end_layer)
        if self.shares is None:
            return whole
        attention = self._attention[end_layer] - self._attention[start_layer]
        mlp = self._mlp[end_layer] - self._mlp[start_layer]
        ends = (model.embedding_bytes if start_layer == 0 else 0) + (
            model.head_bytes if end_layer == model.num_layers else 0
        )
        shares = self.shares
        # Queries and outputs are as many rows as query heads, keys and values as KV heads; ranks
        # beyond the KV heads hold copies of these.
        heads = shares.query_heads[rank] + self._kv_heads(rank)
        parts = (
            (attention, heads, shares.num_heads + shares.num_kv_heads),
            (mlp, shares.mlp_columns[rank], model.mlp_columns),
            (ends, shares.vocab_rows[rank], model.vocab_size),
        )
        divided_bytes = sum(-(-size * part // total) for size, part, total in parts)
        return whole - attention - mlp - ends + divided_bytes

    def kv_bytes_per_token(self, num_layers: int, *, rank: int) -> int:
        """KV cache of one token."""
        model = self._costs.model
        whole = num_layers * model.kv_bytes_per_token_layer
        if self.shares is None:
            return whole
        return -(-whole * self._kv_heads(rank) // model.kv_groups)

    def rank_bytes(self, start_layer: int, end_layer: int, *, rank: int) -> int:
        """Weights and KV cache of one rank."""
        cache = self.kv_bytes_per_token(end_layer - start_layer, rank=rank) * self._costs.kv_tokens
        return self.weight_bytes(start_layer, end_layer, rank=rank) + cache

    def assignment(
        self, node_id: str, start_layer: int, end_layer: int, *, rank: int
    ) -> RankAssignment:
        """What one rank is given."""
        per_token = self.kv_bytes_per_token(end_layer - start_layer, rank=rank)
        return RankAssignment(
            node_id=node_id,
            weight_bytes=self.weight_bytes(start_layer, end_layer, rank=rank),
            kv_bytes_per_token=per_token,
            kv_cache_bytes=per_token * self._costs.kv_tokens,
        )

    def _kv_heads(self, rank: int) -> int:
        assert self.shares is not None
        start, end = self.shares.kv_range(rank)
        return end - start
