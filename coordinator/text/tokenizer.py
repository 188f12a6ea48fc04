"""Token ids from text and back, over the `tokenizers` library.

Where special tokens come from:

- completions: `encode(text, add_special_tokens=True)`. A tokenizer.json's own post-processor
  decides, and add_bos_token (of either format) makes sure of one BOS. A prompt that already starts
  with BOS gets no second one.
- chat: `encode(text, add_special_tokens=False)`, always. The template writes what the model was
  trained on, BOS included, as with transformers' apply_chat_template(tokenize=True).
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from coordinator.text import sentencepiece_model
from coordinator.text.gguf_tokenizer import build_gguf_tokenizer
from coordinator.text.metadata import TextMetadata, text_metadata
from coordinator.text.pieces import Spelling, byte_alphabet, spelling_of_decoder
from stagemesh.errors import CheckpointError, ConfigError, UnsupportedModel
from stagemesh.model_spec import ModelSpec

# A model's chat template ends each turn with one of these, though some models' settings name
# another token (or only the end of a document) as the end.
_TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|end|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|end_of_turn|>",
)
# With this token "<|end|>" ends one message of an answer that goes on (the harmony format).
_ANSWER_END = "<|return|>"


class Tokenizer:
    """Encodes and decodes the text of one model.

    Args:
        backend: cuts and merges.
        spelling: how its tokens spell bytes.
        metadata: special tokens, end tokens and the like.
        model_vocab_size: rows of the model's embedding, which no id of a prompt may pass.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        spelling: Spelling,
        metadata: TextMetadata,
        model_vocab_size: int,
    ) -> None:
        # A tokenizer.json may ask to cut or pad texts, which would silently alter prompts.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._spelling = spelling
        self._alphabet = byte_alphabet()
        self._added = backend.get_added_tokens_decoder()
        self._bytes: dict[int, bytes] = {}
        self._adds_bos = bool(metadata.adds_bos)
        self._model_vocab_size = model_vocab_size
        self.vocab_size: int = max(backend.get_vocab().values(), default=-1) + 1
        self.bos_token: str | None = metadata.special_tokens.get("bos_token")
        self.eos_token: str | None = metadata.special_tokens.get("eos_token")
        self.bos_token_id: int | None = self._id_of(self.bos_token)
        self._backend_adds_bos = backend.encode("").ids[:1] == [self.bos_token_id]
        self.eos_token_ids: frozenset[int] = metadata.eos_token_ids | self._named_ends(metadata)

    @property
    def strips_leading_space(self) -> bool:
        """Decoding drops a space at the start of a text."""
        return self._spelling.strips_leading_space

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text; special tokens written in it become their ids.

        Args:
            text: any text.
            add_special_tokens: add BOS as the model wants it; off for the text of a chat template.

        Raises:
            ConfigError: the text is no valid Unicode, or has a token the model has no row for.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"the text holds half a surrogate pair at {error.start}") from error
        ids = list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        if add_special_tokens and self.bos_token_id is not None:
            bos = self.bos_token_id
            if self._backend_adds_bos and ids[:2] == [bos, bos]:
                del ids[0]
            elif self._adds_bos and ids[:1] != [bos]:
                ids.insert(0, bos)
        largest = max(ids, default=0)
        if largest >= self._model_vocab_size:
            raise ConfigError(
                f"the text holds {self.token_text(largest)!r} (token {largest}), for which the "
                f"model has no embedding: it has {self._model_vocab_size} tokens"
            )
        return ids

    def decode(
        self,
        token_ids: Iterable[int],
        *,
        skip_special_tokens: bool = True,
        is_continuation: bool = False,
    ) -> str:
        """Text of token ids; bytes that are no valid UTF-8 become U+FFFD.

        Spaces are never tidied up, so that the text does not depend on what follows.

        Args:
            token_ids: the tokens; ids that the vocabulary lacks give no text.
            skip_special_tokens: special tokens give no text.
            is_continuation: keep a space at the very start, which belongs between a prompt and
                this text.
        """
        raw = b"".join(
            self.token_bytes(token_id)
            for token_id in token_ids
            if not (skip_special_tokens and self.is_special(token_id))
        )
        if self.strips_leading_space and not is_continuation:
            raw = raw.removeprefix(b" ")
        return raw.decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Raw bytes of one token, which may be part of a character; empty for an unknown id."""
        known = self._bytes.get(token_id)
        if known is not None:
            return known
        token = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if token is None:
            return b""
        spelled = self._spell(token, token_id)
        self._bytes[token_id] = spelled
        return spelled

    def token_text(self, token_id: int) -> str:
        """Text of one token on its own, with U+FFFD for part of a character."""
        return self.token_bytes(token_id).decode(errors="replace")

    def is_special(self, token_id: int) -> bool:
        """Whether a token steers the model instead of being text (BOS, turn ends, ...)."""
        added = self._added.get(token_id)
        return added is not None and added.special

    def _spell(self, token: str, token_id: int) -> bytes:
        is_added = token_id in self._added
        return self._spelling.to_bytes(token, is_added=is_added, alphabet=self._alphabet)

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._backend.token_to_id(token)

    def _named_ends(self, metadata: TextMetadata) -> frozenset[int]:
        """Ids of the end tokens that settings and chat template name by text."""
        template = metadata.chat_template or ""
        marks = [mark for mark in _TURN_ENDS if mark in template]
        if self._id_of(_ANSWER_END) is not None and "<|end|>" in marks:
            marks.remove("<|end|>")
        ids = (self._id_of(token) for token in (self.eos_token, *marks))
        return frozenset(token_id for token_id in ids if token_id is not None)


def load_tokenizer(spec: ModelSpec) -> Tokenizer:
    """Load the tokenizer of a model from its folder or its GGUF file.

    Raises:
        UnsupportedModel: there is neither tokenizer.json nor tokenizer.model, or the kind of
            tokenizer is not supported.
        CheckpointError: the tokenizer's files contradict themselves or cannot be read.
    """
    metadata = text_metadata(spec)
    if spec.format == "gguf":
        built = build_gguf_tokenizer(spec.gguf_metadata or {})
        backend, spelling = built.backend, built.spelling
        if metadata.adds_bos is None:
            metadata = dataclasses.replace(metadata, adds_bos=built.adds_bos)
    elif (path := Path(spec.path) / "tokenizer.json").is_file():
        backend, spelling = _read_tokenizer_json(path)
        _add_missing_tokens(backend, metadata=metadata)
    else:
        backend, spelling, metadata = _read_tokenizer_model(Path(spec.path), metadata)
    return Tokenizer(
        backend, spelling=spelling, metadata=metadata, model_vocab_size=spec.vocab_size
    )


def _read_tokenizer_json(path: Path) -> tuple[tokenizers.Tokenizer, Spelling]:
    try:
        content = path.read_text(encoding="utf-8")
        decoder = json.loads(content).get("decoder")
    except (ValueError, RecursionError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a valid tokenizer.json: {error}") from error
    spelling = spelling_of_decoder(decoder)
    try:
        return tokenizers.Tokenizer.from_str(content), spelling
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{path} is not a valid tokenizer.json: {error}") from error


def _read_tokenizer_model(
    folder: Path, metadata: TextMetadata
) -> tuple[tokenizers.Tokenizer, Spelling, TextMetadata]:
    """From the vocabulary of sentencepiece, and what it says where the folder's settings do not."""
    path = folder / sentencepiece_model.FILE_NAME
    if not path.is_file():
        raise UnsupportedModel(
            f"{folder} has neither tokenizer.json nor tokenizer.model; save the tokenizer with "
            "transformers (AutoTokenizer.from_pretrained(...).save_pretrained(folder)) to get one"
        )
    model = sentencepiece_model.read_sentencepiece_model(
        path, adds_space=metadata.adds_space, adds_space_once=not metadata.is_legacy
    )
    special_tokens = {**model.special_tokens, **metadata.special_tokens}
    backend = model.vocabulary.build()
    _add_missing_tokens(backend, metadata=metadata)
    for entry in metadata.added_tokens:
        if (token_id := backend.token_to_id(str(entry.get("content")))) != entry["id"]:
            raise CheckpointError(
                f"{folder}: added token {entry.get('content')!r:.80} has the id {entry['id']} in "
                f"the settings and {token_id} after the {len(model.vocabulary.pieces)} of {path}"
            )
    specials = dict.fromkeys((*model.control_tokens, *special_tokens.values()))
    backend.add_special_tokens([tokenizers.AddedToken(t, normalized=False) for t in specials])
    # Files of that age are of models that begin with BOS, unless the settings say otherwise.
    adds_bos = True if metadata.adds_bos is None else metadata.adds_bos
    metadata = dataclasses.replace(metadata, special_tokens=special_tokens, adds_bos=adds_bos)
    return backend, model.vocabulary.spelling(), metadata


def _add_missing_tokens(backend: tokenizers.Tokenizer, *, metadata: TextMetadata) -> None:
    """Add tokens that only tokenizer_config.json names, as transformers does."""
    for entry in metadata.added_tokens:
        content = entry.get("content")
        if isinstance(content, str) and content and backend.token_to_id(content) is None:
            backend.add_tokens([_added_token(content, entry)])


def _added_token(content: str, entry: Mapping[str, Any]) -> tokenizers.AddedToken:
    flags = {
        name: bool(entry[name])
        for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
        if name in entry
    }
    return tokenizers.AddedToken(content, **flags)
