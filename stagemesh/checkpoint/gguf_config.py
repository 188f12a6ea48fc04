"""From the metadata of a GGUF file to the config.json that the model would have. Torch-free.

Keys that change the output and that we do not map are refused by name; a silent default would
give fluent nonsense.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stagemesh.checkpoint.gguf_families import FAMILIES, UNSUPPORTED, Family
from stagemesh.checkpoint.gguf_header import GgufHeader
from stagemesh.checkpoint.gguf_keys import GgufKeys
from stagemesh.checkpoint.gguf_names import EMBEDDING_NAME, ROPE_FACTORS_NAME, TENSOR_NAMES
from stagemesh.checkpoint.tensor_info import TensorInfo, read_data
from stagemesh.errors import CheckpointError, UnsupportedModel

_ARCHITECTURES = frozenset(FAMILIES) & frozenset(TENSOR_NAMES) - {"mixtral"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufConfig:
    """A GGUF file's model, in the words of transformers."""

    config: dict[str, Any]
    """What config.json would hold."""
    kind: str
    """Which table of tensor names is the file's."""
    rope_frequency_factors: tuple[float, ...] | None
    """Divisors of the rope frequencies, one per pair of dimensions; None when there are none."""


def config_from_gguf(header: GgufHeader, *, path: str) -> GgufConfig:
    """Builds the equivalent of config.json.

    Raises:
        UnsupportedModel: the architecture, or a key that changes the output, is not mapped.
        CheckpointError: a needed key is missing or contradicts a tensor.
    """
    architecture = _architecture(header, path=path)
    tensors = {info.name: info for info in header.tensors}
    keys = GgufKeys(header.metadata, architecture=architecture, tensors=tensors, path=path)
    family_name = architecture
    if architecture == "llama":
        family_name = _llama_family(keys)
    family = FAMILIES[family_name]
    keys.refuse_unknown(family.keys)
    config = _base_config(keys, family)
    factors = _rope_factors(keys, head_dim=config["head_dim"], rope=config["rope_parameters"])
    config |= family.extend(keys, config)
    if not family.has_rope:
        del config["rope_parameters"], config["num_key_value_heads"]
    if keys.has("blk.0.attn_qkv.weight"):
        del config["head_dim"]  # these classes derive it
    kind = "llama" if family_name == "mistral" else family_name
    if kind == "falcon" and keys.has("blk.0.attn_norm_2.weight"):
        kind = "falcon-two-norms"
    return GgufConfig(
        config={family.renamed.get(key, key): value for key, value in config.items()},
        kind=kind,
        rope_frequency_factors=factors,
    )


def _architecture(header: GgufHeader, *, path: str) -> str:
    architecture = header.metadata.get("general.architecture")
    if isinstance(architecture, str) and architecture in _ARCHITECTURES:
        return architecture
    reason = UNSUPPORTED.get(architecture) if isinstance(architecture, str) else None
    raise UnsupportedModel(
        f"{path}: GGUF architecture {architecture!r:.80} is not supported"
        f"{f' ({reason})' if reason else ''}; supported: {', '.join(sorted(_ARCHITECTURES))}"
    )


def _llama_family(keys: GgufKeys) -> str:
    """Files of three families name the architecture "llama"."""
    if keys.get("expert_count"):
        return "mixtral"
    # With a window Mistral's class is needed; without one the two are the same.
    return "mistral" if keys.get("attention.sliding_window") else "llama"


def _base_config(keys: GgufKeys, family: Family) -> dict[str, Any]:
    embedding = keys.tensors.get(EMBEDDING_NAME)
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{keys.path}: tensor {EMBEDDING_NAME} is missing or not a matrix")
    num_heads = keys.count("attention.head_count")
    hidden_size = keys.count("embedding_length")
    num_kv_heads = keys.count("attention.head_count_kv", default=num_heads)
    head_dim = _head_dim(keys, num_heads=num_heads, hidden_size=hidden_size)
    is_rms = family.norm_key == "rms_norm_eps"
    epsilon = "attention.layer_norm_rms_epsilon" if is_rms else "attention.layer_norm_epsilon"
    return {
        "model_type": family.model_type,
        "architectures": [family.class_name],
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        **family.activation,
        "max_position_embeddings": keys.count("context_length"),
        family.norm_key: keys.number(epsilon),
        "rope_parameters": _rope(keys, head_dim=head_dim, is_partial=family.partial_rotary),
        "tie_word_embeddings": not keys.has("output.weight"),
        "bos_token_id": keys.token_id("bos"),
        "eos_token_id": _eos_token_ids(keys) or None,
        "pad_token_id": keys.token_id("padding"),
    }


