"""A `tokenizers.Tokenizer` from the metadata of a GGUF file.

A GGUF names its kind of vocabulary (tokenizer.ggml.model) and, for byte-level ones, the rule that
cuts text before merging (tokenizer.ggml.pre), but holds neither rule; see `cut_rules`. A kind or a
rule that is not listed is refused by name: with the wrong rule the model would answer, only worse.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from coordinator.text.cut_rules import CUT_RULES
from coordinator.text.metadata import gguf_array, gguf_numbers
from coordinator.text.piece_vocabulary import (
    BYTE,
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    PieceVocabulary,
)
from coordinator.text.pieces import Spelling
from stagemesh.errors import CheckpointError, UnsupportedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTokenizer:
    """What the metadata of a GGUF file gives."""

    backend: Tokenizer
    """Encodes text, without BOS."""
    spelling: Spelling
    """How its tokens spell bytes."""
    adds_bos: bool
    """Whether prompts start with BOS where the file does not say so."""


def build_gguf_tokenizer(metadata: Mapping[str, Any]) -> GgufTokenizer:
    """Build the tokenizer that the metadata describes.

    Raises:
        UnsupportedModel: a kind of vocabulary or a cutting rule that is not known here.
        CheckpointError: entries are missing or contradict each other.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = [str(token) for token in gguf_array(metadata, "tokens")]
    if not tokens:
        raise CheckpointError("the GGUF has no tokenizer.ggml.tokens, so text cannot be encoded")
    if kind == "gpt2":
        built = _byte_level(metadata, tokens=tokens)
    elif kind == "llama":
        built = _pieces(metadata, "bpe", tokens=tokens)
    elif kind == "t5":
        built = _pieces(metadata, "unigram", tokens=tokens)
    else:
        raise UnsupportedModel(
            f"tokenizer.ggml.model is {kind!r}; supported are 'gpt2' (byte-level BPE), 'llama' "
            "(sentencepiece BPE) and 't5' (sentencepiece unigram)"
        )
    _mark_added_tokens(built.backend, tokens=tokens, metadata=metadata)
    return built


def _byte_level(metadata: Mapping[str, Any], *, tokens: Sequence[str]) -> GgufTokenizer:
    name = str(metadata.get("tokenizer.ggml.pre", "default"))
    rule = CUT_RULES.get(name)
    if rule is None:
        raise UnsupportedModel(
            f"tokenizer.ggml.pre is {name!r}; supported are {', '.join(sorted(CUT_RULES))}"
        )
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if "tokenizer.ggml.merges" not in metadata:
        raise CheckpointError("the GGUF has a byte-level vocabulary but no tokenizer.ggml.merges")
    merges = _read_merges(gguf_array(metadata, "merges"), vocabulary=vocabulary)
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=rule.ignores_merges)
    )
    if rule.composes_unicode:
        backend.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(
        add_prefix_space=bool(metadata.get("tokenizer.ggml.add_space_prefix", False)),
        use_regex=rule.uses_gpt2_regex,
    )
    before = [step() for step in rule.steps]
    after = [step() for step in rule.later_steps]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*before, byte_level, *after])
    backend.decoder = decoders.ByteLevel()
    spelling = Spelling(kind="byte_level")
    return GgufTokenizer(backend=backend, spelling=spelling, adds_bos=rule.adds_bos)


def _pieces(
    metadata: Mapping[str, Any], kind: Literal["bpe", "unigram"], *, tokens: Sequence[str]
) -> GgufTokenizer:
    """A vocabulary of sentencepiece, with the defaults of llama.cpp."""
    merges = None
    if kind == "bpe" and "tokenizer.ggml.merges" in metadata:
        vocabulary = {token: index for index, token in enumerate(tokens)}
        merges = _read_merges(gguf_array(metadata, "merges"), vocabulary=vocabulary)
    is_bpe = kind == "bpe"
    types = [int(kind) for kind in gguf_numbers(metadata, "token_type")]
    pieces = PieceVocabulary(
        kind=kind,
        pieces=tokens,
        scores=[float(score) for score in gguf_numbers(metadata, "scores")],
        types=types,
        merges=merges,
        unknown_id=int(metadata.get("tokenizer.ggml.unknown_token_id", 0 if is_bpe else 2)),
        spells_bytes=is_bpe or BYTE in types,
        # As in llama.cpp, each stretch of text between special tokens gets the space.
        adds_space=bool(metadata.get("tokenizer.ggml.add_space_prefix", is_bpe)),
        removes_spaces=not is_bpe
        and bool(metadata.get("tokenizer.ggml.remove_extra_whitespaces", False)),
        character_map=b"" if is_bpe else _character_map(metadata),
    )
    return GgufTokenizer(backend=pieces.build(), spelling=pieces.spelling(), adds_bos=is_bpe)


def _character_map(metadata: Mapping[str, Any]) -> bytes:
    """Writers spell its bytes as signed or as unsigned numbers."""
    return bytes(int(byte) & 0xFF for byte in gguf_numbers(metadata, "precompiled_charsmap"))


def _read_merges(entries: Sequence[str], *, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Merges "left right" as pairs, each checked against the vocabulary."""
    merges = []
    for entry in entries:
        left, _, right = str(entry).partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise CheckpointError(
                f"tokenizer.ggml.merges holds {entry!r}, whose parts or result are not tokens"
            )
        merges.append((left, right))
    return merges


def _mark_added_tokens(
    backend: Tokenizer, *, tokens: Sequence[str], metadata: Mapping[str, Any]
) -> None:
    """Make control tokens special and user-defined ones whole: neither is cut or merged."""
    types = [int(kind) for kind in gguf_numbers(metadata, "token_type")]
    if types and len(types) != len(tokens):
        raise CheckpointError(
            f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens"
        )
    special, whole = [], []
    for token, kind in zip(tokens, types, strict=False):
        if not token:
            continue
        if kind in (UNKNOWN, CONTROL):
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == USER_DEFINED:
            whole.append(AddedToken(token, special=False, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(whole)
