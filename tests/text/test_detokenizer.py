"""Text from token ids while they arrive."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.text.detokenizer import StreamDetokenizer
from coordinator.text.tokenizer import Tokenizer, load_tokenizer
from tests.text import builders

ALL_CHARACTERS = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)


def stream(tokenizer: Tokenizer, ids: list[int], **options: bool) -> list[str]:
    """The chunks of a stream, the flushed tail last."""
    detokenizer = StreamDetokenizer(tokenizer, **options)
    return [*(detokenizer.add(token_id) for token_id in ids), detokenizer.flush()]


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = builders.write_folder(tmp_path_factory.mktemp("bytes"), builders.byte_tokenizer())
    return load_tokenizer(builders.folder_spec(folder))


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    return load_tokenizer(builders.gguf_spec(builders.sentencepiece_metadata()))


def test_character_split_over_tokens_appears_when_whole(byte_tokenizer: Tokenizer) -> None:
    ids = list(b"A\xf0\x9f\x8c\xb6B\xc4\x8fC")
    chunks = stream(byte_tokenizer, ids)
    assert chunks == ["A", "", "", "", "\U0001f336", "B", "", "\u010f", "C", ""]
    assert byte_tokenizer.decode(ids) == "A\U0001f336B\u010fC"


def test_text_that_ends_inside_a_character_ends_with_one_replacement(
    byte_tokenizer: Tokenizer,
) -> None:
    ids = list(b"A\xf0\x9f")
    assert stream(byte_tokenizer, ids) == ["A", "", "", "\ufffd"]
    assert byte_tokenizer.decode(ids) == "A\ufffd"


def test_decoding_each_token_alone_would_not_do(byte_tokenizer: Tokenizer) -> None:
    ids = list("\U0001f336".encode())
    assert "".join(byte_tokenizer.decode([token_id]) for token_id in ids) == "\ufffd" * 4


def test_special_tokens_are_left_out_even_inside_a_character(byte_tokenizer: Tokenizer) -> None:
    end = byte_tokenizer.encode(builders.IM_END, add_special_tokens=False)
    assert end == [259]
    ids = [0xC4, *end, 0x8F]
    assert "".join(stream(byte_tokenizer, ids)) == byte_tokenizer.decode(ids) == "\u010f"
    shown = "".join(stream(byte_tokenizer, ids, skip_special_tokens=False))
    assert (
        shown == byte_tokenizer.decode(ids, skip_special_tokens=False) == "\ufffd<|im_end|>\ufffd"
    )


@given(ids=st.lists(st.integers(0, 49_151), max_size=40), skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_stream_equals_decode_for_random_ids(
    sample_tokenizer: Tokenizer, ids: list[int], skip: bool
) -> None:
    chunks = stream(sample_tokenizer, ids, skip_special_tokens=skip)
    assert "".join(chunks) == sample_tokenizer.decode(ids, skip_special_tokens=skip)


@given(text=ALL_CHARACTERS)
@settings(max_examples=300, deadline=None)
def test_valid_text_streams_without_replacements(sample_tokenizer: Tokenizer, text: str) -> None:
    # The sample's vocabulary lacks the tokens of a few rare bytes, so no model of it can say them.
    known = {sample_tokenizer.token_bytes(token_id) for token_id in range(1000)}
    text = "".join(c for c in text if all(bytes([byte]) in known for byte in c.encode()))
    text = text.replace("\ufffd", "").replace("<|", "")
    chunks = stream(sample_tokenizer, sample_tokenizer.encode(text, add_special_tokens=False))
    assert "".join(chunks) == text
    assert not any("\ufffd" in chunk for chunk in chunks)


@pytest.mark.parametrize("is_continuation", [False, True])
def test_sentencepiece_space_at_the_start(sentencepiece: Tokenizer, is_continuation: bool) -> None:
    ids = sentencepiece.encode("hello world", add_special_tokens=False)
    assert [sentencepiece.token_text(token_id) for token_id in ids] == [" hello", " world"]
    chunks = stream(sentencepiece, ids, is_continuation=is_continuation)
    assert chunks == [" hello" if is_continuation else "hello", " world", ""]
    assert "".join(chunks) == sentencepiece.decode(ids, is_continuation=is_continuation)


def test_only_one_space_is_dropped_and_only_at_the_start(sentencepiece: Tokenizer) -> None:
    for text in ("  hello", "hello  world", " "):
        ids = sentencepiece.encode(text, add_special_tokens=True)
        assert "".join(stream(sentencepiece, ids)) == sentencepiece.decode(ids) == text


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_sentencepiece_stream_equals_decode(sentencepiece: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, sentencepiece.vocab_size - 1), max_size=30))
    assert "".join(stream(sentencepiece, ids)) == sentencepiece.decode(ids)


@given(text=ALL_CHARACTERS)
@settings(deadline=None)
def test_sentencepiece_byte_tokens_round_trip(sentencepiece: Tokenizer, text: str) -> None:
    text = text.replace("\ufffd", "").replace("\u2581", "").replace("<", "")
    ids = sentencepiece.encode(text, add_special_tokens=True)
    chunks = stream(sentencepiece, ids)
    assert "".join(chunks) == text
    assert not any("\ufffd" in chunk for chunk in chunks)


def test_decode_equals_the_library_for_valid_text(tmp_path: Path) -> None:
    backend = builders.sentencepiece_json()
    folder = builders.write_folder(tmp_path, backend)
    tokenizer = load_tokenizer(builders.folder_spec(folder))
    for text in ("hello world", " hello", "h\u00e9llo \U0001f336", "</s>hello <s> world", "  "):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == backend.decode(ids, skip_special_tokens=True)
        shown = tokenizer.decode(ids, skip_special_tokens=False)
        assert shown == backend.decode(ids, skip_special_tokens=False)


def test_unknown_ids_give_no_text(byte_tokenizer: Tokenizer) -> None:
    for token_id in (-1, byte_tokenizer.vocab_size, 2**40):
        assert byte_tokenizer.token_bytes(token_id) == b""
        assert not byte_tokenizer.is_special(token_id)
    assert byte_tokenizer.decode([65, 2**40, 66]) == "AB"
