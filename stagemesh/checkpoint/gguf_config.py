"""From the metadata of a GGUF file to the config.json that the model would have. Torch-free.

Keys that change the output and that we do not map are refused by name; a silent default would
give fluent nonsense.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stagemesh.checkpoint.gguf_header import GgufHeader
from stagemesh.checkpoint.gguf_names import BLOCK_NAMES, EMBEDDING_NAME, ROPE_FACTORS_NAME
from stagemesh.checkpoint.tensor_info import TensorInfo, read_data
from stagemesh.errors import CheckpointError, UnsupportedModel

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

# Keys below "{architecture}." that this module reads.
_KNOWN_KEYS = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "rope.freq_base",
        "rope.dimension_count",
        "rope.scale_linear",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "vocab_size",
    }
)
# Keys that describe the file or its history and do not change the output.
_HARMLESS_KEYS = frozenset({"rope.scaling.finetuned", "tensor_data_layout", "expert_used_count"})
_NEUTRAL_VALUES = (0, 0.0, False, "", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufConfig:
    """A GGUF file's model, in the words of transformers."""

    config: dict[str, Any]
    """What config.json would hold."""
    rope_frequency_factors: tuple[float, ...] | None
    """Divisors of the rope frequencies, one per pair of dimensions; None when there are none."""


def config_from_gguf(header: GgufHeader, *, path: str) -> GgufConfig:
    """Builds the equivalent of config.json.

    Raises:
        UnsupportedModel: the architecture, or a key that changes the output, is not mapped.
        CheckpointError: a needed key is missing or contradicts a tensor.
    """
    architecture = header.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in BLOCK_NAMES:
        raise UnsupportedModel(
            f"{path}: GGUF architecture {architecture!r:.80} is not supported; "
            f"supported: {', '.join(sorted(BLOCK_NAMES))}"
        )
    keys = _Keys(header.metadata, architecture=architecture, path=path)
    keys.refuse_unknown()
    tensors = {info.name: info for info in header.tensors}
    config = _base_config(keys, tensors)
    config |= _family_config(keys, tensors, num_layers=config["num_hidden_layers"])
    scaling = _rope_scaling(keys)
    if scaling is not None:
        config["rope_scaling"] = scaling
    factors = _rope_factors(tensors, head_dim=config["head_dim"], path=path)
    if factors is not None and scaling is not None:
        raise UnsupportedModel(
            f"{path}: {ROPE_FACTORS_NAME} together with rope.scaling.type is not supported"
        )
    return GgufConfig(config=config, rope_frequency_factors=factors)


class _Keys:
    """The metadata below "{architecture}.", with errors that name the key."""

    def __init__(self, metadata: Mapping[str, Any], *, architecture: str, path: str) -> None:
        self.metadata = metadata
        self.architecture = architecture
        self.path = path
        self._prefix = f"{architecture}."

    def refuse_unknown(self) -> None:
        for key, value in self.metadata.items():
            name = key.removeprefix(self._prefix)
            if name == key or name in _KNOWN_KEYS or name in _HARMLESS_KEYS:
                continue
            if isinstance(value, list) or value not in _NEUTRAL_VALUES:
                raise UnsupportedModel(f"{self.path}: key {key!r} = {value!r:.80} is not supported")

    def number(self, name: str, *, default: float | None = None) -> float:
        value = self.metadata.get(self._prefix + name, default)
        # Written so that NaN fails, too.
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value < float("inf")
        ):
            raise CheckpointError(
                f"{self.path}: key {self._prefix + name!r} must be a positive number, "
                f"got {value!r:.80}"
            )
        return value

    def count(self, name: str, *, default: int | None = None) -> int:
        value = self.metadata.get(self._prefix + name, default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]  # one number per layer, all the same
        if isinstance(value, list):
            raise UnsupportedModel(
                f"{self.path}: key {self._prefix + name!r} differs between layers, "
                "which is not supported"
            )
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(
                f"{self.path}: key {self._prefix + name!r} must be a positive integer, "
                f"got {value!r:.80}"
            )
        return value

    def get(self, name: str) -> Any:
        return self.metadata.get(self._prefix + name)

    def token_id(self, name: str) -> int | None:
        value = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return value if isinstance(value, int) and not isinstance(value, bool) else None


