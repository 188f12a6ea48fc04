"""Makes a stage's model that of one rank: its layers in the place of the family's."""

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from stagemesh.errors import UnsupportedModel
from stagemesh.models.tensor_group import TensorGroup
from stagemesh.models.tensor_layers import (
    PartialExperts,
    RowParallelLinear,
    SpreadRMSNorm,
    VocabParallelEmbedding,
    norm_epsilon,
)
from stagemesh.models.tp_plan import TensorPlan


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
            expected = weight * values * torch.rsqrt(values.square().mean() + norm_epsilon(norm))
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
