"""How the strings of a vocabulary spell bytes.

Two spellings exist in the models we serve:

- byte level (GPT-2): each character of a token stands for one byte, so that a space is U+0120;
- sentencepiece (Llama 2, Gemma): a space is U+2581, and a byte without a token of its own is
  spelled "<0xE2>".

Decoding works on bytes and not on strings, so that text can be decoded while it arrives. For valid
text the result is what `tokenizers` gives. Where bytes are no valid UTF-8 each faulty sequence
becomes one U+FFFD in both spellings, while `tokenizers` writes one for each byte of a run of
sentencepiece byte tokens and can only tell when the run has ended.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from stagemesh.errors import UnsupportedModel

SPACE_MARK = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """The character that GPT-2's byte-level vocabularies write for each byte, reversed.

    Printable Latin-1 bytes stand for themselves; the other 68 are moved to U+0100 and up in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = (byte for byte in range(256) if byte not in printable)
    alphabet = {chr(byte): byte for byte in printable}
    alphabet |= {chr(0x100 + offset): byte for offset, byte in enumerate(moved)}
    return alphabet


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """Which of the two spellings a vocabulary uses, and what decoding does at the start of text."""

    kind: Literal["byte_level", "sentencepiece"]
    """How tokens spell bytes."""
    strips_leading_space: bool = False
    """Encoding puts a space before the text, so decoding takes one away."""
    has_byte_tokens: bool = False
    """Tokens such as "<0xE2>" stand for a byte (sentencepiece)."""

    def to_bytes(self, token: str, *, is_added: bool, alphabet: Mapping[str, int]) -> bytes:
        """Raw bytes of one token; added tokens are written as they are."""
        if self.kind == "byte_level":
            if is_added or any(character not in alphabet for character in token):
                return token.encode()
            return bytes(alphabet[character] for character in token)
        if self.has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.replace(SPACE_MARK, " ").encode()


def spelling_of_decoder(decoder: Mapping[str, Any] | None) -> Spelling:
    """Read the spelling off the `decoder` entry of a tokenizer.json.

    Raises:
        UnsupportedModel: the decoder is of a kind that we do not stream (WordPiece, CTC, none).
    """
    steps = _flatten(decoder)
    kinds = {str(step.get("type")) for step in steps}
    if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}:
        return Spelling(kind="byte_level")
    replaces_mark = any(_is_mark_replacement(step) for step in steps)
    metaspace = [step for step in steps if step.get("type") == "Metaspace"]
    if (replaces_mark or metaspace) and kinds <= {
        "Replace",
        "ByteFallback",
        "Fuse",
        "Strip",
        "Metaspace",
    }:
        return Spelling(
            kind="sentencepiece",
            strips_leading_space=any(map(_strips_leading_space, steps)),
            has_byte_tokens="ByteFallback" in kinds,
        )
    names = ", ".join(sorted(kinds)) or "none"
    raise UnsupportedModel(
        f"tokenizer.json has a decoder of an unsupported kind ({names}); supported are byte-level "
        "(GPT-2, Llama 3, Qwen) and sentencepiece (Llama 2, Gemma) decoders"
    )


def _flatten(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The steps of a decoder, in order; a plain decoder is one step."""
    if decoder is None:
        return []
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for inner in decoder.get("decoders", []) for step in _flatten(inner)]


def _is_mark_replacement(step: Mapping[str, Any]) -> bool:
    is_replace = step.get("type") == "Replace"
    return is_replace and step.get("pattern") == {"String": SPACE_MARK}


def _strips_leading_space(step: Mapping[str, Any]) -> bool:
    if step.get("type") == "Metaspace":
        return bool(step.get("prepend_scheme", "always") != "never")
    strips = step.get("type") == "Strip" and step.get("content") == " "
    return strips and int(step.get("start", 0)) > 0
