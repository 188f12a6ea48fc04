"""Folders with tokenizer.model and no tokenizer.json, against sentencepiece and transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from coordinator.text.sentencepiece_model import read_sentencepiece_model
from coordinator.text.tokenizer import Tokenizer, load_tokenizer
from stagemesh.errors import CheckpointError, UnsupportedModel
from tests.text import builders, vocabularies
from tests.text.vocabularies import MARKED, PLAIN, SPACED, TEXTS, Trained

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "like Llama": ("bpe", PLAIN),
    "like Gemma": (
        "bpe",
        PLAIN
        | {
            "add_dummy_prefix": False,
            "user_defined_symbols": ["<tool>", "\u2581\u2581", "\u2581\u2581\u2581", "\n"],
        },
    ),
    "with symbols": ("bpe", PLAIN | {"user_defined_symbols": ["<tool>", "<|im_end|>"]}),
    "that changes characters": ("bpe", {}),
    "unigram": ("unigram", {}),
    "unigram with bytes": ("unigram", PLAIN),
}


def write(folder: Path, trained: Trained, **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.model").write_bytes(trained.model)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def load(folder: Path) -> Tokenizer:
    return load_tokenizer(builders.folder_spec(folder))


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_text_are_those_of_sentencepiece(tmp_path: Path, kind: str) -> None:
    name, settings = KINDS[kind]
    trained = vocabularies.train_pieces(name, **settings)
    tokenizer = load(write(tmp_path, trained))
    for text in (*TEXTS, *SPACED, "say <tool>x <tool> y"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == trained.processor.encode(text), text
        if 0 not in ids:  # which the library decodes to a sign of its own
            assert tokenizer.decode(ids) == trained.processor.decode(ids)
    assert tokenizer.encode("a", add_special_tokens=True)[0] == tokenizer.bos_token_id == 1
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.vocab_size == trained.processor.vocab_size()
    assert [tokenizer.is_special(token_id) for token_id in range(4)] == [True, True, True, False]


def test_the_kinds_differ() -> None:
    """Control: what a file says of characters and spaces shows on these texts."""
    texts = (*TEXTS, *SPACED)
    processors = [
        vocabularies.train_pieces(name, **more).processor for name, more in KINDS.values()
    ]
    encoded = [[tuple(p.encode(text, out_type=str)) for text in texts] for p in processors]
    assert all(encoded.count(each) == 1 for each in encoded)


def test_against_transformers(tmp_path: Path) -> None:
    """Which adds a space to the first stretch of text alone, unless the settings say "legacy"."""
    trained = vocabularies.train_pieces("bpe", **PLAIN)
    settings = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_bos_token": True}
    folder = write(tmp_path, trained, **settings, bos_token="<s>", eos_token="</s>")
    tokenizer, theirs = load(folder), AutoTokenizer.from_pretrained(str(folder))
    for text in (*TEXTS, *SPACED, *MARKED):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == theirs(text, add_special_tokens=False).input_ids, text
        assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    write(tmp_path, trained, **(settings | {"legacy": True}))
    assert load(folder).encode("<s>a", add_special_tokens=False) != tokenizer.encode(
        "<s>a", add_special_tokens=False
    )


def test_settings_of_the_folder_come_first(tmp_path: Path) -> None:
    symbols = {"user_defined_symbols": ["<|im_end|>"]}
    trained = vocabularies.train_pieces("bpe", **(PLAIN | symbols))
    settings = {"eos_token": "<|im_end|>", "add_bos_token": False, "add_prefix_space": False}
    tokenizer = load(write(tmp_path, trained, **settings, pad_token="[PAD]"))
    end = trained.processor.piece_to_id("<|im_end|>")
    assert tokenizer.eos_token_ids == {end}
    assert tokenizer.is_special(end)
    ids = tokenizer.encode("dog<|im_end|>", add_special_tokens=True)
    assert (tokenizer.decode(ids), ids[-1]) == ("dog", end)
    assert tokenizer.token_text(ids[0]) in ("d", "do", "dog")
    assert tokenizer.token_text(trained.processor.vocab_size()) == "[PAD]"


@pytest.mark.parametrize("older", [False, True])
def test_added_tokens(tmp_path: Path, *, older: bool) -> None:
    trained = vocabularies.train_pieces("bpe", **PLAIN)
    size = trained.processor.vocab_size()

    def with_ids(first: int, second: int) -> Tokenizer:
        if older:
            text = json.dumps({"<two>": second, "<one>": first})
            write(tmp_path, trained)
            (tmp_path / "added_tokens.json").write_text(text)
        else:
            entries = {
                str(token_id): {"content": text, "normalized": False}
                for text, token_id in (("<two>", second), ("<one>", first))
            }
            write(tmp_path, trained, added_tokens_decoder=entries)
        return load(tmp_path)

    tokenizer = with_ids(size, size + 1)
    assert tokenizer.encode("<one><two>", add_special_tokens=False) == [size, size + 1]
    with pytest.raises(CheckpointError, match=rf"'<two>' has the id {size + 9} in .* {size + 1} "):
        with_ids(size, size + 9)
    with pytest.raises(CheckpointError, match="added_tokens"):
        with_ids(size, "x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda model: b"", CheckpointError, "no sentencepiece model .*no pieces.*save_pretrained"),
        (lambda model: model[:-7], CheckpointError, "no sentencepiece model .*save_pretrained"),
        (lambda model: b"IQ== 0\nIg== 1\n", CheckpointError, "no sentencepiece model"),
        (lambda model: with_spec(model, model_type=4), UnsupportedModel, "model type 4"),
        (
            lambda model: with_spec(model, treat_whitespace_as_suffix=True),
            UnsupportedModel,
            "suffix True",
        ),
        (lambda model: with_spec(model, unk_id=9999), CheckpointError, "not usable"),
    ],
)
def test_refused(tmp_path: Path, change: Any, error: type[Exception], message: str) -> None:
    trained = vocabularies.train_pieces("unigram")
    path = write(tmp_path, trained) / "tokenizer.model"
    read_sentencepiece_model(path).vocabulary.build()
    path.write_bytes(change(trained.model))
    with pytest.raises(error, match=message):
        load(tmp_path)


def with_spec(model: bytes, **settings: Any) -> bytes:
    """The same file with other settings of its trainer."""
    proto = Trained(model=model, processor=None).proto
    for name, value in settings.items():
        setattr(proto.trainer_spec, name, value)
    return bytes(proto.SerializeToString())
