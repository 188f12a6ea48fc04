"""An embedding whose table is cut over the ranks of a group by rows: by words of the vocabulary."""

from collections.abc import Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import nn

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import UnsupportedModel
from stagemesh.parallel.tensor.operators import reduce_from_group
from stagemesh.parallel.tensor.shards import resolve_sizes, shard_span
from stagemesh.parallel.tensor.state import shard_parameter


class VocabParallelEmbedding(nn.Module):
    """Rows of a table that is cut over the ranks: each looks up its own words, and they add up.

        forward     y = sum over ranks of (W_r[id - start_r] if the id is the rank's, else 0)
        backward    dW_r[id - start_r] += dy, for the rank's own ids

    Shapes:
        input: [...], ids in [0, num_embeddings), the same on each rank.
        result: [..., embedding_dim], the same bits on each rank.
        weight: [sizes[rank], embedding_dim].
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        process_group: ProcessGroup,
        padding_idx: int | None = None,
        sizes: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make the rank's part of a table that is initialised as `nn.Embedding` is.

        Each rank draws the whole table and keeps its part, so all need the same seed.

        Args:
            num_embeddings: of the whole table.
            embedding_dim: length of a row.
            process_group: the ranks.
            padding_idx: a row that gets no gradient.
            sizes: rows of each rank; equal numbers if left out.
            device: of the table.
            dtype: of the table.

        Raises:
            ConfigError: the ranks do not divide `num_embeddings`, or the sizes do not add up to it.
        """
        super().__init__()
        whole = nn.Embedding(
            num_embeddings, embedding_dim, padding_idx=padding_idx, device=device, dtype=dtype
        )
        self._take(whole, process_group=process_group, sizes=sizes)

    @classmethod
    def from_embedding(
        cls,
        embedding: nn.Embedding,
        *,
        process_group: ProcessGroup,
        sizes: Sequence[int] | None = None,
    ) -> Self:
        """The rank's part of a whole table; all ranks must have the same one.

        Raises:
            UnsupportedModel: it uses `max_norm`, `scale_grad_by_freq` or `sparse`.
        """
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._take(embedding, process_group=process_group, sizes=sizes)
        return layer

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Look up ids.

        Raises:
            IndexError: an id is not in [0, num_embeddings). No rank would have it, and the sum
                would be a row of zeros.
        """
        if input.numel():
            low, high = (int(bound) for bound in torch.aminmax(input))
            if low < 0 or high >= self.num_embeddings:
                raise IndexError(
                    f"ids must be in [0, {self.num_embeddings}), got some in [{low}, {high}]"
                )
        if self.process_group.size == 1:
            return F.embedding(input, self.weight, self.padding_idx)
        is_elsewhere = (input < self._start) | (input >= self._end)
        local = (input - self._start).masked_fill(is_elsewhere, 0)
        rows = F.embedding(local, self.weight, self._local_padding_idx())
        rows = rows.masked_fill(is_elsewhere.unsqueeze(-1), 0)
        return reduce_from_group(rows, process_group=self.process_group, inplace=True)

    def extra_repr(self) -> str:
        """What `print` shows of it."""
        return f"{self.num_embeddings}, {self.embedding_dim}, sizes={self.sizes}"

    def _local_padding_idx(self) -> int | None:
        if self.padding_idx is None or not self._start <= self.padding_idx < self._end:
            return None
        return self.padding_idx - self._start

    def _take(
        self, whole: nn.Embedding, *, process_group: ProcessGroup, sizes: Sequence[int] | None
    ) -> None:
        if whole.max_norm is not None or whole.scale_grad_by_freq or whole.sparse:
            raise UnsupportedModel(
                "an embedding with max_norm, scale_grad_by_freq or sparse cannot be cut over ranks"
            )
        self.num_embeddings = whole.num_embeddings
        self.embedding_dim = whole.embedding_dim
        self.padding_idx = whole.padding_idx
        self.process_group = process_group
        self.sizes = resolve_sizes(
            sizes, total=whole.num_embeddings, num_ranks=process_group.size, name="num_embeddings"
        )
        rank = process_group.rank
        self._start, self._end = shard_span(self.sizes, rank=rank)
        self.weight = shard_parameter(whole.weight, dim=0, sizes=self.sizes, rank=rank)
