"""What a model is, found without reading a weight: dimensions, tensors, bytes of each part.

Torch-free, so that the coordinator can plan with it. `load_model_spec` reads configs and headers;
`stagemesh.models.weights` reads the data that a `TensorInfo` points to.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stagemesh.checkpoint.dimensions import Dimensions, read_dimensions
from stagemesh.checkpoint.folder import read_model_folder
from stagemesh.checkpoint.generation_settings import generation_config_from_gguf, sampling_defaults
from stagemesh.checkpoint.gguf_config import config_from_gguf
from stagemesh.checkpoint.gguf_header import read_gguf_header
from stagemesh.checkpoint.gguf_names import ROPE_FACTORS_NAME, model_tensors
from stagemesh.checkpoint.low_bit import Role, held_bytes
from stagemesh.checkpoint.resolve import SAMPLE_MODEL_NAME, is_sample_name, resolve_model
from stagemesh.checkpoint.tensor_groups import TensorGroups, group_tensors
from stagemesh.checkpoint.tensor_info import TensorInfo
from stagemesh.errors import CheckpointError, ConfigError

__all__ = ["ModelSpec", "TensorInfo", "load_model_spec"]

_LOG = logging.getLogger(__name__)

# Families in which one layer has a norm or a bias more than the others.
_UNEVEN_FAMILIES = frozenset({"gpt_neox_japanese", "modernbert-decoder"})

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one element by run dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model by its configs and headers."""

    name: str
    """What the API calls it."""
    path: Path
    """The folder or file."""
    format: Literal["safetensors", "gguf"]
    """Which of the two formats."""
    fingerprint: str
    """Same on every host that has the same config and files of the same layout."""
    config: dict[str, Any]
    """Content of config.json, or its equivalent; transformers changes what it is given, so
    give it a deep copy."""
    num_layers: int
    """Layers of the model."""
    hidden_size: int
    """Width of an activation."""
    vocab_size: int
    """Rows of the token table."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads."""
    head_dim: int
    """Width of a head."""
    max_context_tokens: int
    """Longest sequence that the model was made for."""
    tie_word_embeddings: bool
    """Whether the config says that the head is the token table."""
    has_separate_head: bool
    """Whether the head is a tensor of its own: not tied, or tied and yet different in the file."""
    tensors: Mapping[str, TensorInfo]
    """All tensors of the files, by parameter name."""
    groups: TensorGroups
    """The tensors by the part of the model that needs them."""
    rope_frequency_factors: tuple[float, ...] | None
    """Divisors of the rope frequencies that a GGUF file carries, one per pair of dimensions."""
    gguf_metadata: Mapping[str, Any] | None
    """All keys of the GGUF file; None for safetensors."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end a generation."""
    bos_token_id: int | None
    """Token that begins a sequence, where there is one."""
    generation_defaults: Mapping[str, Any]
    """Content of generation_config.json, or its equivalent; empty when absent."""
    kv_elements: int | None = None
    """Elements that a layer keeps of a token, where these are not two per head and dimension: keys
    and values of different widths; the most that any layer keeps."""

    def layer_bytes(self, layer: int, dtype: str, *, quantize: str = "none") -> int:
        """Bytes of one layer's weights; for `quantize` see `stagemesh.checkpoint.low_bit`."""
        return _held_bytes(self.groups.layers[layer], dtype, quantize, role="layer")

    def embedding_bytes(self, dtype: str, *, quantize: str = "none") -> int:
        """Bytes of what only the first stage holds: the token table, learned positions, ..."""
        table = (self.groups.embedding,)
        rest = [info for info in self.groups.first if info is not self.groups.embedding]
        return _held_bytes(table, dtype, quantize, role="table") + _weight_bytes(rest, dtype)

    def head_bytes(self, dtype: str, *, quantize: str = "none") -> int:
        """Bytes of the head, or of the copy of the token table that serves as one."""
        table = () if self.has_separate_head else (self.groups.embedding,)
        return _held_bytes((*table, *self.groups.head), dtype, quantize, role="head")

    def norm_bytes(self, dtype: str) -> int:
        """Bytes of what the last stage holds besides the head: the final norm, ..."""
        return _weight_bytes(self.groups.last, dtype)

    def stage_weight_bytes(self, start_layer: int, end_layer: int, dtype: str) -> int:
        """Bytes of the weights of a stage [start_layer, end_layer); shared tables count once."""
        return _weight_bytes(self.tensors_for_stage(start_layer, end_layer), dtype)

    def kv_bytes_per_token(self, num_layers: int, dtype: str) -> int:
        """Bytes of keys and values that one token takes in `num_layers` layers."""
        kept = self.kv_elements or 2 * self.num_kv_heads * self.head_dim
        return num_layers * kept * _element_bytes(dtype)

    def tensors_for_stage(self, start_layer: int, end_layer: int) -> list[TensorInfo]:
        """The tensors that a stage [start_layer, end_layer) reads, each once.

        The first stage reads the token table, the last one norm and head; a tied table is read at
        both ends.

        Raises:
            ConfigError: the range is empty or not inside the model.
        """
        if not 0 <= start_layer < end_layer <= self.num_layers:
            raise ConfigError(
                f"layers [{start_layer}, {end_layer}) are not a range within [0, {self.num_layers})"
            )
        is_first, is_last = start_layer == 0, end_layer == self.num_layers
        found = list(self.groups.first) if is_first else []
        for layer in self.groups.layers[start_layer:end_layer]:
            found.extend(layer)
        if is_last:
            found.extend(self.groups.last)
            if not self.has_separate_head and not is_first:
                found.append(self.groups.embedding)
            found.extend(self.groups.head)
        return found


