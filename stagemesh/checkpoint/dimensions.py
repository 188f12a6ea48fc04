"""The numbers of a model that placement and caches need, from its config.json. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stagemesh.checkpoint.refused_families import REFUSED_FAMILIES
from stagemesh.errors import CheckpointError, UnsupportedModel

# Families that spell a number in another way than most.
_ALIASES = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "attention_heads"),
    "num_key_value_heads": ("num_kv_heads",),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len", "seq_length"),
}

# transformers ties the head of these unless config.json says otherwise. For all other families a
# missing tie_word_embeddings means false.
_TIED_BY_DEFAULT = frozenset(
    {
        *("bloom", "cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "falcon", "gemma", "gemma2"),
        *("gemma3_text", "gemma3n_text", "gemma4_text", "gpt2", "gpt_bigcode", "gpt_neo"),
        *("granite_swa", "lfm2", "lfm2_moe", "minicpm3", "mpt", "openai-gpt", "opt", "smollm3"),
        *("starcoder2", "vaultgemma", "xglm"),
    }
)

# Families whose positions have no end and whose configs need not name one (alibi), and the length
# that they were trained for.
_DEFAULT_CONTEXT = {"bloom": 2048}

_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimensions:
    """The checked numbers."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_elements: int
    """Elements of keys and values that the layer that keeps most keeps of a token."""
    max_context_tokens: int
    tie_word_embeddings: bool


def read_dimensions(
    config: Mapping[str, Any], *, shapes: Mapping[str, tuple[int, ...]], where: str
) -> Dimensions:
    """Reads the dimensions out of a config.

    A missing or null head_dim is taken from the rows of a k_proj weight where the model has one
    (some families have a default that is not hidden_size / num_attention_heads).

    Args:
        config: content of config.json.
        shapes: shape of each tensor, by parameter name.
        where: named in errors.

    Raises:
        CheckpointError: a number is missing, not positive, or contradicts a tensor.
        UnsupportedModel: a kind of model that is not run (quantised by config, several parts).
    """
    reason = REFUSED_FAMILIES.get(str(config.get("model_type")))
    if reason is not None:
        raise UnsupportedModel(f"{where}: {reason}")
    if config.get("quantization_config"):
        method = config["quantization_config"]
        name = method.get("quant_method") if isinstance(method, dict) else method
        raise UnsupportedModel(
            f"{where}: config.json has a quantization_config ({name!r:.80}), which is not "
            "supported; use the unquantised checkpoint or a GGUF file"
        )
    if "text_config" in config:
        raise UnsupportedModel(
            f"{where}: model_type {config.get('model_type')!r:.80} has several parts "
            "(text_config in config.json); only text models are supported"
        )
    _check_rope(config, where=where)
    num_heads = _number(config, "num_attention_heads", where=where)
    num_kv_heads = _num_kv_heads(config, num_heads, where=where)
    hidden_size = _number(config, "hidden_size", where=where)
    head_dim = _head_dim(
        config, shapes, hidden_size // num_heads, num_kv_heads=num_kv_heads, where=where
    )
    return Dimensions(
        num_layers=_number(config, "num_hidden_layers", where=where),
        hidden_size=hidden_size,
        vocab_size=_number(config, "vocab_size", where=where),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        kv_elements=_kv_elements(config, shapes, num_kv_heads, head_dim, where=where),
        max_context_tokens=_number(
            config,
            "max_position_embeddings",
            where=where,
            default=_DEFAULT_CONTEXT.get(str(config.get("model_type"))),
        ),
        tie_word_embeddings=_is_tied(config, where=where),
    )


def _number(config: Mapping[str, Any], key: str, *, where: str, default: int | None = None) -> int:
    names = (key, *_ALIASES.get(key, ()))
    value = next((config[name] for name in names if config.get(name) is not None), default)
    if value is None:
        raise CheckpointError(f"{where}: config.json lacks {key}")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise CheckpointError(
            f"{where}: config.json: {key} must be a positive integer, got {value!r:.80}"
        )
    return value


def _num_kv_heads(config: Mapping[str, Any], num_heads: int, *, where: str) -> int:
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    if config.get("kv_lora_rank"):
        # Latent attention has a key for each query head once it is unpacked.
        return num_heads
    return _number(config, "num_key_value_heads", where=where, default=num_heads)


def _kv_elements(
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    num_kv_heads: int,
    head_dim: int,
    *,
    where: str,
) -> int:
    """What the layer that keeps most keeps: the rows of its projections, where it has such."""
    if config.get("kv_lora_rank"):
        key = sum(_number(config, f"qk_{part}_head_dim", where=where) for part in ("nope", "rope"))
        return num_kv_heads * (key + _number(config, "v_head_dim", where=where))
    rows = {
        name: shape[0]
        for name, shape in shapes.items()
        if len(shape) == 2
        and name.endswith((".self_attn.k_proj.weight", ".self_attn.v_proj.weight"))
    }
    pairs = [
        count + rows.get(name.replace("k_proj", "v_proj"), count)
        for name, count in rows.items()
        if name.endswith(".k_proj.weight")
    ]
    return max(pairs, default=2 * num_kv_heads * head_dim)


def _head_dim(
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    default: int,
    *,
    num_kv_heads: int,
    where: str,
) -> int:
    if config.get("head_dim") is not None:
        return _number(config, "head_dim", where=where)
    for name, shape in shapes.items():
        if name.endswith(".self_attn.k_proj.weight") and len(shape) == 2:
            rows = shape[0]
            if rows and rows % num_kv_heads == 0:
                return rows // num_kv_heads
    if default < 1:
        raise CheckpointError(f"{where}: config.json: hidden_size is less than num_attention_heads")
    return default


def _is_tied(config: Mapping[str, Any], *, where: str) -> bool:
    tied = config.get("tie_word_embeddings")
    if tied is None:
        return config.get("model_type") in _TIED_BY_DEFAULT
    if not isinstance(tied, bool):
        raise CheckpointError(
            f"{where}: config.json: tie_word_embeddings must be true or false, got {tied!r:.80}"
        )
    return tied


def _check_rope(config: Mapping[str, Any], *, where: str) -> None:
    """Refuses a kind of rope scaling that nobody here knows; unscaled it would give nonsense.

    Old files spell the kind `type`, new ones `rope_type`, and families with several kinds of
    attention nest one object for each.
    """
    for key in ("rope_scaling", "rope_parameters"):
        outer = config.get(key)
        if not isinstance(outer, dict):
            continue
        for rope in (outer, *(inner for inner in outer.values() if isinstance(inner, dict))):
            kind = rope.get("rope_type") or rope.get("type") or "default"
            if kind not in _ROPE_TYPES:
                raise UnsupportedModel(
                    f"{where}: config.json: {key} has the type {kind!r:.80}, which is not "
                    f"supported; supported: {', '.join(_ROPE_TYPES)}"
                )
