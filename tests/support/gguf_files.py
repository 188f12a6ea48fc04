"""GGUF files of tiny models of any family, written as llama.cpp's converter writes them.

Tensor names come from gguf-py's own map, and what the converter does to values is done here once
more, with torch, so that the files do not depend on the code under test.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "minimax_m2": "minimax-m2",
}
_PLUS_ONE = ("gemma", "gemma2", "gemma3", "nemotron")


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    matrix_type: str = "F32",
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    """Writes a model as a GGUF file.

    Args:
        path: of the file.
        model: fp32.
        matrix_type: ggml type of the matrices; vectors are F32.
        extra: called with the writer before the tensors are added.
    """
    family = model.config.model_type
    architecture = ARCHITECTURES.get(family, family)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(f"tiny {family}")
    _add_config(writer, model.config, architecture)
    if extra is not None:
        extra(writer)
    kinds = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    num_layers = model.config.num_hidden_layers
    names = gguf.get_tensor_name_map(kinds[architecture], num_layers)
    for name, value in _converted(model, architecture):
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        data = np.ascontiguousarray(value.numpy())
        kind = gguf.GGMLQuantizationType["F32" if data.ndim == 1 else matrix_type]
        writer.add_tensor(gguf_name, gguf.quants.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _converted(model: PreTrainedModel, architecture: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Names as the converter asks for them, and values as it writes them."""
    config = model.config
    tensors = dict(model.named_parameters())
    tensors |= {
        name: value for name, value in model.named_buffers() if name.endswith("correction_bias")
    }
    norms: dict[str, list[torch.Tensor]] = {}
    for full_name, value in tensors.items():
        name, tensor = full_name, value.detach()
        if name.endswith(".experts.gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            yield name.replace("gate_up_proj", "gate_proj.weight"), gate
            yield name.replace("gate_up_proj", "up_proj.weight"), up
            continue
        if "layernorm.norms." in name:  # one for each head, which are stacked
            norms.setdefault(name.split(".norms.")[0] + ".weight", []).append(tensor)
            continue
        if name.endswith((".experts.down_proj", "correction_bias")):
            name += ".weight" if name.endswith("proj") else ".bias"
            name = name.replace("correction_bias.bias", "correction.bias")
        if name.endswith("shared_expert_gate.weight"):
            tensor = tensor.squeeze()
        if architecture == "llama" and ".q_proj." in name:
            tensor = pairs(tensor, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            tensor = pairs(tensor, config.num_key_value_heads)
        if architecture in _PLUS_ONE and name.endswith("norm.weight"):
            tensor = tensor + 1
        if architecture == "gpt2" and name.endswith(
            ("c_attn.weight", "c_proj.weight", "c_fc.weight")
        ):
            tensor = tensor.T
        if architecture in ("bloom", "falcon") and "query_key_value" in name:
            num_kv_heads = config.num_kv_heads if architecture == "falcon" else config.n_head
            tensor = queries_keys_values(tensor, config.num_attention_heads, num_kv_heads)
        yield name.removeprefix("transformer.") if architecture == "bloom" else name, tensor
    for name, stack in norms.items():
        yield name, torch.stack(stack)


def pairs(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Each head's halves as neighbouring pairs."""
    halves = tensor.reshape(num_heads, 2, -1, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def queries_keys_values(tensor: torch.Tensor, num_heads: int, num_kv_heads: int) -> torch.Tensor:
    """Groups of queries with their key and value as all queries, all keys, all values."""
    group = num_heads // num_kv_heads + 2
    rows = tensor.reshape(num_kv_heads, group, -1, *tensor.shape[1:])
    parts = (rows[:, :-2], rows[:, [-2]], rows[:, [-1]])
    return torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in parts])


def _add_config(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_kv_heads", None) or getattr(
        config, "num_key_value_heads", heads
    )
    hidden = config.hidden_size
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(
        getattr(config, "max_position_embeddings", None) or getattr(config, "seq_length", 128)
    )
    writer.add_embedding_length(hidden)
    # Falcon's converter does not look at the config here.
    inner = None if architecture == "falcon" else getattr(config, "intermediate_size", None)
    writer.add_feed_forward_length(inner or 4 * hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    if architecture not in ("stablelm", "falcon", "bloom", "gpt2", "nemotron", "starcoder2"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        if architecture != "phi3":
            writer.add_key_length(head_dim)
            writer.add_value_length(head_dim)
    else:
        names = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
        writer.add_layer_norm_eps(next(getattr(config, n) for n in names if hasattr(config, n)))
    _add_rope(writer, config, architecture, head_dim)
    _add_family(writer, config, architecture)
    writer.add_vocab_size(config.vocab_size)
    for token, add in (("bos", writer.add_bos_token_id), ("eos", writer.add_eos_token_id)):
        if getattr(config, f"{token}_token_id", None) is not None:
            add(getattr(config, f"{token}_token_id"))


def _add_rope(writer: gguf.GGUFWriter, config: Any, architecture: str, head_dim: int) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if architecture in ("phi3", "stablelm", "nemotron", "minimax-m2"):
        writer.add_rope_dimension_count(int(rope.get("partial_rotary_factor", 1.0) * head_dim))
    if rope and architecture not in ("gemma", "gemma2", "stablelm", "falcon"):
        writer.add_rope_freq_base(rope["rope_theta"])
    if architecture == "nemotron":
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if architecture == "falcon":
        writer.add_tensor_data_layout("jploski")


def _add_family(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if architecture in ("qwen2moe", "qwen3moe"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if architecture == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if architecture == "minimax-m2":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if architecture in ("gemma2", "gemma3", "phi3") or config.model_type == "mistral":
        writer.add_sliding_window(config.sliding_window or 0)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture == "stablelm":
        writer.add_parallel_residual(config.use_parallel_residual)
