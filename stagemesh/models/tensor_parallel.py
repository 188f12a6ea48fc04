"""The layers of one rank of a stage: what it computes alone, and what the ranks add up.

    embedding   rank r looks up its own words       E_r[ids], 0 for others      all-reduce
    attention   q, k, v of its heads, own KV cache  y_r = attend_r(x) O_r^T     all-reduce
    MLP         its columns                         y_r = act(x G_r^T) D_r^T    all-reduce
    head        logits of its own words             x H_r^T                     see vocab_parallel

The activation between layers, and so between stages, is whole on each rank. Inference only: no
gradient passes, and all ranks of a group run the same steps in the same order.
"""

import copy
import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from stagemesh.comm.direct_group import DirectGroup
from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import ConfigError, StagemeshError, UnsupportedModel
from stagemesh.models.tp_plan import TensorPlan
from stagemesh.placement.tensor_shares import TensorShares

# How long a rank waits for the others to load: disks differ more than the ranks' compute does.
_LOAD_SECONDS = 600.0


class TensorGroup:
    """The ranks that run a stage together, seen from one of them."""

    def __init__(
        self, process_group: ProcessGroup, shares: TensorShares, *, is_direct: bool = True
    ) -> None:
        """Divide a stage between the ranks of a group.

        Args:
            process_group: of the stage's ranks alone, in rank order; nothing else may use it while
                the stage lives.
            shares: what each has.
            is_direct: whether the threads that compute connect with each other, where they can.

        Raises:
            ConfigError: the group has another number of ranks than the shares.
        """
        if process_group.size != shares.num_ranks:
            raise ConfigError(
                f"the shares are of {shares.num_ranks} ranks, group "
                f"{process_group.group_id} has {process_group.size}"
            )
        self.process_group = process_group
        self.shares = shares
        self.sums = DirectGroup(process_group)
        """Adds up what the ranks compute; see `meet`."""
        self._is_direct = is_direct

    @property
    def rank(self) -> int:
        """This rank."""
        return self.process_group.rank

    @property
    def num_kv_heads(self) -> int:
        """KV heads that this rank has."""
        start, end = self.shares.kv_range(self.rank)
        return end - start

    @property
    def first_word(self) -> int:
        """The first of this rank's words."""
        return self.shares.vocab_range(self.rank)[0]

    def meet(self, told: tuple[object, ...], *, room: int) -> int:
        """Wait until all ranks have loaded, and refuse ranks that do not fit each other.

        Then the ranks connect directly.

        Args:
            told: what this rank was told beside the shares; must be the same on all.
            room: tokens for which this rank has room.

        Returns:
            Tokens for which each rank has room.

        Raises:
            ConfigError: a rank was told something else.
        """
        text = repr((self.shares, told))
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())
        own = torch.tensor([digest, room])
        by_rank = own.new_empty((self.process_group.size, 2))
        self.process_group.all_gather_tensor(by_rank, own, timeout=_LOAD_SECONDS)
        digests = by_rank[:, 0].tolist()
        others = [rank for rank, value in enumerate(digests) if value != digests[0]]
        if others:
            raise ConfigError(
                f"ranks {others} of group {self.process_group.group_id} were told another model, "
                "dtype, span of layers or other shares than rank 0"
            )
        if self._is_direct:
            self.sums.connect()
        return int(by_rank[:, 1].min())

    @contextmanager
    def aborting(self, what: str, *, refusals: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """End the group when the block fails: the other ranks stop waiting for this one.

        Args:
            what: is done in the block, for the others' error.
            refusals: what all ranks raise alike, before any of them waits for another.
        """
        is_done = False
        try:
            yield
            is_done = True
        finally:
            error = sys.exception()
            if not is_done and not isinstance(error, refusals):
                node = self.process_group.members[self.rank].node_id
                cause = (
                    f"rank {self.rank} (node {node}) failed in {what}: "
                    f"{type(error).__name__}: {error}"
                )
                # A group that has ended already must not hide why.
                with suppress(StagemeshError):
                    self.process_group.abort(cause)


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
        self._eps = _epsilon(norm)
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


def check_spread_norms(model: PreTrainedModel, plan: TensorPlan, *, name: str) -> None:
    """Refuse norms over all heads that are not the RMS norm that `SpreadRMSNorm` computes.

    Tried with numbers, on a small copy of each norm, before a weight is read.
    """
    for norm_name in plan.spread_norms:
        norm = model.get_submodule(norm_name)
        probe = copy.deepcopy(norm).to_empty(device="cpu").float()
        weight: torch.Tensor = probe.weight  # type: ignore[assignment]
        with torch.no_grad():
            values = torch.linspace(-1.5, 2, weight.numel())
            weight.copy_(values.flip(0))
            expected = weight * values * torch.rsqrt(values.square().mean() + _epsilon(norm))
            is_same = torch.allclose(probe(values[None])[0], expected, rtol=1e-5, atol=1e-6)
        if not is_same or len(list(probe.parameters())) > 1:
            raise UnsupportedModel(
                f"{name} ({model.config.model_type}): {norm_name} ({type(norm).__name__}) is a "
                "norm over all heads that cannot be divided between ranks"
            )


def apply_tensor_plan(model: PreTrainedModel, plan: TensorPlan, *, group: TensorGroup) -> None:
    """Put the rank's layers into a model that holds the rank's parts of the parameters."""
    sums = group.sums
    for name in {key.rpartition(".")[0] for key in plan.cuts}:
        layer = model.get_submodule(name)
        if isinstance(layer, nn.Linear):
            layer.out_features, layer.in_features = layer.weight.shape
    for name in plan.row_parallel:
        linear: Any = model.get_submodule(name)
        _replace(model, name, RowParallelLinear(linear, sums))
    for name in plan.partial_sums:
        _replace(model, name, PartialExperts(model.get_submodule(name), sums))
    for name, is_counted in plan.spread_norms.items():
        norm = model.get_submodule(name)
        weight: torch.Tensor = norm.weight  # type: ignore[assignment]
        heads = torch.tensor(is_counted, device=weight.device)
        width = weight.numel() // len(is_counted) * _all_heads(group, name)
        spread = SpreadRMSNorm(norm, sums, is_counted=heads, width=width)
        _replace(model, name, spread)
    if plan.embedding is not None:
        table: Any = model.get_submodule(plan.embedding)
        cut = VocabParallelEmbedding(table, sums, start=group.first_word)
        _replace(model, plan.embedding, cut)
    _tell_heads(model, plan, group)


def _all_heads(group: TensorGroup, norm_name: str) -> int:
    is_query = norm_name.rpartition(".")[2].startswith("q")
    return group.shares.num_heads if is_query else group.shares.num_kv_heads


def _tell_heads(model: PreTrainedModel, plan: TensorPlan, group: TensorGroup) -> None:
    """Give attention layers the rank's numbers of heads, where they or their config say numbers."""
    num_heads = group.shares.query_heads[group.rank]
    told = {
        "num_heads": num_heads,
        "num_attention_heads": num_heads,
        "num_key_value_heads": group.num_kv_heads,
        "num_key_value_groups": num_heads // group.num_kv_heads,
    }
    configs: dict[int, Any] = {}
    for name in plan.attentions:
        attention: Any = model.get_submodule(name)
        for key, value in told.items():
            if isinstance(getattr(attention, key, None), int):
                setattr(attention, key, value)
        config = getattr(attention, "config", None)
        if config is not None:
            if id(config) not in configs:
                local = configs[id(config)] = copy.copy(config)
                local.num_attention_heads = num_heads
                if getattr(config, "num_key_value_heads", None) is not None:
                    local.num_key_value_heads = group.num_kv_heads
            attention.config = configs[id(config)]


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, module)


def _epsilon(norm: nn.Module) -> float:
    for name in ("variance_epsilon", "eps"):
        if isinstance(value := getattr(norm, name, None), float):
            return value
    raise UnsupportedModel(f"{type(norm).__name__}, a norm over all heads, has no epsilon")
