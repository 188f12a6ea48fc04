"""Which rows and columns of an attention layer's parameters belong to a rank's heads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from stagemesh.errors import UnsupportedModel
from stagemesh.models.tensor_cut import AnyCut, Range, TensorCut
from stagemesh.placement.tensor_shares import TensorShares

# Modules inside an attention layer by what they have a part of for each head.
_QUERY_NAMES = frozenset(
    {
        *("q_proj", "q_norm", "q_layernorm"),
        # Gates of the attention's output.
        *("gate_proj", "g_proj"),
        # Latent attention unpacks a query, a key and a value for each query head.
        *("q_b_proj", "kv_b_proj"),
    }
)
# Of latent attention: what all heads share, whole on each rank.
_LATENT_NAMES = frozenset({"q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"})
_KV_NAMES = frozenset({"k_proj", "v_proj", "k_norm", "k_layernorm", "v_norm"})


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRest:
    """Cuts of what a plan does not name inside an attention layer."""

    cuts: Mapping[str, TensorCut]
    """By parameter name."""
    spread_norms: Mapping[str, tuple[bool, ...]]
    """Norms over all heads, by module name: for each head of the rank whether it counts here."""


class HeadCutter:
    """Turns heads of a rank into rows and columns.

    Args:
        config: of the model.
        shares: of all ranks.
        rank: whose heads.
        where: named in errors.
    """

    def __init__(self, config: Any, shares: TensorShares, rank: int, where: str) -> None:
        self.num_heads = shares.num_heads
        self.num_kv_heads = shares.num_kv_heads
        self.where = where
        self.query = shares.query_range(rank)
        self.kv = shares.kv_range(rank)
        self.owned_kv = shares.owned_kv_heads(rank)
        self._head_dim = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )

    def head_dim(self, attention: nn.Module) -> int:
        """Width of a head of an attention layer."""
        for name in ("head_dim", "head_size"):
            if isinstance(value := getattr(attention, name, None), int):
                return value
        return int(self._head_dim)

    def input_columns(self, name: str, total: int) -> Range:
        """Columns of the output projection, which reads one part for each query head."""
        return self._scaled(name, self.query, total, self.num_heads)

    def output_rows(self, name: str, total: int) -> tuple[Range, ...]:
        """Rows of a projection to heads.

        Raises:
            UnsupportedModel: nobody here knows which heads the rows are of.
        """
        attribute = name.rpartition(".")[2]
        kind = head_kind(attribute)
        if kind == "query":
            return (self._scaled(name, self.query, total, self.num_heads),)
        if kind == "kv":
            return (self._scaled(name, self.kv, total, self.num_kv_heads),)
        if attribute == "qkv_proj":
            return self._packed_rows(name, total)
        if attribute == "query_key_value" and self.num_heads == self.num_kv_heads:
            # Query, key and value of a head lie together.
            return (self._scaled(name, self.query, total, self.num_heads),)
        raise UnsupportedModel(f"{self.where}: the heads in the rows of {name} are not known")

    def _packed_rows(self, name: str, total: int) -> tuple[Range, ...]:
        """[all query heads; all key heads; all value heads]."""
        units = self.num_heads + 2 * self.num_kv_heads
        starts = (0, self.num_heads, self.num_heads + self.num_kv_heads)
        return tuple(
            self._scaled(name, (first + start, first + end), total, units)
            for first, (start, end) in zip(starts, (self.query, self.kv, self.kv), strict=True)
        )

    def _scaled(self, name: str, heads: Range, total: int, num_heads: int) -> Range:
        if total % num_heads:
            raise UnsupportedModel(
                f"{self.where}: {num_heads} heads do not divide the {total} of {name}"
            )
        width = total // num_heads
        return heads[0] * width, heads[1] * width


def head_kind(attribute: str) -> Literal["query", "kv"] | None:
    """Which heads a module of this name inside an attention layer has something for."""
    if attribute in _QUERY_NAMES:
        return "query"
    return "kv" if attribute in _KV_NAMES else None


def cut_attention_rest(
    attention: nn.Module, name: str, done: Mapping[str, AnyCut], heads: HeadCutter
) -> AttentionRest:
    """Cut the parameters of an attention layer that have a part for each head: norms, sinks.

    Args:
        attention: the layer.
        name: its name.
        done: parameters that have been cut.
        heads: of the rank.

    Raises:
        UnsupportedModel: a parameter's shape says neither one value per head nor one for all heads.
    """
    head_dim = heads.head_dim(attention)
    cuts: dict[str, TensorCut] = {}
    norms: dict[str, tuple[bool, ...]] = {}
    for key, parameter in attention.named_parameters():
        full = f"{name}.{key}"
        owner, _, _ = key.rpartition(".")
        if owner in _LATENT_NAMES:
            continue
        if full in done or _is_output_bias(f"{name}.{owner}", done):
            continue
        kind = head_kind(owner.rpartition(".")[2])
        ours = heads.kv if kind == "kv" else heads.query
        count = heads.num_kv_heads if kind == "kv" else heads.num_heads
        shape = tuple(parameter.shape)
        if owner and shape == (head_dim,):
            continue
        if (not owner and shape == (count,)) or (kind and shape == (count, head_dim)):
            cuts[full] = TensorCut(rows=(ours,))
        elif kind and shape == (count * head_dim,):
            cuts[full] = TensorCut(rows=((ours[0] * head_dim, ours[1] * head_dim),))
            is_query = kind == "query"
            norms[f"{name}.{owner}"] = (True,) * (ours[1] - ours[0]) if is_query else heads.owned_kv
        else:
            raise UnsupportedModel(
                f"{heads.where}: {full} of shape {list(shape)} cannot be divided between heads"
            )
    return AttentionRest(cuts=cuts, spread_norms=norms)


def _is_output_bias(owner: str, done: Mapping[str, AnyCut]) -> bool:
    """The bias of a row-parallel layer is whole."""
    cut = done.get(f"{owner}.weight")
    return isinstance(cut, TensorCut) and cut.columns is not None
