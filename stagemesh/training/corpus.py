"""A text that every Python has, and a tokenizer for it: what a first model can be trained on.

The text is `pydoc_data.topics`, the reference manual behind `help()`: some 450 KB of English.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from stagemesh.errors import ConfigError

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
SMALLEST_VOCABULARY = 257
"""Each byte, and the end of a text."""

BASE_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""A chat template for base models, which go on with what they are given: no roles, no marks."""


def corpus_texts() -> list[str]:
    """The texts of the manual, ordered by their names."""
    return [topics[name] for name in sorted(topics)]


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """A byte-level BPE: any text can be said in it, and every id has a text.

    Raises:
        ConfigError: the vocabulary is too small for all bytes.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise ConfigError(f"vocab_size must be at least {SMALLEST_VOCABULARY}, got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_tokenizer(
    folder: Path,
    tokenizer: Tokenizer,
    *,
    chat_template: str = BASE_TEMPLATE,
    bos_token: str | None = None,
    eos_token: str | None = END_OF_TEXT,
    adds_bos: bool = False,
) -> list[Path]:
    """Write tokenizer.json and tokenizer_config.json, which a served model needs; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "add_bos_token": adds_bos,
        "bos_token": bos_token,
        "eos_token": eos_token,
        "chat_template": chat_template,
    }
    paths = tokenizer_files(folder)
    tokenizer.save(str(paths[0]))
    paths[1].write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return paths


def tokenizer_files(folder: Path) -> list[Path]:
    """Where `write_tokenizer` writes."""
    return [folder / "tokenizer.json", folder / "tokenizer_config.json"]


def encode_texts(
    tokenizer: Tokenizer, texts: Sequence[str], *, end_id: int | None = END_OF_TEXT_ID
) -> torch.Tensor:
    """All texts as one sequence of ids, each with the end of a text behind it. Shapes: [N]."""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False):
        ids += encoding.ids
        if end_id is not None:
            ids.append(end_id)
    return torch.tensor(ids, dtype=torch.int64)
