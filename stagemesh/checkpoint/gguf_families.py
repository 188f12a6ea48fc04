"""The families of models that GGUF files hold, and those that are refused. Torch-free."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from stagemesh.checkpoint import gguf_family_config as config_of
from stagemesh.checkpoint.gguf_keys import GgufKeys

_Extend = Callable[[GgufKeys, dict[str, Any]], dict[str, Any]]

_EXPERT_KEYS = ("expert_count", "expert_used_count", "expert_feed_forward_length")


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


_GELU_TANH = {"hidden_act": "gelu_pytorch_tanh"}
_GELU_TANH_LONG = {"hidden_activation": "gelu_pytorch_tanh"}
_SWA_KEYS = ("attn_logit_softcapping", "final_logit_softcapping", "rope.freq_base_swa")

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(model_type="llama", class_name="LlamaForCausalLM", extend=config_of.llama),
        "mistral": Family(
            model_type="mistral", class_name="MistralForCausalLM", extend=config_of.mistral
        ),
        "mixtral": Family(
            model_type="mixtral",
            class_name="MixtralForCausalLM",
            extend=config_of.mixtral,
            keys=_EXPERT_KEYS,
        ),
        "qwen2": Family(model_type="qwen2", class_name="Qwen2ForCausalLM", extend=config_of.qwen2),
        "qwen3": Family(model_type="qwen3", class_name="Qwen3ForCausalLM", extend=config_of.qwen3),
        "qwen2moe": Family(
            model_type="qwen2_moe",
            class_name="Qwen2MoeForCausalLM",
            extend=config_of.qwen2_moe,
            keys=(*_EXPERT_KEYS, "expert_shared_feed_forward_length"),
        ),
        "qwen3moe": Family(
            model_type="qwen3_moe",
            class_name="Qwen3MoeForCausalLM",
            extend=config_of.qwen3_moe,
            keys=_EXPERT_KEYS,
        ),
        "minimax-m2": Family(
            model_type="minimax_m2",
            class_name="MiniMaxM2ForCausalLM",
            extend=config_of.minimax_m2,
            keys=(*_EXPERT_KEYS, "expert_gating_func"),
            partial_rotary=True,
        ),
        "phi3": Family(
            model_type="phi3",
            class_name="Phi3ForCausalLM",
            extend=config_of.phi3,
            partial_rotary=True,
        ),
        "gemma": Family(
            model_type="gemma",
            class_name="GemmaForCausalLM",
            extend=config_of.nothing,
            activation=_GELU_TANH,
        ),
        "gemma2": Family(
            model_type="gemma2",
            class_name="Gemma2ForCausalLM",
            extend=config_of.gemma2,
            keys=_SWA_KEYS[:2],
            activation=_GELU_TANH_LONG,
        ),
        "gemma3": Family(
            model_type="gemma3_text",
            class_name="Gemma3ForCausalLM",
            extend=config_of.gemma3,
            keys=_SWA_KEYS[1:],
            activation=_GELU_TANH_LONG,
        ),
        "starcoder2": Family(
            model_type="starcoder2",
            class_name="Starcoder2ForCausalLM",
            extend=config_of.starcoder2,
            norm_key="norm_epsilon",
            activation=_GELU_TANH,
        ),
        "stablelm": Family(
            model_type="stablelm",
            class_name="StableLmForCausalLM",
            extend=config_of.stablelm,
            keys=("use_parallel_residual",),
            norm_key="layer_norm_eps",
            partial_rotary=True,
        ),
        "nemotron": Family(
            model_type="nemotron",
            class_name="NemotronForCausalLM",
            extend=config_of.nemotron,
            norm_key="norm_eps",
            activation={"hidden_act": "relu2"},
            partial_rotary=True,
        ),
        "gpt2": Family(
            model_type="gpt2",
            class_name="GPT2LMHeadModel",
            extend=config_of.gpt2,
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
            extend=config_of.nothing,
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
            extend=config_of.falcon,
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
