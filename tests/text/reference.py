"""Slow encoders written from the rules, to check the fast ones against.

None of this uses the `tokenizers` library or the code under test.
"""

import itertools
import unicodedata
from collections.abc import Callable, Mapping, Sequence

import regex

GPT2_CUT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def cut_gpt2(text: str) -> list[str]:
    return regex.findall(GPT2_CUT, text)


def cut_smollm(text: str) -> list[str]:
    """Each digit alone; GPT-2's rule on what lies between digits, unaware of them."""
    runs = regex.findall(r"\p{N}|[^\p{N}]+", text)
    return [piece for run in runs for piece in cut_gpt2(run)]


def cut_llama3(text: str) -> list[str]:
    return regex.findall(LLAMA3_CUT, text)


def cut_qwen2(text: str) -> list[str]:
    return regex.findall(QWEN2_CUT, unicodedata.normalize("NFC", text))


def cut_in_turn(text: str, patterns: Sequence[str]) -> list[str]:
    """Each pattern cuts its matches out of what the ones before have left in one piece."""
    pieces = [text] if text else []
    for pattern in patterns:
        cut: list[str] = []
        for piece in pieces:
            end = 0
            for match in regex.finditer(pattern, piece):
                cut += [piece[end : match.start()], match[0]]
                end = match.end()
            cut.append(piece[end:])
        pieces = [piece for piece in cut if piece]
    return pieces


def bytes_to_characters() -> list[str]:
    """GPT-2's table, as its authors wrote it down."""
    kept = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    table = {byte: chr(byte) for byte in kept}
    spare = itertools.count(256)
    return [table[byte] if byte in table else chr(next(spare)) for byte in range(256)]


def merge_ranks(merges: Sequence[str]) -> dict[tuple[str, ...], int]:
    """Merges "left right" with their places."""
    return {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}


def merge_by_rank(piece: str, ranks: Mapping[tuple[str, ...], int]) -> list[str]:
    """Byte-pair encoding of one piece: the earliest merge first, leftmost of equals."""
    table = bytes_to_characters()
    parts = [table[byte] for byte in piece.encode()]
    while len(parts) > 1:
        pairs = list(itertools.pairwise(parts))
        best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)))
        if best not in ranks:
            break
        at = pairs.index(best)
        parts[at : at + 2] = ["".join(best)]
    return parts


def encode_bytes(
    text: str,
    *,
    cut: Callable[[str], list[str]],
    vocabulary: Mapping[str, int],
    ranks: Mapping[tuple[str, ...], int],
    whole_pieces: bool = False,
) -> list[int]:
    """Ids of a text without special tokens."""
    table = bytes_to_characters()
    ids = []
    for piece in cut(text):
        spelled = "".join(table[byte] for byte in piece.encode())
        if whole_pieces and spelled in vocabulary:
            ids.append(vocabulary[spelled])
            continue
        ids += [vocabulary[part] for part in merge_by_rank(piece, ranks)]
    return ids


def encode_sentencepiece(
    text: str, *, tokens: Sequence[str], scores: Sequence[float], adds_space: bool = True
) -> list[int]:
    """Sentencepiece's BPE: join the neighbours that score best joined, leftmost of equals."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    spaced = (" " + text if adds_space and text else text).replace(" ", "\u2581")
    parts = list(spaced)
    while True:
        joined = [left + right for left, right in itertools.pairwise(parts)]
        known = [(-scores[vocabulary[j]], at) for at, j in enumerate(joined) if j in vocabulary]
        if not known:
            break
        _, at = min(known)
        parts[at : at + 2] = [joined[at]]
    ids = []
    for part in parts:
        if part in vocabulary:
            ids.append(vocabulary[part])
        else:
            ids += [vocabulary[f"<0x{byte:02X}>"] for byte in part.encode()]
    return ids
