"""Which part of each parameter a rank of a stage has, out of the family's `base_model_tp_plan`.

transformers' plan names the linear layers that are cut by rows of their weight (`colwise`: each
rank computes some of the outputs) and by columns (`rowwise`: each rank has some of the inputs, and
the partial sums are added up); `added_styles` names the layers that some families' plans leave
whole though they can be cut. What the plan does not say follows from the names and shapes inside
an attention layer: query heads, KV heads, or one vector for all heads.

Two styles mean another thing here than in transformers. `colwise_gather_output` with
`rowwise_split_input` computes the attention or the activation of a layer on every rank, because a
norm needs all heads (Olmo2) or because the outputs of several projections share a matrix (Phi3).
Here these are cut like the others: such a norm adds up its squares over the ranks, and a shared
matrix is cut in each of its parts.

All is decided on the meta device, before a weight is read.
"""

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from stagemesh.errors import UnsupportedModel
from stagemesh.models.added_styles import with_added_styles
from stagemesh.models.attention_cuts import HeadCutter, cut_attention_rest
from stagemesh.models.expert_cuts import cut_experts, expert_width
from stagemesh.models.outline import base_of, find_layers
from stagemesh.models.tensor_cut import AnyCut, Range, TensorCut
from stagemesh.parallel.tensor.plan import matching_names
from stagemesh.placement.counts import proportional_counts, range_of
from stagemesh.placement.tensor_shares import TensorShares

_OUTPUT_STYLES = frozenset({"colwise", "colwise_gather_output", "packed_colwise"})
_INPUT_STYLES = frozenset({"rowwise", "rowwise_split_input"})
# Nothing to cut, or what is cut by our own rules: the embedding, and all that has a row per head.
_OTHER_STYLES = frozenset(
    {
        *("replicated_with_grad_allreduce", "replicate", "embedding_rowwise", "local_params"),
        # The latent vectors that all heads share are whole on each rank.
        "mla_kv_a_proj",
    }
)
_EXPERT_STYLE = "moe_tp_experts"
# Both halves of a gated MLP in one matrix: [gate; up].
_GATE_AND_UP = frozenset({"gate_up_proj", "input_linear"})
# What families call the number of a layer's experts.
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
# Families whose joined projection has the heads in another order than [query; key; value].
_OTHER_ORDER = frozenset({"codegen"})


@dataclass(slots=True, kw_only=True)
class TensorPlan:
    """What becomes of a stage's model on one rank; all names are of the whole model."""

    cuts: dict[str, AnyCut] = field(default_factory=dict)
    """Parameters of which the rank has a part."""
    row_parallel: list[str] = field(default_factory=list)
    """Linear layers whose outputs are partial sums."""
    partial_sums: list[str] = field(default_factory=list)
    """Modules of experts, whose outputs are partial sums."""
    attentions: list[str] = field(default_factory=list)
    """Attention layers, which are told the rank's numbers of heads."""
    spread_norms: dict[str, tuple[bool, ...]] = field(default_factory=dict)
    """Norms over all heads: for each head of the rank whether its squares count here."""
    embedding: str | None = None
    """The token embedding, where the stage has it."""
    head: str | None = None
    """The output head, where the stage has it."""


def plan_tensor_parallel(
    model: PreTrainedModel, *, shares: TensorShares, rank: int, name: str
) -> TensorPlan:
    """Plan one rank of a stage.

    Args:
        model: on the meta device, with only the stage's layers.
        shares: of all ranks.
        rank: whose part.
        name: of the model, in errors.

    Raises:
        UnsupportedModel: the family carries no plan, its plan has a style or a layer that we cannot
            cut, or the shares are not of this model's sizes.
    """
    where = f"{name} ({model.config.model_type})"
    config: Any = model.config.get_text_config()
    told = getattr(model.config, "base_model_tp_plan", None)
    styles = with_added_styles(model.config.model_type, told)
    if not styles or model.config.model_type in _OTHER_ORDER:
        raise UnsupportedModel(
            f"{where}: transformers gives no tensor-parallel plan for this family"
        )
    _check_sizes(config, shares, where)
    base = base_of(model)
    prefix = next(f"{name}." for name, child in model.named_children() if child is base)
    planner = _Planner(model, shares, rank, where)
    for pattern, style in styles.items():
        for layer in matching_names(base, pattern):
            planner.cut_layer(prefix + layer, style)
    planner.cut_attention_rest(prefix)
    planner.cut_vocabulary()
    return planner.plan


def _check_sizes(config: Any, shares: TensorShares, where: str) -> None:
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if getattr(config, "kv_lora_rank", None):
        kv_heads = heads
    words = config.vocab_size
    found = (shares.num_heads, shares.num_kv_heads, sum(shares.vocab_rows))
    if found != (heads, kv_heads, words):
        raise UnsupportedModel(
            f"{where}: shares of {found[0]} heads, {found[1]} KV heads and {found[2]} words do not "
            f"fit a model of {heads}, {kv_heads} and {words}"
        )


