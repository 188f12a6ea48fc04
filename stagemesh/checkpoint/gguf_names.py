"""GGUF tensor names as the parameter names of hub checkpoints, and what writers did to values.

Torch-free. The tables say what llama.cpp's converter does for each architecture: it renames, and in
some families reorders rows, transposes, adds one to norms, or stacks the experts of a layer. Names
are those of a checkpoint on the hub, so that whatever is done with one is done with a GGUF, too.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from stagemesh.checkpoint.stored_form import AS_IT_IS, RowOrder, StoredForm
from stagemesh.checkpoint.tensor_info import TensorInfo
from stagemesh.errors import CheckpointError, UnsupportedModel

ROPE_FACTORS_NAME = "rope_freqs.weight"
"""Tensor of per-dimension factors by which rope frequencies are divided; not a parameter."""

EMBEDDING_NAME = "token_embd.weight"
"""The token table's name in a GGUF file."""

MAX_EXPERTS = 4096
"""Most experts of a layer that are read; models in use have at most 512."""

_BLOCK_TENSOR = re.compile(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """How an architecture's tensors are called, and what the writer did to them."""

    block: Mapping[str, str]
    """Tensor name inside a block -> module inside a layer."""
    top: Mapping[str, str] = field(
        default_factory=lambda: {
            "token_embd": "model.embed_tokens",
            "output_norm": "model.norm",
            "output": "lm_head",
        }
    )
    """Tensor name outside of blocks -> module."""
    layers: str = "model.layers"
    """Module that holds the layers."""
    stacks: Mapping[str, str] = field(default_factory=dict)
    """Tensors that stack one tensor for each expert or head -> module, with {} for its number."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Tensors that are a parameter of their own and no module's weight -> its name."""
    row_vectors: frozenset[str] = frozenset()
    """Vectors that the model has as a matrix of one row."""
    paired: frozenset[str] = frozenset()
    """Tensors whose heads have the order "pairs"."""
    grouped: frozenset[str] = frozenset()
    """Tensors that have the order "qkv"."""
    transposed: frozenset[str] = frozenset()
    """Matrices that are transposed."""
    raised_norms: bool = False
    """Weights of norms are greater by one."""


_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_UP_DOWN = {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_GATED_MLP = {"ffn_gate": "mlp.gate_proj", **_UP_DOWN}
_LLAMA = _ATTENTION | _GATED_MLP
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_SPARSE_EXPERTS = {
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_SHARED_EXPERT = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_GPT2_TOP = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_WORD_TOP = {
    "token_embd": "transformer.word_embeddings",
    "token_embd_norm": "transformer.word_embeddings_layernorm",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_WORD_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_QUERY_AND_KEY = frozenset({"attn_q", "attn_k"})
_QKV = frozenset({"attn_qkv"})

TENSOR_NAMES: Mapping[str, TensorNames] = MappingProxyType(
    {
        "llama": TensorNames(block=_LLAMA, paired=_QUERY_AND_KEY),
        "mixtral": TensorNames(
            block=_ATTENTION | {"ffn_gate_inp": "block_sparse_moe.gate"},
            stacks=_SPARSE_EXPERTS,
            paired=_QUERY_AND_KEY,
        ),
        "qwen2": TensorNames(block=_LLAMA),
        "qwen2moe": TensorNames(
            block=_ATTENTION | _SHARED_EXPERT,
            stacks=_EXPERTS,
            row_vectors=frozenset({"ffn_gate_inp_shexp"}),
        ),
        "qwen3": TensorNames(block=_LLAMA | _QK_NORM),
        "qwen3moe": TensorNames(
            block=_ATTENTION | _QK_NORM | {"ffn_gate_inp": "mlp.gate"}, stacks=_EXPERTS
        ),
        "minimax-m2": TensorNames(
            block=_ATTENTION | _QK_NORM | {"ffn_gate_inp": "block_sparse_moe.gate"},
            stacks=_SPARSE_EXPERTS,
            parameters={"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"},
        ),
        "phi3": TensorNames(
            block={
                "attn_norm": "input_layernorm",
                "attn_qkv": "self_attn.qkv_proj",
                "attn_output": "self_attn.o_proj",
                "ffn_norm": "post_attention_layernorm",
                "ffn_up": "mlp.gate_up_proj",
                "ffn_down": "mlp.down_proj",
            }
        ),
        "gemma": TensorNames(block=_LLAMA, raised_norms=True),
        "gemma2": TensorNames(block=_LLAMA | _FOUR_NORMS, raised_norms=True),
        "gemma3": TensorNames(block=_LLAMA | _FOUR_NORMS | _QK_NORM, raised_norms=True),
        "starcoder2": TensorNames(
            block=_ATTENTION | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
        ),
        "stablelm": TensorNames(
            block=_LLAMA,
            stacks={
                "attn_q_norm": "self_attn.q_layernorm.norms.{}",
                "attn_k_norm": "self_attn.k_layernorm.norms.{}",
            },
        ),
        "nemotron": TensorNames(block=_ATTENTION | _UP_DOWN, raised_norms=True),
        "gpt2": TensorNames(
            top=_GPT2_TOP,
            layers="transformer.h",
            block=_GPT2,
            transposed=frozenset({"attn_qkv", "attn_output", "ffn_up", "ffn_down"}),
        ),
        "bloom": TensorNames(
            top=_WORD_TOP, layers="transformer.h", block=_WORD_BLOCK, grouped=_QKV
        ),
        "falcon": TensorNames(
            top=_WORD_TOP, layers="transformer.h", block=_WORD_BLOCK, grouped=_QKV
        ),
        "falcon-two-norms": TensorNames(
            top=_WORD_TOP,
            layers="transformer.h",
            block=_WORD_BLOCK | {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"},
            grouped=_QKV,
        ),
    }
)
"""By the kind of file, which is its architecture or a variant that its tensors tell apart."""


def model_tensors(
    info: TensorInfo, *, kind: str, config: Mapping[str, Any]
) -> tuple[TensorInfo, ...]:
    """The parameters that a tensor of the file holds: one, or one for each expert of a stack.

    Args:
        info: the tensor, by its own name and shape.
        kind: key of `TENSOR_NAMES`.
        config: of the model, for its numbers of heads.

    Raises:
        UnsupportedModel: the tensor has no counterpart; dropping it would change the output.
        CheckpointError: a stack is no stack, or of too many.
    """
    names = TENSOR_NAMES[kind]
    match = _BLOCK_TENSOR.fullmatch(info.source_name)
    if match is None:
        part, _, suffix = info.source_name.rpartition(".")
        module, prefix = names.top.get(part), ""
    else:
        part, suffix = match[2], match[3]
        prefix = f"{names.layers}.{int(match[1])}."
        bare = names.parameters.get(f"{part}.{suffix}")
        if bare is not None:
            return (dataclasses.replace(info, name=prefix + bare),)
        if part in names.stacks:
            return _unstack(info, name=f"{prefix}{names.stacks[part]}.{suffix}")
        module = names.block.get(part)
    if module is None or suffix not in ("weight", "bias"):
        raise UnsupportedModel(
            f"{info.file}: GGUF tensor {info.source_name!r} is not supported for {kind!r}"
        )
    stored = _stored_form(names, part, suffix=suffix, config=config)
    shape = info.shape[::-1] if stored.is_transposed else info.shape
    if part in names.row_vectors and len(shape) == 1:
        shape = (1, *shape)
    name = f"{prefix}{module}.{suffix}"
    return (dataclasses.replace(info, name=name, shape=shape, stored=stored),)


def _unstack(info: TensorInfo, *, name: str) -> tuple[TensorInfo, ...]:
    """The slices of the first axis, which lie one after the other."""
    if len(info.shape) < 2 or not 1 <= info.shape[0] <= MAX_EXPERTS:
        raise CheckpointError(
            f"{info.file}: tensor {info.source_name} must stack 1 to {MAX_EXPERTS} tensors, it has "
            f"shape {list(info.shape)}"
        )
    num_bytes = info.num_bytes // info.shape[0]
    return tuple(
        dataclasses.replace(
            info,
            name=name.format(index),
            source_name=f"{info.source_name}[{index}]",
            offset=info.offset + index * num_bytes,
            num_bytes=num_bytes,
            shape=info.shape[1:],
        )
        for index in range(info.shape[0])
    )


def _stored_form(
    names: TensorNames, part: str, *, suffix: str, config: Mapping[str, Any]
) -> StoredForm:
    num_heads = config.get("num_attention_heads") or config.get("n_head") or 1
    num_kv_heads = config.get("num_key_value_heads") or config.get("num_kv_heads") or num_heads
    if part in names.paired:
        heads = num_heads if part == "attn_q" else num_kv_heads
        order = RowOrder(kind="pairs", num_heads=heads, num_kv_heads=heads)
        return StoredForm(row_order=order)
    if part in names.grouped:
        order = RowOrder(kind="qkv", num_heads=num_heads, num_kv_heads=num_kv_heads)
        return StoredForm(row_order=order)
    if part in names.transposed and suffix == "weight":
        return StoredForm(is_transposed=True)
    if names.raised_norms and part.endswith("norm") and suffix == "weight":
        return StoredForm(added=1.0)
    return AS_IT_IS
