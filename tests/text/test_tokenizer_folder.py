"""Tokenizers from model folders: begin and end tokens, faulty files."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models

from coordinator.text.chat_template import load_chat_template
from coordinator.text.tokenizer import Tokenizer, load_tokenizer
from stagemesh.errors import CheckpointError, ConfigError, UnsupportedModel
from tests.text import builders
from tests.text.builders import BOS, EOS, IM_END

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAMES = {"bos_token": BOS, "eos_token": EOS}
MESSAGES = [{"role": "user", "content": "Hi"}]


def load(folder: Path, **spec: Any) -> Tokenizer:
    return load_tokenizer(builders.folder_spec(folder, **spec))


def transformers_tokenizer(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(str(folder))


@pytest.mark.parametrize("post_processor", [True, False])
@pytest.mark.parametrize("flag", [True, False, None])
def test_one_begin_token(tmp_path: Path, post_processor: bool, flag: bool | None) -> None:
    """A chat template that writes BOS and a tokenizer that adds it must not give two."""
    config = {
        **NAMES,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": TEMPLATE,
        **({} if flag is None else {"add_bos_token": flag}),
    }
    backend = builders.byte_tokenizer(bos=BOS if post_processor else None)
    folder = builders.write_folder(tmp_path, backend, config=config)
    tokenizer, spec = load(folder), builders.folder_spec(folder)
    bos = tokenizer.bos_token_id
    template = load_chat_template(spec)
    text = template.render(MESSAGES)
    template.close()

    chat = tokenizer.encode(text, add_special_tokens=False)
    theirs = transformers_tokenizer(folder)
    assert chat == theirs.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=False
    )
    assert chat.count(bos) == 1

    completion = tokenizer.encode("Hi", add_special_tokens=True)
    wants_bos = post_processor or bool(flag)
    assert completion == [*([bos] if wants_bos else []), *b"Hi"]
    if not (flag and not post_processor):
        # transformers 5 no longer reads add_bos_token beside a tokenizer.json; we still do.
        assert completion == theirs("Hi").input_ids
    # Control: adding special tokens to rendered text would not be harmless by itself.
    if post_processor:
        assert theirs(text).input_ids.count(bos) == 2


@pytest.mark.parametrize("post_processor", [True, False])
def test_prompt_that_brings_its_begin_token_gets_no_second(
    tmp_path: Path, post_processor: bool
) -> None:
    backend = builders.byte_tokenizer(bos=BOS if post_processor else None)
    config = {**NAMES, "add_bos_token": True}
    tokenizer = load(builders.write_folder(tmp_path, backend, config=config))
    ids = tokenizer.encode(BOS + "Hi", add_special_tokens=True)
    assert ids == [tokenizer.bos_token_id, ord("H"), ord("i")]


@pytest.mark.parametrize(
    ("generation", "config", "names", "template", "expected"),
    [
        # Each source names another end token: all of them end a sequence.
        (
            {"eos_token_id": [50, 12]},
            {"eos_token_id": 60},
            {"eos_token": "F"},
            "",
            {12, 50, 60, 70},
        ),
        (None, {"eos_token_id": 12}, {}, "", {12}),
        ({"eos_token_id": 12}, {}, {}, "", {12}),
        (None, {}, {"eos_token": {"content": EOS, "special": True}}, "", {257}),
        (None, {}, {"eos_token": EOS}, "x<|im_end|>", {257, 259}),
        (None, {"eos_token_id": None}, {"eos_token": None}, "x<|eot_id|>", set()),
    ],
)
def test_end_tokens_from_every_source(
    tmp_path: Path,
    generation: dict[str, Any] | None,
    config: dict[str, Any],
    names: dict[str, Any],
    template: str,
    expected: set[int],
) -> None:
    folder = builders.write_folder(
        tmp_path, builders.byte_tokenizer(), config=names, generation=generation
    )
    if template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    assert load(folder, config=config).eos_token_ids == expected


def test_message_end_is_no_answer_end_in_harmony(tmp_path: Path) -> None:
    """With <|return|> in the vocabulary <|end|> closes a message, not the answer."""
    for specials, expected in ((("<|end|>",), {256}), (("<|end|>", "<|return|>"), set())):
        folder = builders.write_folder(
            tmp_path / str(len(specials)),
            builders.byte_tokenizer(specials=specials),
            template_file="{{ messages }}<|end|>",
        )
        assert load(folder).eos_token_ids == expected


def test_special_tokens_map_names_tokens_too(tmp_path: Path) -> None:
    folder = builders.write_folder(
        tmp_path, builders.byte_tokenizer(), special_map={"bos_token": {"content": BOS}}
    )
    assert load(folder).bos_token == BOS


def test_truncation_and_padding_of_the_file_do_not_apply(tmp_path: Path) -> None:
    backend = builders.byte_tokenizer()
    backend.enable_truncation(4)
    backend.enable_padding(length=16, pad_id=0)
    tokenizer = load(builders.write_folder(tmp_path, backend))
    assert tokenizer.encode("longer than four", add_special_tokens=True) == list(
        b"longer than four"
    )


def test_tokens_that_only_the_config_names_are_added(tmp_path: Path) -> None:
    added = {"261": {"content": "<two>"}, "260": {"content": "<one>", "special": True}}
    config = {"added_tokens_decoder": added}
    tokenizer = load(builders.write_folder(tmp_path, builders.byte_tokenizer(), config=config))
    assert tokenizer.encode("<one><two>", add_special_tokens=False) == [260, 261]
    assert tokenizer.decode([260, 261]) == "<two>"


def test_added_tokens_keep_their_text(tmp_path: Path) -> None:
    """Characters of added tokens are no byte-level spelling, though some look like one."""
    backend = builders.byte_tokenizer()
    backend.add_tokens(["\u00e9\u0120 x"])
    tokenizer = load(builders.write_folder(tmp_path, backend))
    (token_id,) = tokenizer.encode("\u00e9\u0120 x", add_special_tokens=False)
    assert tokenizer.token_bytes(token_id) == "\u00e9\u0120 x".encode()


def test_text_that_cannot_be_encoded(tmp_path: Path) -> None:
    folder = builders.write_folder(tmp_path, builders.byte_tokenizer())
    with pytest.raises(ConfigError, match="half a surrogate pair at 1"):
        load(folder).encode("a\ud800", add_special_tokens=False)
    small = load(folder, vocab_size=256)
    assert small.encode("plain", add_special_tokens=False) == list(b"plain")
    with pytest.raises(ConfigError, match=r"token 259\).*no embedding"):
        small.encode(IM_END, add_special_tokens=False)


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("tokenizer.json", "{", CheckpointError),
        ("tokenizer.json", "[]", CheckpointError),
        ("tokenizer.json", '{"decoder": {"type": "ByteLevel"}}', CheckpointError),
        ("tokenizer_config.json", "{", CheckpointError),
        ("tokenizer_config.json", "[1]", CheckpointError),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}', CheckpointError),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}', CheckpointError),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"1": 2}}', CheckpointError),
        ("generation_config.json", '{"eos_token_id": ["x"]}', CheckpointError),
        ("generation_config.json", '{"eos_token_id": "x"}', CheckpointError),
    ],
)
def test_faulty_files_are_named(
    tmp_path: Path, name: str, content: str, error: type[Exception]
) -> None:
    folder = builders.write_folder(tmp_path, builders.byte_tokenizer())
    load(folder)
    (folder / name).write_text(content, encoding="utf-8")
    with pytest.raises(error):
        load(folder)


def test_missing_tokenizer_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedModel,
        match=r"neither tokenizer\.json nor tokenizer\.model; save .* transformers",
    ):
        load(tmp_path)


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.CTC(), None])
def test_other_decoders_are_refused_by_name(tmp_path: Path, decoder: Any) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    if decoder is not None:
        backend.decoder = decoder
    folder = builders.write_folder(tmp_path, backend)
    kind = json.loads((folder / "tokenizer.json").read_text())["decoder"]
    with pytest.raises(UnsupportedModel, match=kind["type"] if kind else "none"):
        load(folder)
