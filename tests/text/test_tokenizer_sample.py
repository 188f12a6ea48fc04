"""The sample model's tokenizer against two references.

1. An encoder written from the rules in plain Python (`reference`): digits one by one, then GPT-2's
   rule, then merges by rank. This is the true rule of SmolLM2, whose tokenizer.json has a Digits
   step before its ByteLevel step.
2. transformers' own GGUF support. It leaves out the Digits step, so that a space before a digit
   joins the digit's piece ("\\n 4" is cut as "\\n", " 4" and not as "\\n ", "4"). As the sample's
   merges never join ASCII digits this shows only where white space meets a digit, or a space a
   digit of several bytes; there the references differ and the first one is right.
"""

import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.text.chat_template import load_chat_template
from coordinator.text.tokenizer import Tokenizer, load_tokenizer
from stagemesh.model_spec import ModelSpec
from tests.text import reference

CORPUS = [
    "",
    " ",
    "Hello, world!",
    "It's we've I'm you'd they'll don't CAN'T",
    "  two spaces, a\ttab,\r\nlines\n\n\nand trailing   ",
    "def f(x):\n    return x ** 2  # square\n\n\tif True:\n\t\tpass\n",
    "1234567890 3.14159 2024-01-31 0x1F 1e-9 1,000,000",
    "\n 4 and   5 and\t6",
    "x\u00b2 + y\u00b3 = \u00bd, \u2167 \u0663\u0664 \u4e09",
    "na\u00efve caf\u00e9 cafe\u0301 \u00df \u0130stanbul",
    "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0 \ud55c\uad6d\uc5b4 \u0440\u0443\u0441\u0441\u043a",
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u05e2\u05d1\u05e8\u05d9\u05ea",
    "\U0001f600 \U0001f336\ufe0f \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea",
    "\x00\x01\x7f\u200b\u00a0\u3000\u2028",
    '{"key": [1, 2.5, null, true], "\\u00e9": "\\n"}',
    "https://example.com/a?b=c&d=%20#e <b>bold</b> &amp; $x_{i}^{2}$",
]


@pytest.fixture(scope="module")
def reference_ids(sample_spec: ModelSpec) -> Callable[[str], list[int]]:
    metadata = sample_spec.gguf_metadata
    assert metadata is not None
    tokens = metadata["tokenizer.ggml.tokens"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    ranks = reference.merge_ranks(metadata["tokenizer.ggml.merges"])
    return lambda text: reference.encode_bytes(
        text, cut=reference.cut_smollm, vocabulary=vocabulary, ranks=ranks
    )


@pytest.fixture(scope="module")
def transformers_tokenizer(sample_spec: ModelSpec) -> Any:
    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoTokenizer.from_pretrained(
            str(sample_spec.path.parent), gguf_file=sample_spec.path.name
        )


def test_loads_in_less_than_a_second(sample_spec: ModelSpec) -> None:
    started = time.perf_counter()
    load_tokenizer(sample_spec)
    assert time.perf_counter() - started < 1.0


def test_settings(sample_tokenizer: Tokenizer) -> None:
    assert sample_tokenizer.vocab_size == 49_152
    assert (sample_tokenizer.bos_token, sample_tokenizer.bos_token_id) == ("<|im_start|>", 1)
    assert sample_tokenizer.eos_token == "<|im_end|>"
    assert sample_tokenizer.eos_token_ids == {2}
    assert [token_id for token_id in range(30) if sample_tokenizer.is_special(token_id)] == list(
        range(17)
    )
    assert sample_tokenizer.token_bytes(905) == b" world"
    assert sample_tokenizer.token_bytes(1) == b"<|im_start|>"


@pytest.mark.parametrize("text", CORPUS)
def test_corpus_equals_the_rule(
    sample_tokenizer: Tokenizer, reference_ids: Callable[[str], list[int]], text: str
) -> None:
    ids = sample_tokenizer.encode(text, add_special_tokens=True)
    assert ids == reference_ids(text)  # add_bos_token is off in this file
    assert sample_tokenizer.decode(ids) == text


@given(
    text=st.text(
        st.sampled_from(" \n\t019\u00b2\u00bdabcE\u00e9\u65e5\U0001f600'.,s_{"), max_size=15
    )
)
@settings(max_examples=60, deadline=None)
def test_random_text_equals_the_rule(
    sample_tokenizer: Tokenizer, reference_ids: Callable[[str], list[int]], text: str
) -> None:
    ids = sample_tokenizer.encode(text, add_special_tokens=False)
    assert ids == reference_ids(text)


def test_corpus_against_transformers(
    sample_tokenizer: Tokenizer, transformers_tokenizer: Any
) -> None:
    differing = []
    for text in CORPUS:
        theirs = transformers_tokenizer(text).input_ids
        ours = sample_tokenizer.encode(text, add_special_tokens=True)
        if ours != theirs:
            differing.append(text)
        assert sample_tokenizer.decode(ours) == transformers_tokenizer.decode(theirs)
    # Where white space or a multi-byte digit follows a space: see the head of this file.
    assert differing == [CORPUS[7], CORPUS[8]]


@given(ids=st.lists(st.integers(0, 49_151), max_size=12), skip=st.booleans())
@settings(max_examples=200, deadline=None)
def test_decode_equals_transformers(
    sample_tokenizer: Tokenizer, transformers_tokenizer: Any, ids: list[int], skip: bool
) -> None:
    theirs = transformers_tokenizer.decode(ids, skip_special_tokens=skip)
    assert sample_tokenizer.decode(ids, skip_special_tokens=skip) == theirs


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "Hi"}],
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "caf\u00e9 \U0001f336?"},
            {"role": "assistant", "content": "Yes.\n"},
            {"role": "user", "content": ""},
        ],
    ],
)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_prompt_equals_transformers(
    sample_spec: ModelSpec,
    sample_tokenizer: Tokenizer,
    transformers_tokenizer: Any,
    messages: list[dict[str, str]],
    add_generation_prompt: bool,
) -> None:
    template = load_chat_template(sample_spec)
    text = template.render(messages, add_generation_prompt=add_generation_prompt)
    template.close()
    theirs = transformers_tokenizer.apply_chat_template(
        messages, add_generation_prompt=add_generation_prompt, return_dict=False
    )
    assert sample_tokenizer.encode(text, add_special_tokens=False) == theirs
