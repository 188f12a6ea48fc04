"""What each family's config.json says that others' do not, from the metadata of a GGUF. Torch-free.

Where a file does not say a number, the value is the one that llama.cpp computes with.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from stagemesh.checkpoint.gguf_keys import GgufKeys

_Extend = Callable[[GgufKeys, dict[str, Any]], dict[str, Any]]

_EXPERT_KEYS = ("expert_count", "expert_used_count", "expert_feed_forward_length")
_SIGMOID = 2
"""Value of expert_gating_func."""
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
_GEMMA3_PATTERN = 6
"""Every sixth layer of Gemma 3 attends to everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A kind of file."""

    model_type: str
    """The family in transformers."""
    class_name: str
    """Its causal language model."""
    extend: _Extend
    """From the keys and the config so far to what the family adds to it."""
    keys: tuple[str, ...] = ()
    """Keys that only this family reads."""
    norm_key: str = "rms_norm_eps"
    """How its config calls the epsilon of norms."""
    activation: Mapping[str, str] = field(default_factory=lambda: {"hidden_act": "silu"})
    """The activation, by the config's name for it."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Keys of the config that this family spells otherwise."""
    partial_rotary: bool = False
    """Whether only a part of each head may be rotated."""
    has_rope: bool = True
    """Whether positions are rotations."""


def _llama(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention_bias": keys.has("blk.0.attn_q.bias"),
        "mlp_bias": keys.has("blk.0.ffn_gate.bias"),
    }