def _base_config(keys: _Keys, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    embedding = tensors.get(EMBEDDING_NAME)
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{keys.path}: tensor {EMBEDDING_NAME} is missing or not a matrix")
    num_heads = keys.count("attention.head_count")
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": keys.count("embedding_length"),
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", default=num_heads),
        "head_dim": _head_dim(keys, tensors, num_heads=num_heads),
        "hidden_act": "silu",
        "max_position_embeddings": keys.count("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", default=10_000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": keys.token_id("bos"),
        "eos_token_id": _eos_token_ids(keys) or None,
        "pad_token_id": keys.token_id("padding"),
    }


def _eos_token_ids(keys: _Keys) -> list[int]:
    ids = (keys.token_id(name) for name in ("eos", "eot", "eom"))
    return list(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def _head_dim(keys: _Keys, tensors: Mapping[str, TensorInfo], *, num_heads: int) -> int:
    """From the q rows, which old files have where they lack `attention.key_length`."""
    q_proj = tensors.get("blk.0.attn_q.weight")
    if q_proj is None or len(q_proj.shape) != 2 or q_proj.shape[0] % num_heads:
        raise CheckpointError(
            f"{keys.path}: tensor blk.0.attn_q.weight is missing or its rows are not a multiple "
            f"of attention.head_count {num_heads}"
        )
    head_dim = q_proj.shape[0] // num_heads
    for name in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        if keys.count(name, default=head_dim) != head_dim:
            raise UnsupportedModel(
                f"{keys.path}: key {keys.architecture}.{name} = {keys.get(name)} differs from the "
                f"head dim {head_dim} of blk.0.attn_q.weight, which is not supported"
            )
    return head_dim


def _family_config(
    keys: _Keys, tensors: Mapping[str, TensorInfo], *, num_layers: int
) -> dict[str, Any]:
    """What differs between families: the class, biases, the sliding window."""
    window = keys.get("attention.sliding_window") or 0
    if window and keys.architecture != "llama":
        raise UnsupportedModel(
            f"{keys.path}: key '{keys.architecture}.attention.sliding_window' = {window} "
            "is not supported"
        )
    # Mistral files name the architecture "llama"; with a window they need Mistral's class.
    family = "mistral" if window else keys.architecture
    config: dict[str, Any] = {"model_type": family, "architectures": [_CLASSES[family]]}
    has_attention_bias = "blk.0.attn_q.bias" in tensors
    has_mlp_bias = "blk.0.ffn_gate.bias" in tensors
    if window:
        config["sliding_window"] = keys.count("attention.sliding_window")
    if family in ("llama", "qwen3"):
        config["attention_bias"] = has_attention_bias
    elif family == "mistral" and has_attention_bias:
        raise UnsupportedModel(f"{keys.path}: blk.0.attn_q.bias with a sliding window")
    if family == "llama":
        config["mlp_bias"] = has_mlp_bias
    elif has_mlp_bias:
        raise UnsupportedModel(f"{keys.path}: blk.0.ffn_gate.bias is not supported for {family}")
    if family in ("qwen2", "qwen3"):
        config |= {"use_sliding_window": False, "max_window_layers": num_layers}
    return config


def _rope_scaling(keys: _Keys) -> dict[str, Any] | None:
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
    raise UnsupportedModel(
        f"{keys.path}: {keys.architecture}.rope.scaling.type {kind!r:.80} is not supported; "
        "supported: none, linear, yarn"
    )


def _rope_factors(
    tensors: Mapping[str, TensorInfo], *, head_dim: int, path: str
) -> tuple[float, ...] | None:
    info = tensors.get(ROPE_FACTORS_NAME)
    if info is None:
        return None
    if info.encoding != "F32" or info.shape != (head_dim // 2,):
        raise UnsupportedModel(
            f"{path}: tensor {ROPE_FACTORS_NAME} must be {head_dim // 2} values of F32, "
            f"got shape {list(info.shape)} of {info.encoding}"
        )
    factors = struct.unpack(f"<{head_dim // 2}f", read_data(info))
    if not all(0.0 < factor < float("inf") for factor in factors):
        raise CheckpointError(f"{path}: tensor {ROPE_FACTORS_NAME} holds a factor that is not > 0")
    return factors