def _eos_token_ids(keys: GgufKeys) -> list[int]:
    ids = (keys.token_id(name) for name in ("eos", "eot", "eom"))
    return list(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def _head_dim(keys: GgufKeys, *, num_heads: int, hidden_size: int) -> int:
    """From the q rows, which old files have where they lack `attention.key_length`."""
    if keys.has("blk.0.attn_qkv.weight"):
        num_rows, source = hidden_size, "embedding_length"
    else:
        num_rows, source = keys.rows("blk.0.attn_q.weight"), "blk.0.attn_q.weight"
    if num_rows % num_heads:
        raise CheckpointError(
            f"{keys.path}: the {num_rows} rows of {source} are not a multiple of "
            f"attention.head_count {num_heads}"
        )
    head_dim = num_rows // num_heads
    for name in ("attention.key_length", "attention.value_length"):
        if keys.count(name, default=head_dim) != head_dim:
            raise keys.refuse(
                f"key {keys.architecture}.{name} = {keys.get(name)} differs from the head dim "
                f"{head_dim} of {source}, which is not supported"
            )
    return head_dim


def _rope(keys: GgufKeys, *, head_dim: int, is_partial: bool) -> dict[str, Any]:
    """The rope_parameters of config.json."""
    rope = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base", default=10_000.0)}
    rope |= _rope_scaling(keys) or {}
    rotated = keys.count("rope.dimension_count", default=head_dim)
    if is_partial and rotated <= head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    elif rotated != head_dim:
        raise keys.refuse(
            f"key {keys.architecture}.rope.dimension_count = {rotated} differs from the head dim "
            f"{head_dim}, which is not supported"
        )
    return rope


def _rope_scaling(keys: GgufKeys) -> dict[str, Any] | None:
    kind = keys.get("rope.scaling.type")
    if kind is None:
        # Old files have only the factor, which meant linear scaling.
        kind = "linear" if keys.get("rope.scale_linear") not in (None, 0.0, 1.0) else "none"
        factor_key = "rope.scale_linear"
    else:
        factor_key = "rope.scaling.factor"
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": keys.number(factor_key)}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": keys.number(factor_key),
            "original_max_position_embeddings": keys.count("rope.scaling.original_context_length"),
            "beta_fast": keys.number("rope.scaling.yarn_beta_fast", default=32.0),
            "beta_slow": keys.number("rope.scaling.yarn_beta_slow", default=1.0),
        }
    raise keys.refuse(
        f"{keys.architecture}.rope.scaling.type {kind!r:.80} is not supported; "
        "supported: none, linear, yarn"
    )


def _rope_factors(
    keys: GgufKeys, *, head_dim: int, rope: Mapping[str, Any]
) -> tuple[float, ...] | None:
    info: TensorInfo | None = keys.tensors.get(ROPE_FACTORS_NAME)
    if info is None:
        return None
    count = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
    if info.encoding != "F32" or info.shape != (count,):
        raise keys.refuse(
            f"tensor {ROPE_FACTORS_NAME} must be {count} values of F32, "
            f"got shape {list(info.shape)} of {info.encoding}"
        )
    if rope["rope_type"] != "default":
        raise keys.refuse(f"{ROPE_FACTORS_NAME} together with rope.scaling.type is not supported")
    factors = struct.unpack(f"<{count}f", read_data(info))
    if not all(0.0 < factor < float("inf") for factor in factors):
        raise CheckpointError(
            f"{keys.path}: tensor {ROPE_FACTORS_NAME} holds a factor that is not > 0"
        )
    return factors
