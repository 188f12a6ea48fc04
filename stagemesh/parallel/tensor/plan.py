"""Swap layers of an ordinary module for tensor-parallel ones, by their names.

    plan = {
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    parallelize(model, plan, process_group=group)

The module itself stays as it is: no code of a model has to know of the ranks.
"""

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

import torch
from torch import nn

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.comm.raw import flat_bytes
from stagemesh.errors import ConfigError, UnsupportedModel
from stagemesh.parallel.tensor.embedding import VocabParallelEmbedding
from stagemesh.parallel.tensor.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    SharedInput,
)
from stagemesh.parallel.tensor.operators import reduce_from_group
from stagemesh.parallel.tensor.state import tensor_shard_of

Style = Literal[
    "colwise",
    "colwise_gather_output",
    "rowwise",
    "rowwise_split_input",
    "embedding_vocab",
    "vocab_head",
    "replicated_sum_gradient",
]
"""What becomes of a layer:

    colwise                  column-parallel; the output stays cut
    colwise_gather_output    column-parallel; each rank gets the whole output
    rowwise                  row-parallel; the input is cut already
    rowwise_split_input      row-parallel; each rank gets the whole input
    embedding_vocab          an embedding, cut by vocabulary
    vocab_head               a language model's head, cut by vocabulary; the logits stay cut
    replicated_sum_gradient  stays whole, but works on the rank's part of an activation (a norm of
                             each attention head, say), so its gradients are added up
"""

_ModuleT = TypeVar("_ModuleT", bound=nn.Module)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRule:
    """How one layer, or all those that a pattern matches, is made parallel."""

    style: Style
    """See Style."""
    sizes: tuple[int, ...] | None = None
    """What each rank holds of the dim that is cut; equal parts if None."""
    shared_input: str | None = None
    """For column-parallel layers: those of one parent module with the same word here are called
    with the same input. Its gradient then travels once for all of them (see SharedInput)."""

    def __post_init__(self) -> None:
        if self.style not in get_args(Style):
            raise ConfigError(f"style must be one of {list(get_args(Style))}, got {self.style!r}")


def parallelize(
    module: _ModuleT,
    plan: Mapping[str, Style | LayerRule],
    *,
    process_group: ProcessGroup,
) -> _ModuleT:
    """Swap the layers that a plan names, in place; returns the module.

    Args:
        module: the same on each rank, with the same values.
        plan: styles by name of layer. A `*` stands for any text without a dot.
        process_group: the tensor-parallel ranks; all of them call it.

    Raises:
        ConfigError: on each rank, and before anything was swapped: a pattern matches no layer, two
            match the same one, a layer is of a type that its style cannot cut, its sizes do not fit
            (names the sizes), a parameter of it is tied to a layer that the plan cuts otherwise or
            leaves out, or the ranks' parameters differ.
        UnsupportedModel: a layer's class computes more than its style would (a scaled embedding,
            say), or see VocabParallelEmbedding.from_embedding.
    """
    rules = _match(module, plan)
    swapped = _make_layers(module, rules, process_group)
    _retie(module, rules, swapped)
    _check_equal(module, process_group)
    _join_shared_inputs(rules, swapped)
    for name, layer in swapped.items():
        parent, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(parent), attribute, layer)
    for name, rule in rules.items():
        if rule.style == "replicated_sum_gradient":
            _sum_gradients(module.get_submodule(name), process_group)
    return module


def matching_names(module: nn.Module, pattern: str) -> list[str]:
    """Names of the sub-modules that a pattern stands for, in the module's order."""
    regex = re.compile("[^.]*".join(re.escape(text) for text in pattern.split("*")))
    return [
        name for name, _ in module.named_modules(remove_duplicate=False) if regex.fullmatch(name)
    ]


def _match(module: nn.Module, plan: Mapping[str, Style | LayerRule]) -> dict[str, LayerRule]:
    rules: dict[str, LayerRule] = {}
    patterns: dict[str, str] = {}
    for pattern, value in plan.items():
        names = [name for name in matching_names(module, pattern) if name]
        if not names:
            raise ConfigError(f"the plan's {pattern!r} matches no layer of the module")
        for name in names:
            if name in rules:
                raise ConfigError(f"both {patterns[name]!r} and {pattern!r} match layer {name}")
            rules[name] = value if isinstance(value, LayerRule) else LayerRule(style=value)
            patterns[name] = pattern
    return rules