def _element_bytes(dtype: str) -> int:
    if dtype not in ELEMENT_BYTES:
        raise ConfigError(f"dtype must be one of {', '.join(ELEMENT_BYTES)}, got {dtype!r}")
    return ELEMENT_BYTES[dtype]


def _weight_bytes(tensors: Iterable[TensorInfo], dtype: str) -> int:
    return sum(info.num_elements for info in tensors) * _element_bytes(dtype)


def _held_bytes(tensors: Iterable[TensorInfo], dtype: str, quantize: str, *, role: Role) -> int:
    size = _element_bytes(dtype)
    return sum(
        held_bytes(info, role=role, quantize=quantize, element_bytes=size) for info in tensors
    )


def load_model_spec(reference: str | Path, *, name: str | None = None) -> ModelSpec:
    """Reads the configs and headers of a model.

    Args:
        reference: a folder, a .gguf file or a known name.
        name: what the API shall call it; by default the known name, or the file's or folder's.

    Raises:
        ModelNotFound: nothing is there.
        CheckpointError: a file is missing, truncated, inconsistent or hostile.
        UnsupportedModel: a family, format or type that we do not run.
    """
    path = resolve_model(str(reference))
    if name is None and is_sample_name(str(reference)):
        name = SAMPLE_MODEL_NAME
    try:
        if path.is_dir():
            return _load_folder(path, name=name or path.name)
        return _load_gguf(path, name=name or path.stem)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def _load_folder(path: Path, *, name: str) -> ModelSpec:
    folder = read_model_folder(path)
    for key, kind in (("model_type", str), ("architectures", list)):
        if not isinstance(folder.config.get(key), kind) or not folder.config[key]:
            raise CheckpointError(f"{path}: config.json lacks {key}")
    return _build_spec(
        name=name,
        path=path,
        format="safetensors",
        config=folder.config,
        tensors=folder.tensors,
        file_sizes=folder.file_sizes,
        generation_config=folder.generation_config,
    )


def _load_gguf(path: Path, *, name: str) -> ModelSpec:
    header = read_gguf_header(path)
    described = config_from_gguf(header, path=str(path))
    tensors: dict[str, TensorInfo] = {}
    for source in header.tensors:
        if source.source_name == ROPE_FACTORS_NAME:
            continue
        for info in model_tensors(source, kind=described.kind, config=described.config):
            if info.name in tensors:
                raise CheckpointError(
                    f"{path}: tensors {tensors[info.name].source_name!r} and {info.source_name!r} "
                    f"are both {info.name}"
                )
            tensors[info.name] = info
    return _build_spec(
        name=name,
        path=path,
        format="gguf",
        config=described.config,
        tensors=tensors,
        file_sizes={"gguf": header.num_file_bytes},
        generation_config=generation_config_from_gguf(header.metadata),
        rope_frequency_factors=described.rope_frequency_factors,
        gguf_metadata=header.metadata,
    )