class _Planner:
    """Fills a TensorPlan, layer by layer."""

    def __init__(self, model: PreTrainedModel, shares: TensorShares, rank: int, where: str) -> None:
        self.plan = TensorPlan()
        self._model = model
        self._where = where
        self._shares = shares
        self._rank = rank
        # Of the whole model: a stage may have only those of its layers that are dense.
        self._has_experts = _has_experts(model)
        self._columns = shares.column_range(rank)
        self._vocab = shares.vocab_range(rank)
        self._heads = HeadCutter(model.config.get_text_config(), shares, rank, where)

    def cut_layer(self, name: str, style: str) -> None:
        """Cut what the family's plan names."""
        if style in _OTHER_STYLES:
            return
        layer = self._model.get_submodule(name)
        if style == _EXPERT_STYLE:
            columns = self._mlp_range(name, expert_width(layer, name, self._where))
            self.plan.cuts |= cut_experts(layer, name, columns, is_first_rank=self._rank == 0)
            self.plan.partial_sums.append(name)
            return
        if style not in _OUTPUT_STYLES | _INPUT_STYLES or type(layer) is not nn.Linear:
            raise UnsupportedModel(
                f"{self._where}: {name} ({type(layer).__name__}) cannot be cut in the style "
                f"{style!r}; supported: linear layers in the styles "
                f"{', '.join(sorted(_OUTPUT_STYLES | _INPUT_STYLES))}"
            )
        parent, _, attribute = name.rpartition(".")
        is_attention = is_attention_name(parent)
        if is_attention and parent not in self.plan.attentions:
            self.plan.attentions.append(parent)
        if style in _INPUT_STYLES:
            columns = (
                self._heads.input_columns(name, layer.in_features)
                if is_attention
                else self._mlp_range(name, layer.in_features)
            )
            # A bias stays whole: it is added once, to the sum.
            self.plan.cuts[f"{name}.weight"] = TensorCut(columns=columns)
            self.plan.row_parallel.append(name)
            return
        if is_attention:
            rows = self._heads.output_rows(name, layer.out_features)
        else:
            rows = self._mlp_rows(name, attribute, layer.out_features, style)
        self._cut_rows(name, layer, rows)

    def cut_attention_rest(self, prefix: str) -> None:
        """Cut what belongs to heads beside the layers of the plan; refuse uncut attention."""
        list_name = find_layers(self._model)
        layers = base_of(self._model).get_submodule(list_name)
        for name, layer in layers.named_children():
            if not any(True for _ in layer.parameters()):
                continue
            here = f"{prefix}{list_name}.{name}."
            if not any(
                row.startswith(here) and is_attention_name(row.rpartition(".")[0])
                for row in self.plan.row_parallel
            ):
                raise UnsupportedModel(
                    f"{self._where}: the family's tensor-parallel plan does not cut the attention "
                    f"of layer {name}"
                )
        for name in self.plan.attentions:
            attention = self._model.get_submodule(name)
            rest = cut_attention_rest(attention, name, self.plan.cuts, self._heads)
            self.plan.cuts |= rest.cuts
            self.plan.spread_norms |= rest.spread_norms

    def cut_vocabulary(self) -> None:
        """Cut the embedding and the head between words."""
        names = {id(module): name for name, module in self._model.named_modules()}
        embedding = self._model.get_input_embeddings()
        head = self._model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if isinstance(embedding, nn.Embedding):
            self.plan.embedding = names[id(embedding)]
            self._check_words(self.plan.embedding, embedding.num_embeddings)
            self.plan.cuts[f"{self.plan.embedding}.weight"] = TensorCut(rows=(self._vocab,))
        if type(head) is nn.Linear:
            self.plan.head = names[id(head)]
            self._check_words(self.plan.head, head.out_features)
            self._cut_rows(self.plan.head, head, (self._vocab,))
        elif head is not None and any(True for _ in head.parameters()):
            raise UnsupportedModel(
                f"{self._where}: a head of type {type(head).__name__} cannot be cut between words"
            )

    def _cut_rows(self, name: str, layer: nn.Linear, rows: tuple[Range, ...]) -> None:
        self.plan.cuts[f"{name}.weight"] = TensorCut(rows=rows)
        if layer.bias is not None:
            self.plan.cuts[f"{name}.bias"] = TensorCut(rows=rows)

    def _mlp_rows(self, name: str, attribute: str, total: int, style: str) -> tuple[Range, ...]:
        if attribute in _GATE_AND_UP:
            # The family's code takes it apart in the middle.
            start, end = self._mlp_range(name, total // 2 if total % 2 == 0 else total)
            return (start, end), (total // 2 + start, total // 2 + end)
        if style != "colwise":
            raise UnsupportedModel(f"{self._where}: {name} in the style {style!r} is not supported")
        return (self._mlp_range(name, total),)

    def _mlp_range(self, name: str, total: int) -> Range:
        columns = sum(self._shares.mlp_columns)
        if total != columns and self._has_experts:
            # Experts, shared experts and dense layers are of different widths.
            return range_of(self._rank, proportional_counts(total, self._shares.mlp_columns))
        if total != columns:
            raise UnsupportedModel(
                f"{self._where}: {name} has {total} MLP columns, the shares "
                f"{list(self._shares.mlp_columns)} are of {columns}"
            )
        return self._columns

    def _check_words(self, name: str, total: int) -> None:
        words = sum(self._shares.vocab_rows)
        if total != words:
            raise UnsupportedModel(
                f"{self._where}: {name} has {total} words, the shares are of {words}"
            )


def _has_experts(model: PreTrainedModel) -> bool:
    config: Any = model.config.get_text_config()
    counts = (getattr(config, name, None) for name in _EXPERT_COUNTS)
    return any(isinstance(count, int) and count > 1 for count in counts) or any(
        isinstance(getattr(module, "down_proj", None), nn.Parameter) for module in model.modules()
    )


def is_attention_name(name: str) -> bool:
    """Whether a module's name says that it is a layer's attention."""
    last = name.rpartition(".")[2]
    return "attn" in last or "attention" in last
