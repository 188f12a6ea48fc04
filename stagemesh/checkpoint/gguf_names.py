"""GGUF tensor names as transformers parameter names, and the row order of q and k. Torch-free."""

import re
from collections.abc import Mapping
from types import MappingProxyType

from stagemesh.errors import UnsupportedModel

ROPE_FACTORS_NAME = "rope_freqs.weight"
"""Tensor of per-dimension factors by which rope frequencies are divided; not a parameter."""

EMBEDDING_NAME = "token_embd.weight"
"""The token table's name in a GGUF file."""

_TOP_LEVEL = {
    EMBEDDING_NAME: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

_LLAMA_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

BLOCK_NAMES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "llama": _LLAMA_BLOCK,
        "qwen2": _LLAMA_BLOCK,
        "qwen3": _LLAMA_BLOCK
        | {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"},
    }
)
"""By GGUF architecture: a block's tensor name -> the module inside `model.layers.N`."""

# The converter reorders the q and k rows of this architecture only, because ggml rotates
# neighbouring pairs there and half-split pairs in the others.
_PERMUTED_ARCHITECTURES = frozenset({"llama"})

_BLOCK_TENSOR = re.compile(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)", re.ASCII)


def hf_parameter_name(name: str, *, architecture: str) -> str:
    """The transformers parameter that the GGUF tensor `name` holds.

    Raises:
        UnsupportedModel: the tensor has no counterpart; dropping it would change the output.
    """
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    match = _BLOCK_TENSOR.fullmatch(name)
    module = BLOCK_NAMES[architecture].get(match[2]) if match else None
    if match is None or module is None:
        raise UnsupportedModel(
            f"GGUF tensor {name!r} is not supported for architecture {architecture!r}"
        )
    return f"model.layers.{int(match[1])}.{module}.{match[3]}"


def permuted_heads(
    source_name: str, *, architecture: str, num_heads: int, num_kv_heads: int
) -> int | None:
    """Heads over which the GGUF writer permuted the tensor's rows, None where it did not.

    The writer turned the rows of each head from two halves [2, head_dim / 2] to neighbouring
    pairs [head_dim / 2, 2]. q has the query heads, k the (fewer) KV heads.
    """
    if architecture not in _PERMUTED_ARCHITECTURES:
        return None
    match = _BLOCK_TENSOR.fullmatch(source_name)
    if match is None:
        return None
    return {"attn_q": num_heads, "attn_k": num_kv_heads}.get(match[2])