def _build_spec(
    *,
    name: str,
    path: Path,
    format: Literal["safetensors", "gguf"],
    config: dict[str, Any],
    tensors: Mapping[str, TensorInfo],
    file_sizes: Mapping[str, int],
    generation_config: Mapping[str, Any],
    rope_frequency_factors: tuple[float, ...] | None = None,
    gguf_metadata: Mapping[str, Any] | None = None,
) -> ModelSpec:
    where = f"{path} ({config['model_type']})"
    shapes = {info.name: info.shape for info in tensors.values()}
    dimensions = read_dimensions(config, shapes=shapes, where=where)
    groups = group_tensors(
        tensors.values(),
        num_layers=dimensions.num_layers,
        tie_word_embeddings=dimensions.tie_word_embeddings,
        # Layers that use the keys and values of an earlier one need no projections for them.
        allow_missing=bool(config.get("num_kv_shared_layers"))
        or config["model_type"] in _UNEVEN_FAMILIES,
        where=where,
    )
    if groups.embedding.shape[0] != dimensions.vocab_size:
        raise CheckpointError(
            f"{where}: tensor {groups.embedding.source_name} has {groups.embedding.shape[0]} rows, "
            f"vocab_size is {dimensions.vocab_size}"
        )
    sampling_defaults(generation_config, where=where)
    has_separate_head = any(info.name.endswith(".weight") for info in groups.head)
    if has_separate_head and dimensions.tie_word_embeddings:
        _LOG.warning(
            "%s: tie_word_embeddings is true, but %s differs from %s in the file; "
            "the head of the file is used",
            where,
            ", ".join(info.name for info in groups.head),
            groups.embedding.name,
        )
    return ModelSpec(
        name=name,
        path=path,
        format=format,
        fingerprint=_fingerprint(config, tensors, file_sizes, rope_frequency_factors),
        config=config,
        num_layers=dimensions.num_layers,
        hidden_size=dimensions.hidden_size,
        vocab_size=dimensions.vocab_size,
        num_heads=dimensions.num_heads,
        num_kv_heads=dimensions.num_kv_heads,
        head_dim=dimensions.head_dim,
        max_context_tokens=dimensions.max_context_tokens,
        tie_word_embeddings=dimensions.tie_word_embeddings,
        has_separate_head=has_separate_head,
        tensors=tensors,
        groups=groups,
        rope_frequency_factors=rope_frequency_factors,
        gguf_metadata=gguf_metadata,
        eos_token_ids=_token_ids((generation_config, config), "eos_token_id", where=where),
        bos_token_id=next(
            iter(_token_ids((config, generation_config), "bos_token_id", where=where)), None
        ),
        generation_defaults=generation_config,
        kv_elements=_uneven(dimensions),
    )


def _uneven(dimensions: Dimensions) -> int | None:
    even = 2 * dimensions.num_kv_heads * dimensions.head_dim
    return None if dimensions.kv_elements == even else dimensions.kv_elements


def _token_ids(configs: Iterable[Mapping[str, Any]], key: str, *, where: str) -> tuple[int, ...]:
    """The union of a key's ids, each written as a number, a list of numbers or null."""
    found: dict[int, None] = {}
    for config in configs:
        value = config.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise CheckpointError(
                    f"{where}: {key} must be a token id or a list of them, got {value!r:.80}"
                )
            found[token_id] = None
    return tuple(found)


def _fingerprint(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    file_sizes: Mapping[str, int],
    rope_frequency_factors: tuple[float, ...] | None,
) -> str:
    rows = sorted(
        (info.name, info.shape, info.encoding, info.num_bytes, info.stored.as_json())
        for info in tensors.values()
    )
    text = json.dumps(
        [config, rows, sorted(file_sizes.items()), rope_frequency_factors], sort_keys=True
    )
    return hashlib.sha256(text.encode()).hexdigest()
