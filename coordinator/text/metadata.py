"""What a model's files say about its text side besides the vocabulary.

A folder spreads it over tokenizer_config.json, special_tokens_map.json, added_tokens.json,
generation_config.json and chat_template.jinja (or .json); a GGUF file has it in its metadata. Both
become a `TextMetadata`.
"""

import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagemesh.errors import CheckpointError
from stagemesh.model_spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TextMetadata:
    """Text settings of a model, the same for both formats."""

    special_tokens: Mapping[str, str]
    """Named special tokens ("bos_token", "eos_token", ...), which chat templates refer to."""
    adds_bos: bool | None
    """Whether a prompt starts with BOS; None where nothing says so."""
    eos_token_ids: frozenset[int]
    """End tokens by id, from every place that names some."""
    chat_template: str | None
    """Source of the chat template."""
    added_tokens: tuple[Mapping[str, Any], ...] = ()
    """Entries of added_tokens_decoder with their "id", in order of that (folders only)."""
    adds_space: bool | None = None
    """Whether text gets a space in front; None where nothing says so (folders only)."""
    is_legacy: bool = True
    """Each stretch of text between special tokens gets that space, not the first alone."""


def folder_metadata(spec: ModelSpec) -> TextMetadata:
    """Read the text settings of a model folder.

    Raises:
        CheckpointError: a file is no valid JSON or holds something else than expected.
    """
    folder = Path(spec.path)
    config = _read_json(folder / "tokenizer_config.json")
    special_tokens = {**_read_json(folder / "special_tokens_map.json"), **config}
    generation = _read_json(folder / "generation_config.json")
    sources = (generation.get("eos_token_id"), spec.config.get("eos_token_id"))
    return TextMetadata(
        special_tokens=_named_tokens(special_tokens),
        adds_bos=_flag(config.get("add_bos_token")),
        eos_token_ids=_token_ids(*sources, spec.eos_token_ids),
        chat_template=_folder_template(folder, config),
        added_tokens=_added_tokens(config.get("added_tokens_decoder") or {}, folder=folder)
        or _older_added_tokens(folder),
        adds_space=_flag(config.get("add_prefix_space")),
        is_legacy=config.get("legacy") is not False,
    )


def gguf_metadata(spec: ModelSpec) -> TextMetadata:
    """Read the text settings from the metadata of a GGUF file."""
    metadata = spec.gguf_metadata or {}
    tokens = gguf_array(metadata, "tokens")
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise CheckpointError("tokenizer.chat_template of the GGUF is not text")
    special_tokens = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and 0 <= int(token_id) < len(tokens):
            special_tokens[f"{name}_token"] = str(tokens[int(token_id)])
    ends = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return TextMetadata(
        special_tokens=special_tokens,
        adds_bos=_flag(metadata.get("tokenizer.ggml.add_bos_token")),
        eos_token_ids=_token_ids(*ends, spec.config.get("eos_token_id"), spec.eos_token_ids),
        chat_template=template,
    )


def gguf_array(metadata: Mapping[str, Any], name: str) -> Sequence[Any]:
    """An array of the tokenizer's entries in a GGUF; empty where there is none.

    Raises:
        CheckpointError: the entry is no array.
    """
    value = metadata.get(f"tokenizer.ggml.{name}", ())
    if not isinstance(value, (list, tuple)):
        raise CheckpointError(f"tokenizer.ggml.{name} must be an array, not {type(value).__name__}")
    return value


def gguf_numbers(metadata: Mapping[str, Any], name: str) -> list[Any]:
    """The same of numbers.

    Raises:
        CheckpointError: the entry is no array, or of something else.
    """
    values = list(gguf_array(metadata, name))
    if not all(isinstance(value, int | float) for value in values):
        raise CheckpointError(f"tokenizer.ggml.{name} must be an array of numbers")
    return values


def text_metadata(spec: ModelSpec) -> TextMetadata:
    """The text settings of a model of either format."""
    return gguf_metadata(spec) if spec.format == "gguf" else folder_metadata(spec)


def _read_json(path: Path) -> dict[str, Any]:
    """Content of a JSON object file; empty where there is none."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Entries "x_token" as text; a token is written as a string or as an object with "content"."""
    named = {}
    for name, value in settings.items():
        content = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(content, str):
            named[name] = content
    return named


def _added_tokens(entries: Any, *, folder: Path) -> tuple[Mapping[str, Any], ...]:
    """Entries of added_tokens_decoder in order of their ids, which are written as text."""
    is_valid = isinstance(entries, dict) and all(
        key.isdecimal() and isinstance(entry, dict) for key, entry in entries.items()
    )
    if not is_valid:
        raise CheckpointError(
            f"{folder}/tokenizer_config.json: added_tokens_decoder must map ids to objects"
        )
    return tuple({**entries[key], "id": int(key)} for key in sorted(entries, key=int))


def _older_added_tokens(folder: Path) -> tuple[Mapping[str, Any], ...]:
    """The same from added_tokens.json, which maps texts to ids; a tokenizer.json has them."""
    if (folder / "tokenizer.json").is_file():
        return ()
    ids = _read_json(folder / "added_tokens.json")
    if not all(isinstance(token_id, int) for token_id in ids.values()):
        raise CheckpointError(f"{folder}/added_tokens.json must map texts to ids")
    texts = sorted(ids, key=ids.__getitem__)
    return tuple({"content": text, "id": ids[text], "normalized": False} for text in texts)


def _flag(value: object) -> bool | None:
    return None if value is None else bool(value)


def _token_ids(*sources: Any) -> frozenset[int]:
    """Union of ids given as a number, a list of numbers or not at all."""
    ids: set[int] = set()
    for source in sources:
        values = source if isinstance(source, Iterable) else (source,)
        try:
            ids.update(operator.index(value) for value in values if value is not None)
        except TypeError as error:
            raise CheckpointError(
                f"eos_token_id must be a number or a list of numbers, got {source!r}"
            ) from error
    return frozenset(ids)


def _folder_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template: its own file comes before the entry of tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path} is not UTF-8 text: {error}") from error
    template = _read_json(folder / "chat_template.json").get("chat_template")
    template = config.get("chat_template") if template is None else template
    if isinstance(template, list):
        # Several named templates: the others are for tools and retrieval.
        named = {
            entry.get("name"): entry.get("template")
            for entry in template
            if isinstance(entry, Mapping)
        }
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(
            f"{folder}/tokenizer_config.json: chat_template is neither text nor a list"
        )
    return template
