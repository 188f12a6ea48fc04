"""Tokenizers from GGUF metadata: each cutting rule and both kinds of vocabulary."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from coordinator.text.cut_rules import CUT_RULES
from coordinator.text.gguf_tokenizer import build_gguf_tokenizer
from coordinator.text.tokenizer import Tokenizer, load_tokenizer
from stagemesh.errors import CheckpointError, UnsupportedModel
from tests.text import builders, reference

MERGES = ["1 2", "12 3", "3 4", "h e", "l l", "he ll", "hell o", "\u0120 h", "\u0120 \u0120"]
MERGES += ["\u0120h e", "\u010a \u010a", "! \u010a", "' s", "\u00c3 \u00a9"]
WHOLE = "zebra"  # a token that no merges reach
CHINESE = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
TEXTS = st.text(st.sampled_from(" \n\r\t1234helo!'sS\u00e9e\u0301\u65e5"), max_size=14)


def byte_level_metadata(pre: str, **more: Any) -> dict[str, Any]:
    tokens = list(builders.byte_vocabulary())
    tokens += [merge.replace(" ", "") for merge in MERGES]
    tokens += [WHOLE, "<|im_end|>", "<think>", "<s>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 3) + [3, 4, 3],
        "tokenizer.ggml.bos_token_id": len(tokens) - 1,
        "tokenizer.ggml.eos_token_id": len(tokens) - 3,
        **more,
    }


def load(metadata: dict[str, Any]) -> Tokenizer:
    return load_tokenizer(builders.gguf_spec(metadata))


RULES: list[tuple[str, Callable[[str], list[str]], bool]] = [
    ("gpt-2", reference.cut_gpt2, False),
    ("default", reference.cut_gpt2, False),
    ("smollm", reference.cut_smollm, False),
    ("llama-bpe", reference.cut_llama3, True),
    ("qwen2", reference.cut_qwen2, False),
]


@pytest.mark.parametrize(("pre", "cut", "whole_pieces"), RULES, ids=[rule[0] for rule in RULES])
def test_cutting_rule(pre: str, cut: Callable[[str], list[str]], whole_pieces: bool) -> None:
    metadata = byte_level_metadata(pre)
    tokenizer = load(metadata)
    vocabulary = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    ranks = reference.merge_ranks(MERGES)

    @given(text=TEXTS)
    @settings(deadline=None)
    def check(text: str) -> None:
        expected = reference.encode_bytes(
            text, cut=cut, vocabulary=vocabulary, ranks=ranks, whole_pieces=whole_pieces
        )
        assert tokenizer.encode(text, add_special_tokens=False) == expected

    check()


def test_the_rules_differ() -> None:
    """Control: the cases above would notice a wrong rule."""
    text = "1234  hello\n\n12 \u00e9e\u0301"
    encoded = {
        pre: tuple(load(byte_level_metadata(pre)).encode(text, add_special_tokens=False))
        for pre, _, _ in RULES
        if pre != "default"
    }
    assert len(set(encoded.values())) == 4


ODD_TEXTS = (
    "Hello world, it's 12345 o'CLOCK: don't!\n\n  x = a[0]+=1\t\r\n",
    "   leading and trailing   ",
    "na\u00efve caf\u00e9 \u00dcBER stra\u00dfe McDonald iPhone HTTPServer",
    "\u4f60\u597d\u4e16\u754c 2024\u5e747\u6708 \u3053\u3093\u306b\u3061\u306f \ud55c\uad6d\uc5b4",
    "\U0001f600\U0001f468\u200d\U0001f469 \u0627\u0644\u0639\u0631\u0628\u064a\u0629\u060c 1.5e-10",
    'path/to//file.py --flag="x" #tag @user $5 a_b `code` <|im_end|>',
    "",
    "\x00\x7f\u00a0\u2028\u2009x",
)


@pytest.mark.parametrize("pre", sorted(set(CUT_RULES) & set(GGUF_PRE_TOKENIZER_SPLITS)))
def test_cuts_equal_those_of_transformers(pre: str) -> None:
    ours = build_gguf_tokenizer(byte_level_metadata(pre)).backend.pre_tokenizer
    split = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[pre]), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    theirs = pre_tokenizers.Sequence([split, byte_level])
    for text in ODD_TEXTS:
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


def test_every_rule_that_transformers_names_is_known() -> None:
    assert set(GGUF_PRE_TOKENIZER_SPLITS) - set(CUT_RULES) <= {"jina-v5-nano"}


# As llama.cpp writes them: patterns that cut in turn what is left whole.
IN_TURN = {
    "deepseek-coder": ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CHINESE, r"\p{N}"),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "command-r": (r"\p{N}", reference.GPT2_CUT),
    "stablelm2": (reference.QWEN2_CUT,),
    "glm4": (reference.LLAMA3_CUT,),
    "olmo": (reference.GPT2_CUT,),
}


@pytest.mark.parametrize("pre", IN_TURN)
def test_rules_that_cut_in_turn(pre: str) -> None:
    ours = build_gguf_tokenizer(byte_level_metadata(pre)).backend.pre_tokenizer
    table = reference.bytes_to_characters()
    for text in ODD_TEXTS:
        pieces = reference.cut_in_turn(text, IN_TURN[pre])
        spelled = ["".join(table[byte] for byte in piece.encode()) for piece in pieces]
        assert [piece for piece, _ in ours.pre_tokenize_str(text)] == spelled


def test_whole_pieces_skip_merging_with_llama3_only() -> None:
    for pre, expected in (("llama-bpe", [builders.byte_vocabulary()["z"]]), ("gpt-2", None)):
        tokenizer = load(byte_level_metadata(pre))
        ids = tokenizer.encode(WHOLE, add_special_tokens=False)
        if expected is not None:
            assert tokenizer.token_text(ids[0]) == WHOLE
            assert len(ids) == 1
        else:
            assert len(ids) == len(WHOLE)


def test_control_and_user_defined_tokens_stay_whole() -> None:
    tokenizer = load(byte_level_metadata("gpt-2"))
    ids = tokenizer.encode("a<|im_end|><think>b", add_special_tokens=False)
    assert [tokenizer.token_text(token_id) for token_id in ids] == [
        "a",
        "<|im_end|>",
        "<think>",
        "b",
    ]
    assert [tokenizer.is_special(token_id) for token_id in ids] == [False, True, False, False]
    assert tokenizer.decode(ids) == "a<think>b"


@pytest.mark.parametrize(
    ("pre", "flag", "expected"),
    [
        ("gpt-2", None, False),
        ("gpt-2", True, True),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
    ],
)
def test_bos_of_byte_level(pre: str, flag: bool | None, expected: bool) -> None:
    more = {} if flag is None else {"tokenizer.ggml.add_bos_token": flag}
    tokenizer = load(byte_level_metadata(pre, **more))
    ids = tokenizer.encode("h", add_special_tokens=True)
    assert (ids[0] == tokenizer.bos_token_id) == expected
    assert len(ids) == 1 + expected


def test_sentencepiece_equals_its_rule() -> None:
    metadata = builders.sentencepiece_metadata()
    tokenizer = load(metadata)
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]

    @given(text=st.text(st.sampled_from(" helowrdi\u00e9\U0001f600"), max_size=16))
    @settings(deadline=None)
    def check(text: str) -> None:
        expected = reference.encode_sentencepiece(text, tokens=tokens, scores=scores)
        assert tokenizer.encode(text, add_special_tokens=False) == expected

    check()
    ids = tokenizer.encode("hello world", add_special_tokens=True)
    assert [tokenizer.token_text(token_id) for token_id in ids] == ["<s>", " hello", " world"]


def test_sentencepiece_without_space_prefix() -> None:
    metadata = builders.sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": False})
    tokenizer = load(metadata)
    ids = tokenizer.encode("hello", add_special_tokens=False)
    assert [tokenizer.token_text(token_id) for token_id in ids] == ["hello"]
    ids = tokenizer.encode(" hello", add_special_tokens=False)
    assert tokenizer.decode(ids) == " hello"


def test_sentencepiece_bytes() -> None:
    tokenizer = load(builders.sentencepiece_metadata())
    ids = tokenizer.encode("\u00e9", add_special_tokens=False)
    assert [tokenizer.token_bytes(token_id) for token_id in ids] == [b" ", b"\xc3", b"\xa9"]
    assert tokenizer.decode(ids) == "\u00e9"


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, UnsupportedModel, "'rwkv'"),
        ({"tokenizer.ggml.model": None}, UnsupportedModel, "None"),
        (
            {"tokenizer.ggml.pre": "superbpe"},
            UnsupportedModel,
            r"'superbpe'; supported are bloom, .*",
        ),
        ({"tokenizer.ggml.tokens": 5}, CheckpointError, "tokens must be an array, not int"),
        ({"tokenizer.chat_template": 5}, CheckpointError, "is not text"),
        ({"tokenizer.ggml.tokens": []}, CheckpointError, r"no tokenizer\.ggml\.tokens"),
        ({"tokenizer.ggml.merges": ["h q q"]}, CheckpointError, "'h q q'"),
        ({"tokenizer.ggml.merges": ["nospace"]}, CheckpointError, "'nospace'"),
        ({"tokenizer.ggml.token_type": [1, 3]}, CheckpointError, "2 entries for"),
        ({"tokenizer.ggml.token_type": ["x"]}, CheckpointError, "token_type must be an array of"),
    ],
)
def test_refused(change: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        load(byte_level_metadata("gpt-2", **change))


def test_missing_merges_and_scores_are_refused() -> None:
    metadata = byte_level_metadata("gpt-2")
    del metadata["tokenizer.ggml.merges"]
    with pytest.raises(CheckpointError, match="merges"):
        load(metadata)
    with pytest.raises(CheckpointError, match="scores has 0 entries"):
        load(builders.sentencepiece_metadata(**{"tokenizer.ggml.scores": []}))
    with pytest.raises(CheckpointError, match="scores must be an array of numbers"):
        load(builders.sentencepiece_metadata(**{"tokenizer.ggml.scores": ["x"]}))


def test_end_tokens_of_a_gguf() -> None:
    metadata = byte_level_metadata("gpt-2", **{"tokenizer.ggml.eot_token_id": 7})
    metadata["tokenizer.ggml.eos_token_id"] = 5
    assert load(metadata).eos_token_ids == {5, 7}
    metadata["tokenizer.chat_template"] = "{{ messages[0].content }}<|im_end|>"
    tokenizer = load(metadata)
    (im_end,) = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    assert tokenizer.eos_token_ids == {5, 7, im_end}
