"""Tensor-parallel styles that transformers' plans leave out, by family.

Some families' plans cut only their experts or their dense MLPs, and transformers computes the
attention whole on each rank. Their attention reads its numbers of heads from the shapes, as others'
does, so it is cut like others'. Only families that `tools.families` has found equal to one process
stand here: a name such as `q_proj` alone does not say that heads are independent (DiffLlama
subtracts one half of the heads from the other).
"""

from collections.abc import Mapping
from types import MappingProxyType

_ATTENTION = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
}
_LATENT_ATTENTION = {
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.q_b_proj": "colwise",
    "layers.*.self_attn.kv_b_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
}
_MLP = {
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}
_SHARED_EXPERTS = {
    "layers.*.mlp.shared_experts.gate_proj": "colwise",
    "layers.*.mlp.shared_experts.up_proj": "colwise",
    "layers.*.mlp.shared_experts.down_proj": "rowwise",
}
_EXPERTS = {"layers.*.mlp.experts": "moe_tp_experts"}
_GRANITE_SHARED_MLP = {
    "layers.*.shared_mlp.input_linear": "colwise",
    "layers.*.shared_mlp.output_linear": "rowwise",
}

_ADDED: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "afmoe": _ATTENTION | {"layers.*.self_attn.gate_proj": "colwise"} | _MLP | _SHARED_EXPERTS,
        "axk1": _LATENT_ATTENTION,
        "deepseek_v3": _LATENT_ATTENTION,
        "flint": _ATTENTION,
        "gpt_oss": _ATTENTION | _EXPERTS,
        "granitemoe": _ATTENTION,
        "granitemoeshared": _ATTENTION | _GRANITE_SHARED_MLP,
        "hunyuan_v1_dense": _ATTENTION | _MLP,
        "phimoe": _ATTENTION,
        "sarvam_mla": _LATENT_ATTENTION,
        "youtu": _LATENT_ATTENTION,
    }
)


def with_added_styles(family: str, styles: Mapping[str, str] | None) -> dict[str, str]:
    """A family's plan with what it leaves out; where both name a layer, the family's counts.

    Args:
        family: transformers' model type.
        styles: the family's `base_model_tp_plan`, from patterns of names to styles.
    """
    if not styles:
        return {}
    return {**_ADDED.get(family, {}), **styles}
