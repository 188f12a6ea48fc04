"""Plans for models of transformers, out of the plan that each model's configuration carries."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import ConfigError, UnsupportedModel
from stagemesh.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy
from stagemesh.parallel.tensor.plan import LayerRule, Style, matching_names
from stagemesh.parallel.tensor.shards import even_sizes, proportional_sizes

_STYLES: Mapping[str, Style] = MappingProxyType(
    {
        "colwise": "colwise",
        "colwise_gather_output": "colwise_gather_output",
        "rowwise": "rowwise",
        "rowwise_split_input": "rowwise_split_input",
        "replicated_with_grad_allreduce": "replicated_sum_gradient",
    }
)
"""transformers' names and ours."""

_SHARED_INPUTS: Mapping[str, str] = MappingProxyType(
    {
        "q_proj": "qkv",
        "k_proj": "qkv",
        "v_proj": "qkv",
        "gate_proj": "gate_up",
        "up_proj": "gate_up",
    }
)

VocabStyle = Literal["replicated", "gathered", "local"]
"""What becomes of embedding and head: whole on each rank; cut, with whole logits; cut, with the
rank's own logits for a vocab-parallel loss."""


def transformers_plan(
    model: nn.Module,
    *,
    num_ranks: int,
    shares: Sequence[int] | None = None,
    vocab: VocabStyle = "replicated",
) -> dict[str, LayerRule]:
    """The plan of a Llama-like model of transformers, for `parallelize`.

    Attention is cut between key/value heads: a rank gets some of them with all the query heads that
    read them.

    Args:
        model: whose `config.base_model_tp_plan` says how each layer is cut.
        num_ranks: size of the tensor-parallel group.
        shares: what each rank should have of every layer, as whole numbers in proportion; equal
            parts if left out.
        vocab: see VocabStyle.

    Raises:
        ConfigError: the ranks do not divide heads or features and no shares were given, there are
            fewer key/value heads than ranks, or the shares are not one per rank.
        UnsupportedModel: the model carries no plan, or one with a style that we do not have.
    """
    if shares is not None and len(shares) != num_ranks:
        raise ConfigError(f"shares must be one per rank, {num_ranks}, got {list(shares)}")
    base, prefix = _base_of(model)
    config: Any = model.config
    styles = getattr(config, "base_model_tp_plan", None)
    if not styles:
        raise UnsupportedModel(f"{type(model).__name__} carries no tensor-parallel plan")
    cutter = _Cutter(num_ranks, shares)
    rules: dict[str, LayerRule] = {}
    for pattern, theirs in styles.items():
        if theirs not in _STYLES:
            raise UnsupportedModel(
                f"{type(model).__name__} wants {pattern} cut as {theirs!r}; known are "
                f"{sorted(_STYLES)}"
            )
        for name in matching_names(base, pattern):
            rules[prefix + name] = _rule(base, name, _STYLES[theirs], config, cutter)
    if vocab != "replicated":
        rules |= _vocab_rules(model, vocab, cutter)
    return rules


class VocabParallelLoss:
    """A causal model's loss out of the ranks' own logits, as transformers calls it.

    With a model that was cut with `vocab="local"`:

        model.loss_function = VocabParallelLoss(process_group, sizes=model.lm_head.sizes)
        model(input_ids=ids, labels=ids).loss.backward()
    """

    def __init__(self, process_group: ProcessGroup, *, sizes: Sequence[int]) -> None:
        """Compute over the ranks of a group, which have `sizes` words each."""
        self._process_group = process_group
        self._sizes = tuple(sizes)

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """The mean loss of the next tokens.

        Shapes:
            logits: [B, T, V_r].
            labels: [B, T].
            shift_labels: [B, T], labels that are shifted already.
        """
        if vocab_size != sum(self._sizes):
            raise ConfigError(f"the model has {vocab_size} words, the ranks {sum(self._sizes)}")
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        loss = vocab_parallel_cross_entropy(
            logits,
            shift_labels,
            process_group=self._process_group,
            sizes=self._sizes,
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
        )
        return loss if num_items_in_batch is None else loss / num_items_in_batch


class _Cutter:
    """Cuts numbers over the ranks, in the shares that were asked for."""

    def __init__(self, num_ranks: int, shares: Sequence[int] | None) -> None:
        self._num_ranks = num_ranks
        self._shares = shares

    def cut(self, total: int, *, name: str) -> tuple[int, ...]:
        if self._shares is None:
            return even_sizes(total, num_ranks=self._num_ranks, name=name)
        return proportional_sizes(total, shares=self._shares, name=name)


def _base_of(model: nn.Module) -> tuple[nn.Module, str]:
    """The model without its head, and what its layers' names begin with."""
    attribute = getattr(model, "base_model_prefix", "")
    base = getattr(model, attribute, None) if attribute else None
    return (base, f"{attribute}.") if isinstance(base, nn.Module) else (model, "")


def _rule(base: nn.Module, name: str, style: Style, config: Any, cutter: _Cutter) -> LayerRule:
    layer = base.get_submodule(name)
    parent, _, attribute = name.rpartition(".")
    if style == "replicated_sum_gradient":
        return LayerRule(style=style)
    if not isinstance(layer, nn.Linear):
        raise UnsupportedModel(f"{name} is a {type(layer).__name__}, which cannot be cut {style}")
    is_column = style in ("colwise", "colwise_gather_output")
    total = layer.out_features if is_column else layer.in_features
    if style in ("colwise", "rowwise") and hasattr(
        base.get_submodule(parent), "num_key_value_groups"
    ):
        heads = config.num_key_value_heads
        counts = cutter.cut(heads, name=f"the number of key/value heads of {name}")
        sizes = tuple(count * (total // heads) for count in counts)
    else:
        sizes = cutter.cut(total, name=name)
    return LayerRule(
        style=style, sizes=sizes, shared_input=_SHARED_INPUTS.get(attribute) if is_column else None
    )


def _vocab_rules(model: nn.Module, vocab: VocabStyle, cutter: _Cutter) -> dict[str, LayerRule]:
    names = {id(module): name for name, module in model.named_modules()}
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    head = model.get_output_embeddings()  # type: ignore[operator]
    sizes = cutter.cut(embedding.num_embeddings, name="the vocabulary")
    rules = {names[id(embedding)]: LayerRule(style="embedding_vocab", sizes=sizes)}
    if head is not None:
        style: Style = "colwise_gather_output" if vocab == "gathered" else "vocab_head"
        rules[names[id(head)]] = LayerRule(style=style, sizes=sizes)
    return rules