def _mistral(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    _refuse_biases(keys, "blk.0.attn_q.bias", "blk.0.ffn_gate.bias")
    return {"sliding_window": keys.count("attention.sliding_window")}


def _mixtral(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_local_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "sliding_window": None,
    }


def _qwen2(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    _refuse_window(keys)
    _refuse_biases(keys, "blk.0.ffn_gate.bias")
    return {"use_sliding_window": False, "max_window_layers": config["num_hidden_layers"]}


def _qwen3(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return _qwen2(keys, config) | {"attention_bias": keys.has("blk.0.attn_q.bias")}


def _experts(keys: GgufKeys) -> dict[str, Any]:
    return {
        "num_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "moe_intermediate_size": keys.rows("blk.0.ffn_gate_exps.weight", axis=1),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen2_moe(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    shared = keys.rows("blk.0.ffn_gate_shexp.weight")
    return _qwen2(keys, config) | _experts(keys) | {"shared_expert_intermediate_size": shared}


def _qwen3_moe(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    # llama.cpp always brings the chosen experts' weights to a sum of one here.
    return _qwen3(keys, config) | _experts(keys) | {"norm_topk_prob": True}


def _minimax_m2(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    if keys.get("expert_gating_func") not in (None, _SIGMOID):
        raise keys.refuse(f"expert_gating_func {keys.get('expert_gating_func')!r} is not sigmoid")
    return {
        "intermediate_size": keys.rows("blk.0.ffn_gate_exps.weight", axis=1),
        "num_local_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
    }


def _phi3(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    window = keys.get("attention.sliding_window")
    return {
        "sliding_window": keys.count("attention.sliding_window") if window else None,
        "original_max_position_embeddings": config["max_position_embeddings"],
    }


def _gemma(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {}


def _gemma2(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    scalar = _attention_scalar(keys, config)
    return scalar | {
        "sliding_window": keys.count("attention.sliding_window"),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", default=50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", default=30.0),
    }


def _gemma3(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    window = keys.get("attention.sliding_window")
    softcap = keys.get("final_logit_softcapping")
    num_layers = config["num_hidden_layers"]
    period = _GEMMA3_PATTERN if window else 1
    kinds = [
        "sliding_attention" if (n + 1) % period else "full_attention" for n in range(num_layers)
    ]
    local = {
        "rope_type": "default",
        "rope_theta": keys.number("rope.freq_base_swa", default=10_000.0),
    }
    return _attention_scalar(keys, config) | {
        "sliding_window": keys.count("attention.sliding_window") if window else None,
        "final_logit_softcapping": keys.number("final_logit_softcapping") if softcap else None,
        "layer_types": kinds,
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": local,
        },
    }


def _attention_scalar(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Queries are divided by the root of this; only the 27B models have another than head_dim."""
    is_27b = config["num_hidden_layers"] == _LAYERS_OF_27B[keys.architecture]
    scalar = config["hidden_size"] // config["num_attention_heads"]
    return {"query_pre_attn_scalar": scalar if is_27b else config["head_dim"]}


def _starcoder2(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {"use_bias": keys.has("blk.0.attn_q.bias"), "sliding_window": None}


def _stablelm(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "use_qkv_bias": keys.has("blk.0.attn_q.bias"),
        "qk_layernorm": keys.has("blk.0.attn_q_norm.weight"),
        "use_parallel_residual": not keys.has("blk.0.ffn_norm.weight"),
    }


def _nemotron(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention_bias": keys.has("blk.0.attn_q.bias"),
        "mlp_bias": keys.has("blk.0.ffn_up.bias"),
    }


def _gpt2(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {"n_positions": keys.rows("position_embd.weight")}


def _bloom(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {}


def _falcon(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    num_kv_heads = config["num_key_value_heads"]
    return {
        "multi_query": num_kv_heads == 1,
        "new_decoder_architecture": num_kv_heads > 1,
        "num_ln_in_parallel_attn": 2 if keys.has("blk.0.attn_norm_2.weight") else 1,
        "parallel_attn": True,
        "alibi": False,
        "bias": keys.has("blk.0.attn_qkv.bias"),
    }


def _refuse_biases(keys: GgufKeys, *names: str) -> None:
    for name in names:
        if keys.has(name):
            raise keys.refuse(f"{name} is not supported for {keys.architecture} in this form")


def _refuse_window(keys: GgufKeys) -> None:
    window = keys.get("attention.sliding_window")
    if window:
        raise keys.refuse(
            f"key '{keys.architecture}.attention.sliding_window' = {window} is not supported"
        )


_GELU_TANH = {"hidden_act": "gelu_pytorch_tanh"}
_GELU_TANH_LONG = {"hidden_activation": "gelu_pytorch_tanh"}
_SWA_KEYS = ("attn_logit_softcapping", "final_logit_softcapping", "rope.freq_base_swa")

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(model_type="llama", class_name="LlamaForCausalLM", extend=_llama),
        "mistral": Family(model_type="mistral", class_name="MistralForCausalLM", extend=_mistral),
        "mixtral": Family(
            model_type="mixtral",
            class_name="MixtralForCausalLM",
            extend=_mixtral,
            keys=_EXPERT_KEYS,
        ),
        "qwen2": Family(model_type="qwen2", class_name="Qwen2ForCausalLM", extend=_qwen2),
        "qwen3": Family(model_type="qwen3", class_name="Qwen3ForCausalLM", extend=_qwen3),
        "qwen2moe": Family(
            model_type="qwen2_moe",
            class_name="Qwen2MoeForCausalLM",
            extend=_qwen2_moe,
            keys=(*_EXPERT_KEYS, "expert_shared_feed_forward_length"),
        ),
        "qwen3moe": Family(
            model_type="qwen3_moe",
            class_name="Qwen3MoeForCausalLM",
            extend=_qwen3_moe,
            keys=_EXPERT_KEYS,
        ),
        "minimax-m2": Family(
            model_type="minimax_m2",
            class_name="MiniMaxM2ForCausalLM",
            extend=_minimax_m2,
            keys=(*_EXPERT_KEYS, "expert_gating_func"),
            partial_rotary=True,
        ),
        "phi3": Family(
            model_type="phi3", class_name="Phi3ForCausalLM", extend=_phi3, partial_rotary=True
        ),
        "gemma": Family(
            model_type="gemma",
            class_name="GemmaForCausalLM",
            extend=_gemma,
            activation=_GELU_TANH,
        ),
        "gemma2": Family(
            model_type="gemma2",
            class_name="Gemma2ForCausalLM",
            extend=_gemma2,
            keys=_SWA_KEYS[:2],
            activation=_GELU_TANH_LONG,
        ),
        "gemma3": Family(
            model_type="gemma3_text",
            class_name="Gemma3ForCausalLM",
            extend=_gemma3,
            keys=_SWA_KEYS[1:],
            activation=_GELU_TANH_LONG,
        ),
        "starcoder2": Family(
            model_type="starcoder2",
            class_name="Starcoder2ForCausalLM",
            extend=_starcoder2,
            norm_key="norm_epsilon",
            activation=_GELU_TANH,
        ),
        "stablelm": Family(
            model_type="stablelm",
            class_name="StableLmForCausalLM",
            extend=_stablelm,
            keys=("use_parallel_residual",),
            norm_key="layer_norm_eps",
            partial_rotary=True,
        ),
        "nemotron": Family(
            model_type="nemotron",
            class_name="NemotronForCausalLM",
            extend=_nemotron,
            norm_key="norm_eps",
            activation={"hidden_act": "relu2"},
            partial_rotary=True,
        ),
        "gpt2": Family(
            model_type="gpt2",
            class_name="GPT2LMHeadModel",
            extend=_gpt2,
            norm_key="layer_norm_epsilon",
            activation={"activation_function": "gelu_new"},
            renamed={
                "hidden_size": "n_embd",
                "num_hidden_layers": "n_layer",
                "num_attention_heads": "n_head",
                "intermediate_size": "n_inner",
                "max_position_embeddings": "n_positions",
            },
            has_rope=False,
        ),
        "bloom": Family(
            model_type="bloom",
            class_name="BloomForCausalLM",
            extend=_bloom,
            norm_key="layer_norm_epsilon",
            activation={},
            renamed={
                "num_hidden_layers": "n_layer",
                "num_attention_heads": "n_head",
                "max_position_embeddings": "seq_length",
            },
            has_rope=False,
        ),
        "falcon": Family(
            model_type="falcon",
            class_name="FalconForCausalLM",
            extend=_falcon,
            norm_key="layer_norm_epsilon",
            activation={"activation": "gelu"},
            renamed={"num_key_value_heads": "num_kv_heads", "intermediate_size": "ffn_hidden_size"},
        ),
    }
)
"""By the kind of file."""

UNSUPPORTED: Mapping[str, str] = MappingProxyType(
    {
        "deci": "its layers differ and transformers has no class for it",
        "gemma4": "its layers have two head dims and embeddings of their own",
        "lfm2": "its short convolutions keep a state that stages do not hold",
        "mamba": "its recurrent state is not held by stages",
        "qwen35": "its linear attention keeps a recurrent state that stages do not hold",
        "qwen35moe": "its linear attention keeps a recurrent state that stages do not hold",
        "t5": "it has an encoder, and only causal language models are run",
        "t5encoder": "it is an encoder, and only causal language models are run",
        "umt5": "it has an encoder, and only causal language models are run",
        "gpt-oss": "its experts' matrices would have to be woven together on load",
    }
)
"""Architectures that transformers reads from GGUF files and that are not run here, and why."""
