"""A `tokenizers.Tokenizer` from the metadata of a GGUF file.

A GGUF names its kind of vocabulary (tokenizer.ggml.model) and, for byte-level ones, the rule that
cuts text before merging (tokenizer.ggml.pre), but holds neither rule; see `cut_rules`. A kind or a
rule that is not listed is refused by name: with the wrong rule the model would answer, only worse.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from coordinator.text.cut_rules import CUT_RULES
from coordinator.text.metadata import gguf_array
from coordinator.text.pieces import SPACE_MARK, Spelling
from stagemesh.errors import CheckpointError, UnsupportedModel

# Values of tokenizer.ggml.token_type.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4


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
        built = _sentencepiece(metadata, tokens=tokens)
    else:
        raise UnsupportedModel(
            f"tokenizer.ggml.model is {kind!r}; supported are 'gpt2' (byte-level BPE) and 'llama' "
            "(sentencepiece BPE)"
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


def _sentencepiece(metadata: Mapping[str, Any], *, tokens: Sequence[str]) -> GgufTokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if "tokenizer.ggml.merges" in metadata:
        merges = _read_merges(gguf_array(metadata, "merges"), vocabulary=vocabulary)
    else:
        scores = [float(score) for score in gguf_array(metadata, "scores")]
        if len(scores) != len(tokens):
            raise CheckpointError(
                f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens"
            )
        merges = _merges_of_scores(vocabulary, scores=scores)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges,
            unk_token=tokens[int(unknown)] if 0 <= int(unknown) < len(tokens) else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    # As in llama.cpp, each stretch of text between special tokens gets the space.
    adds_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    prefix = [normalizers.Prepend(SPACE_MARK)] if adds_space else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE_MARK)])
    spelling = Spelling(kind="sentencepiece", strips_leading_space=adds_space, has_byte_tokens=True)
    return GgufTokenizer(backend=backend, spelling=spelling, adds_bos=True)


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


def _merges_of_scores(
    vocabulary: Mapping[str, int], *, scores: Sequence[float]
) -> list[tuple[str, str]]:
    """The merges that a scored vocabulary implies: the better the result's score, the earlier.

    Sentencepiece joins the two neighbours whose joined piece has the best score; a BPE joins the
    two whose merge comes first. So each way to cut a piece in two pieces is a merge with the rank
    of the piece's score.
    """
    ranked = []
    for piece, index in vocabulary.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-scores[index], -len(left), left, right))
    ranked.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in ranked]


def _mark_added_tokens(
    backend: Tokenizer, *, tokens: Sequence[str], metadata: Mapping[str, Any]
) -> None:
    """Make control tokens special and user-defined ones whole: neither is cut or merged."""
    types = [int(kind) for kind in gguf_array(metadata, "token_type")]
    if types and len(types) != len(tokens):
        raise CheckpointError(
            f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens"
        )
    special, whole = [], []
    for token, kind in zip(tokens, types, strict=False):
        if not token:
            continue
        if kind in (_UNKNOWN, _CONTROL):
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED:
            whole.append(AddedToken(token, special=False, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(whole)