def _make_layers(
    module: nn.Module, rules: Mapping[str, LayerRule], process_group: ProcessGroup
) -> dict[str, nn.Module]:
    made: dict[str, nn.Module] = {}
    by_identity: dict[int, nn.Module] = {}
    for name, rule in rules.items():
        layer = module.get_submodule(name)
        if rule.style == "replicated_sum_gradient":
            continue
        if id(layer) not in by_identity:
            try:
                by_identity[id(layer)] = _make_layer(layer, rule, process_group)
            except (ConfigError, UnsupportedModel) as error:
                raise type(error)(f"layer {name}: {error}") from error
        made[name] = by_identity[id(layer)].train(layer.training)
    return made


def _make_layer(layer: nn.Module, rule: LayerRule, process_group: ProcessGroup) -> nn.Module:
    style, sizes = rule.style, rule.sizes
    kind: type[nn.Module] = nn.Embedding if style == "embedding_vocab" else nn.Linear
    if isinstance(layer, kind) and type(layer).forward is not kind.forward:
        raise UnsupportedModel(
            f"a {type(layer).__name__} computes something of its own, which would get lost"
        )
    if style == "embedding_vocab" and isinstance(layer, nn.Embedding):
        return VocabParallelEmbedding.from_embedding(
            layer, process_group=process_group, sizes=sizes
        )
    if style == "embedding_vocab" or not isinstance(layer, nn.Linear):
        raise ConfigError(f"style {style} is for a {kind.__name__}, not a {type(layer).__name__}")
    if style in ("rowwise", "rowwise_split_input"):
        return RowParallelLinear.from_linear(
            layer, process_group=process_group, input_is_split=style == "rowwise", sizes=sizes
        )
    gather_output = style == "colwise_gather_output"
    return ColumnParallelLinear.from_linear(
        layer, process_group=process_group, gather_output=gather_output, sizes=sizes
    )


def _retie(
    module: nn.Module, rules: Mapping[str, LayerRule], swapped: Mapping[str, nn.Module]
) -> None:
    """Give layers whose whole parameters were one and the same one part, too."""
    parts: dict[int, nn.Parameter] = {}
    for name, layer in swapped.items():
        for key, whole in module.get_submodule(name).named_parameters(recurse=False):
            part = layer.get_parameter(key)
            first = parts.setdefault(id(whole), part)
            if tensor_shard_of(first) != tensor_shard_of(part):
                raise ConfigError(
                    f"{key} of layer {name} is tied to a layer that is cut in another way: "
                    f"{tensor_shard_of(part)} and {tensor_shard_of(first)}"
                )
            setattr(layer, key, first)
    for name, owner in module.named_modules():
        if name in rules:
            continue
        for key, parameter in owner.named_parameters(recurse=False):
            if id(parameter) in parts and tensor_shard_of(parts[id(parameter)]) is not None:
                raise ConfigError(
                    f"{name}.{key} is tied to a layer that the plan cuts, but is not in the plan"
                )


def _check_equal(module: nn.Module, process_group: ProcessGroup) -> None:
    """Refuse ranks that hold other values: their parts would be of different models."""
    if process_group.size == 1:
        return
    named = [
        (name, tensor)
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if not tensor.is_meta
    ]
    checksums = torch.tensor(
        [zlib.crc32(flat_bytes(tensor).numpy().data) for _, tensor in named], dtype=torch.int64
    )
    by_rank = checksums.new_empty((process_group.size, len(named)))
    process_group.all_gather_tensor(by_rank, checksums)
    for index, (name, _) in enumerate(named):
        others = [
            rank for rank, value in enumerate(by_rank[:, index]) if value != by_rank[0, index]
        ]
        if others:
            raise ConfigError(
                f"{name} has other values on ranks {others} than on rank 0; give all ranks of the "
                "group the same seed, or load the same weights first"
            )


def _join_shared_inputs(rules: Mapping[str, LayerRule], swapped: Mapping[str, nn.Module]) -> None:
    sets: dict[tuple[str, str], list[ColumnParallelLinear]] = {}
    for name, layer in swapped.items():
        word = rules[name].shared_input
        if word is not None:
            if not isinstance(layer, ColumnParallelLinear):
                raise ConfigError(f"layer {name}: only column-parallel layers share an input")
            sets.setdefault((name.rpartition(".")[0], word), []).append(layer)
    for layers in sets.values():
        if len(layers) > 1:
            SharedInput(layers)


def _sum_gradients(layer: nn.Module, process_group: ProcessGroup) -> None:
    def total(grad: torch.Tensor) -> torch.Tensor:
        return reduce_from_group(grad, process_group=process_group)

    for parameter in layer.parameters():
        # Not after accumulation: what micro-steps before have left there is a sum already.
        if parameter.requires_grad:
            parameter.register_hook(total)  # type: ignore[no-untyped-call]
