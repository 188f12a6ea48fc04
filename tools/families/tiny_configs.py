"""A tiny random model of any causal family that transformers can build.

The config class says which numbers a family has; those with a known name become small. What a
family needs beyond that stands in `CHANGES`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB_SIZE = 100
NUM_LAYERS = 4
NUM_EXPERTS = 4
WINDOW = 4

_BY_NAMES: dict[tuple[str, ...], int] = {
    ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size"): 32,
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"): NUM_LAYERS,
    ("encoder_layers", "num_mtp_layers"): 1,
    ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"): 4,
    ("decoder_attention_heads", "swa_num_attention_heads"): 4,
    ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "kv_n_heads"): 2,
    ("head_dim", "attention_head_dim", "kv_channels", "v_head_dim", "swa_head_dim"): 8,
    ("swa_v_head_dim", "qk_nope_head_dim"): 8,
    ("qk_rope_head_dim", "qk_head_dim_rope", "rotary_dim"): 4,
    ("q_lora_rank", "kv_lora_rank"): 16,
    ("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner"): 64,
    ("intermediate_size_mlp", "ffn_hidden_size", "dense_intermediate_size"): 64,
    ("moe_intermediate_size", "shared_expert_intermediate_size"): 16,
    ("shared_intermediate_size", "expert_ffn_hidden_size"): 16,
    ("vocab_size",): VOCAB_SIZE,
    (
        "max_position_embeddings",
        "n_positions",
        "n_ctx",
        "max_seq_len",
        "max_target_positions",
        "max_sequence_length",
    ): 128,
    (
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "moe_num_experts",
        "moe_num_primary_experts",
    ): NUM_EXPERTS,
    ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k"): 2,
    ("top_k_experts",): 2,
    ("n_group", "topk_group", "num_expert_group", "topk_groups"): 1,
    ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"): 1,
    ("sliding_window", "attention_window_size", "sliding_window_size"): WINDOW,
    ("attention_chunk_size",): 8,
}
_NUMBERS = {name: number for names, number in _BY_NAMES.items() for name in names}
# Lists with an entry per layer, and what follows from other numbers: the class makes them anew.
_DERIVED = frozenset(
    {
        *("layer_types", "no_rope_layers", "mlp_layer_types", "layers_block_type", "moe_layers"),
        *("attention_layers", "attn_type_list", "layer_type_list", "transformers_version"),
        *("architectures", "model_type", "dtype", "torch_dtype", "rope_parameters"),
        *("_name_or_path", "use_cache", "return_dict", "is_encoder_decoder"),
    }
)
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

_ATTENTION = {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}
_EXPERTS = {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32}
CHANGES: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "dbrx": {"attn_config": _ATTENTION, "ffn_config": _EXPERTS},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 4},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8},
}


def causal_families() -> list[str]:
    """Model types of transformers' causal language models, in order of the alphabet."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(family: str, changes: Mapping[str, Any] | None = None) -> PretrainedConfig:
    """The family's own config class, with small numbers."""
    config_class = CONFIG_MAPPING[family]
    numbers = _small(config_class) | CHANGES.get(family, {}) | dict(changes or {})
    config: PretrainedConfig = config_class(**numbers)
    return config


def _small(config_class: type[PretrainedConfig]) -> dict[str, Any]:
    default = config_class()
    names = set(default.to_dict()) | set(vars(default)) | set(config_class.attribute_map or {})
    numbers: dict[str, Any] = {}
    for name in names - _DERIVED:
        value = getattr(default, name, None)
        if name in _TOKENS:
            numbers[name] = _TOKENS[name]
        elif (
            name in _NUMBERS
            and not isinstance(value, (list, dict))
            and (value is not None or name == "num_key_value_heads")
        ):
            numbers[name] = _NUMBERS[name]
    if "kv_lora_rank" in numbers:
        # Latent attention has a key for each query head, and finds out `head_dim` by itself.
        numbers["num_key_value_heads"] = numbers["num_attention_heads"]
        numbers.pop("head_dim", None)
    # One spelling of each number.
    for alias, name in (config_class.attribute_map or {}).items():
        if alias in numbers and name in numbers:
            del numbers[alias]
    return numbers


def tiny_model(
    family: str, changes: Mapping[str, Any] | None = None, *, seed: int = 0
) -> PreTrainedModel:
    """A random model in which every parameter and stored buffer matters."""
    config = tiny_config(family, changes)
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=torch.float32
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    stored = set(model.state_dict())
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if name not in stored or not value.is_floating_point():
                continue
            noise = torch.randn(value.shape, generator=generator)
            if value.dim() > 1:
                value.copy_(noise * 0.15)
            elif "norm" in name or "ln_" in name:
                value.copy_(noise * 0.2 if name.endswith("bias") else 1 + 0.2 * noise)
            else:
                value.copy_(noise * 0.5)
    return model
