"""What each family's config.json says that others' do not, from the metadata of a GGUF. Torch-free.

One function for each family: from the keys of the file and the config so far to what is added to
it. Where a file does not say a number, the value is the one that llama.cpp computes with.
"""

from typing import Any

from stagemesh.checkpoint.gguf_keys import GgufKeys

_SIGMOID = 2
"""Value of expert_gating_func."""
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
_GEMMA3_PATTERN = 6
"""Every sixth layer of Gemma 3 attends to everything."""


def nothing(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Nothing besides what all files say."""
    return {}


def llama(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Biases, by whether the file has them."""
    return {
        "attention_bias": keys.has("blk.0.attn_q.bias"),
        "mlp_bias": keys.has("blk.0.ffn_gate.bias"),
    }


def mistral(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """The window; there are no biases."""
    _refuse_biases(keys, "blk.0.attn_q.bias", "blk.0.ffn_gate.bias")
    return {"sliding_window": keys.count("attention.sliding_window")}


def mixtral(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Experts; files do not tell a window."""
    return {
        "num_local_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "sliding_window": None,
    }


def qwen2(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """No window, which files of this family do not use."""
    _refuse_window(keys)
    _refuse_biases(keys, "blk.0.ffn_gate.bias")
    return {"use_sliding_window": False, "max_window_layers": config["num_hidden_layers"]}


def qwen3(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Those of Qwen2, and biases of attention."""
    return qwen2(keys, config) | {"attention_bias": keys.has("blk.0.attn_q.bias")}


def _experts(keys: GgufKeys) -> dict[str, Any]:
    return {
        "num_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "moe_intermediate_size": keys.rows("blk.0.ffn_gate_exps.weight", axis=1),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def qwen2_moe(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Experts, one of which all tokens share."""
    shared = keys.rows("blk.0.ffn_gate_shexp.weight")
    return qwen2(keys, config) | _experts(keys) | {"shared_expert_intermediate_size": shared}


def qwen3_moe(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Experts whose weights are brought to a sum of one, as llama.cpp always does here."""
    return qwen3(keys, config) | _experts(keys) | {"norm_topk_prob": True}


def minimax_m2(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Experts that a sigmoid chooses."""
    if keys.get("expert_gating_func") not in (None, _SIGMOID):
        raise keys.refuse(f"expert_gating_func {keys.get('expert_gating_func')!r} is not sigmoid")
    return {
        "intermediate_size": keys.rows("blk.0.ffn_gate_exps.weight", axis=1),
        "num_local_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
    }


def phi3(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """The window, and the context that positions were trained for."""
    window = keys.get("attention.sliding_window")
    return {
        "sliding_window": keys.count("attention.sliding_window") if window else None,
        "original_max_position_embeddings": config["max_position_embeddings"],
    }


def gemma2(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Window, soft caps and the scale of queries."""
    scalar = _attention_scalar(keys, config)
    return scalar | {
        "sliding_window": keys.count("attention.sliding_window"),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", default=50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", default=30.0),
    }


def gemma3(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Window, soft cap, scale of queries, kinds of layers and a second rope."""
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


def starcoder2(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Biases, by whether the file has them; no window."""
    return {"use_bias": keys.has("blk.0.attn_q.bias"), "sliding_window": None}


def stablelm(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Biases, norms of queries and keys, and parallel residuals, by the tensors."""
    return {
        "use_qkv_bias": keys.has("blk.0.attn_q.bias"),
        "qk_layernorm": keys.has("blk.0.attn_q_norm.weight"),
        "use_parallel_residual": not keys.has("blk.0.ffn_norm.weight"),
    }


def nemotron(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Biases, by whether the file has them."""
    return {
        "attention_bias": keys.has("blk.0.attn_q.bias"),
        "mlp_bias": keys.has("blk.0.ffn_up.bias"),
    }


def gpt2(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """The number of learned positions."""
    return {"n_positions": keys.rows("position_embd.weight")}


def falcon(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """One of the three forms of its attention, by heads and norms."""
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
