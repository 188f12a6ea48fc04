"""Whole tokenizers of GGUF files against those that transformers makes of the same files.

Where the two differ on purpose the tests say on which texts, and hold ours to the library that the
vocabulary was made with:

- transformers takes a space at the start of a text for the one that it would add, and adds it to
  the first stretch of text alone; sentencepiece always adds it, and llama.cpp does so after each
  special token;
- for Qwen2 it leaves out that characters are composed, which Qwen2's own tokenizer.json does;
- for unigram vocabularies it leaves out what the file says of white space and characters, and adds
  an end token.
"""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from coordinator.text.tokenizer import Tokenizer, load_tokenizer
from stagemesh.checkpoint.gguf_header import read_gguf_header
from tests.text import builders, vocabularies
from tests.text.vocabularies import MARKED, PLAIN, SPACED, TEXTS, Trained

ALL_TEXTS = (*TEXTS, *SPACED, *MARKED)


def both(path: Path) -> tuple[Tokenizer, Any]:
    ours = load_tokenizer(builders.gguf_spec(read_gguf_header(path).metadata))
    return ours, AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


def differing(ours: Tokenizer, theirs: Any, texts: tuple[str, ...] = ALL_TEXTS) -> set[str]:
    """Texts that are encoded otherwise; what either gives is decoded alike, or this fails."""
    found = set()
    for text in texts:
        ids = ours.encode(text, add_special_tokens=False)
        their_ids = theirs(text, add_special_tokens=False).input_ids
        if ids != their_ids:
            found.add(text)
        for some in (ids, their_ids):
            for skip in (False, True):
                expected = theirs.decode(some, skip_special_tokens=skip)
                assert ours.decode(some, skip_special_tokens=skip) == expected
    return found


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "tekken", "gpt-4o"])
def test_byte_level(tmp_path: Path, pre: str) -> None:
    ours, theirs = both(vocabularies.write_byte_level(tmp_path / "m.gguf", pre))
    composed = {text for text in TEXTS if pre == "qwen2" and "e\u0301" in text}
    assert differing(ours, theirs) == composed
    for text in {*TEXTS} - composed:
        ids = ours.encode(text, add_special_tokens=True)
        bos = [ours.bos_token_id] if pre == "llama-bpe" else []
        assert ids == bos + theirs(text, add_special_tokens=False).input_ids
        assert ours.decode(ids) == text


def test_control_another_rule_is_seen(tmp_path: Path) -> None:
    path = vocabularies.write_byte_level(tmp_path / "m.gguf", "gpt-2")
    _, theirs = both(path)
    other = path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0gpt-2", b"\x05\0\0\0\0\0\0\0qwen2")
    path.write_bytes(other)
    ours = load_tokenizer(builders.gguf_spec(read_gguf_header(path).metadata))
    assert differing(ours, theirs) != set()


@pytest.fixture(scope="module")
def llama() -> Trained:
    return vocabularies.train_pieces("bpe", **PLAIN)


def test_sentencepiece(tmp_path: Path, llama: Trained) -> None:
    ours, theirs = both(vocabularies.write_pieces(tmp_path / "m.gguf", llama))
    assert differing(ours, theirs) == {*SPACED[:3], MARKED[0]}
    for text in (*TEXTS, *SPACED):
        assert ours.encode(text, add_special_tokens=False) == llama.processor.encode(text)
        ids = ours.encode(text, add_special_tokens=True)
        assert ids == [1, *llama.processor.encode(text)]
        assert ours.decode(ids) == text.replace("\u2581", " ") == llama.processor.decode(ids)


def test_sentencepiece_of_phi3(tmp_path: Path, llama: Trained) -> None:
    """Whose tokenizer in transformers adds the space as llama.cpp does."""
    path = vocabularies.write_pieces(tmp_path / "m.gguf", llama, architecture="phi3")
    ours, theirs = both(path)
    assert differing(ours, theirs) == set()


def test_sentencepiece_of_gemma(tmp_path: Path) -> None:
    """No space in front, and runs of spaces and line ends that are tokens of their own."""
    runs = [char * count for char in ("\u2581", "\n") for count in range(2, 10)]
    settings = PLAIN | {"add_dummy_prefix": False, "user_defined_symbols": ["<tool>", *runs]}
    trained = vocabularies.train_pieces("bpe", **settings)
    path = vocabularies.write_pieces(tmp_path / "m.gguf", trained, architecture="gemma2")
    ours, theirs = both(path)
    assert differing(ours, theirs) == set()
    for text in (*TEXTS, *SPACED):
        ids = ours.encode(text, add_special_tokens=False)
        # The library takes the mark in a text for a space.
        assert ids == trained.processor.encode(text) or "\u2581" in text


@pytest.fixture(scope="module")
def unigram() -> Trained:
    return vocabularies.train_pieces("unigram", unk_id=2, eos_id=1, pad_id=0, bos_id=-1)


def test_unigram(tmp_path: Path, unigram: Trained) -> None:
    metadata = read_gguf_header(vocabularies.write_pieces(tmp_path / "m", unigram)).metadata
    ours = load_tokenizer(builders.gguf_spec(metadata))
    for text in (*TEXTS, *SPACED):
        assert ours.encode(text, add_special_tokens=True) == unigram.processor.encode(text)
    assert ours.eos_token_ids == {1}


@pytest.mark.slow  # transformers takes ten seconds to add T5's hundred extra tokens
def test_unigram_against_transformers(tmp_path: Path, unigram: Trained) -> None:
    ours, theirs = both(vocabularies.write_pieces(tmp_path / "m.gguf", unigram))
    plain = ("Hello world", TEXTS[2], "two  spaces   three", "", " ", " lead")
    assert differing(ours, theirs, plain) == set()
    assert theirs("Hello world").input_ids[-1] == 1


def test_control_other_scores_are_seen(tmp_path: Path, unigram: Trained) -> None:
    metadata = dict(read_gguf_header(vocabularies.write_pieces(tmp_path / "m", unigram)).metadata)
    metadata["tokenizer.ggml.scores"] = [
        -1.0 - index % 7 for index in range(len(metadata["tokenizer.ggml.scores"]))
    ]
    ours = load_tokenizer(builders.gguf_spec(metadata))
    found = [ours.encode(text, add_special_tokens=False) for text in TEXTS]
    assert found != [unigram.processor.encode(text) for text in TEXTS]
