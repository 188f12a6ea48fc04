"""Encoders of sentencepiece vocabularies, from whichever file they come.

Two kinds exist. BPE joins, of all neighbours, the two whose joined piece has the best score; in
`tokenizers` that is a list of merges. Unigram takes the cut of the whole text whose pieces have the
greatest sum of scores. What is done to the text before that is the same for both.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from coordinator.text.pieces import SPACE_MARK, Spelling
from stagemesh.errors import CheckpointError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of pieces, as sentencepiece numbers them and GGUF files do."""

# Far below the scores of pieces (logarithms), so that such a one is never part of a cut.
_NEVER = -1e6
_LIKE_BYTE = "<(?=0x[0-9A-F]{2}>)"


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceVocabulary:
    """A vocabulary and what it does to text."""

    kind: Literal["bpe", "unigram"]
    """How text is cut."""
    pieces: Sequence[str]
    """By id."""
    scores: Sequence[float]
    """Of each piece: the greater, the better."""
    types: Sequence[int] = ()
    """Of each piece; empty where the file does not say."""
    merges: Sequence[tuple[str, str]] | None = None
    """The merges of BPE; None where the scores imply them."""
    unknown_id: int | None = None
    """Piece for characters that the others do not spell."""
    spells_bytes: bool = True
    """Such characters are spelled in bytes instead."""
    adds_space: bool = True
    """Text gets a space in front."""
    adds_space_once: bool = False
    """Not each stretch of text between special tokens gets it, but only the first."""
    removes_spaces: bool = False
    """Spaces at both ends are dropped, and of several in a row one is kept."""
    character_map: bytes = b""
    """Sentencepiece's compiled rules of what characters become."""
    isolates_user_defined: bool = False
    """Pieces of that type are cut out of the text as it is spelled; else the caller sees to it."""

    def spelling(self) -> Spelling:
        """How its pieces spell bytes."""
        return Spelling(
            kind="sentencepiece",
            strips_leading_space=self.adds_space,
            has_byte_tokens=self.spells_bytes,
        )

    def build(self) -> Tokenizer:
        """The encoder, without special tokens.

        Raises:
            CheckpointError: the numbers of pieces, scores and types differ, or its parts are not
                what `tokenizers` takes.
        """
        for name, values in (("scores", self.scores), ("types", self.types)):
            is_needed = name == "scores" and self.merges is None
            if (values or is_needed) and len(values) != len(self.pieces):
                raise CheckpointError(
                    f"the vocabulary has {len(self.pieces)} tokens, but {name} has "
                    f"{len(values)} entries"
                )
        try:
            backend = Tokenizer(self._bpe() if self.kind == "bpe" else self._unigram())
            backend.normalizer = normalizers.Sequence(self._normalizers())
        except CheckpointError:
            raise
        except Exception as error:  # the library raises nothing narrower
            raise CheckpointError(f"the vocabulary is not usable: {error}") from error
        steps = self._cuts()
        if steps:
            backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
        return backend

    def _bpe(self) -> models.BPE:
        vocabulary = {piece: index for index, piece in enumerate(self.pieces)}
        merges = self.merges
        if merges is None:
            merges = merges_of_scores(vocabulary, scores=self.scores, types=self.types)
        unknown = self.unknown_id
        is_known = unknown is not None and 0 <= unknown < len(self.pieces)
        return models.BPE(
            vocab=vocabulary,
            merges=list(merges),
            unk_token=self.pieces[unknown] if is_known and unknown is not None else None,
            fuse_unk=True,
            byte_fallback=self.spells_bytes,
            ignore_merges=self.isolates_user_defined and bool(self._user_defined()),
        )

    def _unigram(self) -> models.Unigram:
        types = self.types or [NORMAL] * len(self.pieces)
        scores = [
            _NEVER if kind == UNUSED else float(score)
            for score, kind in zip(self.scores, types, strict=True)
        ]
        return models.Unigram(
            list(zip(self.pieces, scores, strict=True)),
            unk_id=self.unknown_id,
            byte_fallback=self.spells_bytes,
        )

    def _normalizers(self) -> list[normalizers.Normalizer]:
        steps: list[normalizers.Normalizer] = []
        if self.character_map:
            steps.append(normalizers.Precompiled(self.character_map))
        if self.removes_spaces:
            steps += [
                normalizers.Replace(Regex(r"\A +| +\z"), ""),
                normalizers.Replace(Regex(" {2,}"), " "),
            ]
        if self.adds_space and not self.adds_space_once:
            steps.append(normalizers.Prepend(SPACE_MARK))
        return [*steps, normalizers.Replace(" ", SPACE_MARK)]

    def _cuts(self) -> list[Any]:
        steps: list[Any] = []
        if self.adds_space and self.adds_space_once:
            steps.append(
                pre_tokenizers.Metaspace(
                    replacement=SPACE_MARK, prepend_scheme="first", split=False
                )
            )
        if self.kind == "unigram" and self.spells_bytes:
            # What is written like the piece of a byte is no byte.
            steps.append(pre_tokenizers.Split(Regex(_LIKE_BYTE), behavior="isolated"))
        whole = self._user_defined() if self.isolates_user_defined else []
        if whole:
            pattern = "|".join(re.escape(piece) for piece in sorted(whole, key=len, reverse=True))
            steps.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
        return steps

    def _user_defined(self) -> list[str]:
        pairs = zip(self.pieces, self.types, strict=False)
        return [piece for piece, kind in pairs if kind == USER_DEFINED and piece]


def merges_of_scores(
    vocabulary: Mapping[str, int], *, scores: Sequence[float], types: Sequence[int] = ()
) -> list[tuple[str, str]]:
    """The merges that a scored vocabulary implies: the better the result's score, the earlier.

    Sentencepiece joins the two neighbours whose joined piece has the best score; a BPE joins the
    two whose merge comes first. So each way to cut a piece in two pieces is a merge with the rank
    of the piece's score. Neither the unknown piece nor control pieces and bytes are ever joined.
    """
    if types:
        vocabulary = {
            piece: index
            for piece, index in vocabulary.items()
            if types[index] not in (UNKNOWN, CONTROL, BYTE)
        }
    ranked = []
    for piece, index in vocabulary.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-scores[index], -len(left), left, right))
    ranked.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in ranked]
