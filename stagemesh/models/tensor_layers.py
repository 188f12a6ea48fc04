"""Layers of one rank, and what the ranks of a stage add up.

    embedding   rank r looks up its own words       E_r[ids], 0 for others      all-reduce
    attention   q, k, v of its heads, own KV cache  y_r = attend_r(x) O_r^T     all-reduce
    MLP         its columns                         y_r = act(x G_r^T) D_r^T    all-reduce
    head        logits of its own words             x H_r^T                     see vocab_parallel

The activation between layers, and so between stages, is whole on each rank. Inference only: no
gradient passes, and all ranks of a group run the same steps in the same order.
"""

from typing import Any

import torch
from torch import nn

from stagemesh.comm.direct_group import DirectGroup
from stagemesh.errors import UnsupportedModel


class RowParallelLinear(nn.Module):
    """y = sum over ranks of x_r @ W_r.T, plus b.

    Shapes:
        x_r: [..., in_r]; returns [..., out], the same bits on each rank.
    """

    def __init__(self, linear: nn.Linear, sums: DirectGroup) -> None:
        super().__init__()
        self.register_parameter("bias", linear.bias)
        linear.register_parameter("bias", None)
        self.linear = linear
        self._sums = sums

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply, and add up."""
        out = self._sums.all_reduce(self.linear(x))
        bias: torch.Tensor | None = self.bias  # type: ignore[assignment]
        return out if bias is None else out + bias


class PartialExperts(nn.Module):
    """A layer's experts, of which each rank has some columns: the sum of the ranks' outputs."""

    def __init__(self, experts: nn.Module, sums: DirectGroup) -> None:
        super().__init__()
        self.experts = experts
        self._sums = sums

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute this rank's columns, and add up."""
        return self._sums.all_reduce(self.experts(*args, **kwargs))


class VocabParallelEmbedding(nn.Module):
    """Rows of a table [V, D] of which each rank has some: [..., T] ids to [..., T, D].

    `embedding` is the family's own module with the rank's rows, so a scale in it is kept.
    """

    def __init__(self, embedding: nn.Embedding, sums: DirectGroup, *, start: int) -> None:
        super().__init__()
        embedding.padding_idx = None  # of the whole table, and of no effect without gradients
        embedding.num_embeddings = embedding.weight.shape[0]
        self.embedding = embedding
        self._sums = sums
        self._start = start

    @property
    def weight(self) -> torch.Tensor:
        """The rank's rows, where a family's code asks for the table's device or dtype."""
        return self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up; all ranks but one add zeros."""
        own = ids - self._start
        is_elsewhere = (own < 0) | (own >= self.embedding.num_embeddings)
        rows = self.embedding(own.masked_fill(is_elsewhere, 0))
        return self._sums.all_reduce(rows.masked_fill(is_elsewhere[..., None], 0))


class SpreadRMSNorm(nn.Module):
    """An RMS norm over all heads, of which each rank has some.

        y = w * x / sqrt(mean of x^2 over the heads of all ranks + eps)

    A head that several ranks have counts once.

    Shapes:
        x: [..., heads of the rank * D]; returns the same.
    """

    def __init__(
        self, norm: nn.Module, sums: DirectGroup, *, is_counted: torch.Tensor, width: int
    ) -> None:
        """Take over `norm`, whose weight is the rank's part.

        Args:
            norm: the family's.
            sums: the ranks.
            is_counted: [heads of the rank] bool.
            width: elements of all heads.
        """
        super().__init__()
        self.weight: nn.Parameter = norm.weight  # type: ignore[assignment]
        self._eps = norm_epsilon(norm)
        self._sums = sums
        self._width = width
        self.register_buffer("_is_counted", is_counted, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise."""
        wide = x.float()
        is_counted: torch.Tensor = self._is_counted  # type: ignore[assignment]
        by_head = wide.square().view(*x.shape[:-1], is_counted.numel(), -1).sum(-1)
        total = self._sums.all_reduce((by_head * is_counted).sum(-1, keepdim=True))
        return (self.weight * (wide * torch.rsqrt(total / self._width + self._eps))).to(x.dtype)


def norm_epsilon(norm: nn.Module) -> float:
    """What an RMS norm adds to the mean of the squares.

    Raises:
        UnsupportedModel: it does not say.
    """
    for name in ("variance_epsilon", "eps"):
        if isinstance(value := getattr(norm, name, None), float):
            return value
    raise UnsupportedModel(f"{type(norm).__name__}, a norm over all heads, has no epsilon")
