"""Small vocabularies that the field's own trainers make, and GGUF files of them."""

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

LINES = (
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "A model is cut into stages; each stage holds its layers and reads only its own tensors.",
    "def forward(self, hidden_states):\n    return self.layers(hidden_states) + 1",
    "    for index in range(10):\n        print(index, values[index])",
    'import json; text = json.dumps({"role": "user", "content": "Hello, world!"})',
    "It's what they've said: don't, can't, we'll; I'm, you'd. Isn't it?",
    "In 2024 the price was 1,234.50; in 2025 it is 3.14159 or 0x1F.",
    "na\u00efve caf\u00e9 stra\u00dfe \u00dcber \u0130stanbul",
    "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0 \u4f60\u597d\u4e16\u754c \ud55c\uad6d\uc5b4",
    "\u0440\u0443\u0441\u0441\u043a\u0438\u0439 \u05e2\u05d1\u05e8\u05d9\u05ea \U0001f600",
    "hello world hello there world this that these those then than",
)

TEXTS = (
    "",
    "Hello world",
    "The dog's layers don't sleep, they've 1234 values; 3.14!",
    "def f(x):\n    return x ** 2\t# sq\n\n\tif True:\r\n\t\tpass\n",
    "two  spaces   three\tand a tab, trailing ",
    "na\u00efve cafe\u0301 \u65e5\u672c\u8a9e\u306e\u6587\u7ae0 \u0440\u0443\u0441 \u0639",
    "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f336\ufe0f\U0001f1e9\U0001f1ea",
    "x\u2581y <0x41> < s> \u200b\u00a0\u3000\u2028 \x00\x7f",
    '{"a": [1, 2.5, null], "\\u00e9": "\\n"} https://x.org/?q=%20#e <b>&amp;</b>',
)
SPACED = (" ", " lead", "   three spaces in front", "\n lead")
MARKED = ("<s>Hi</s> there", "say <tool>x <tool> y<s>")


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A sentencepiece vocabulary."""

    model: bytes
    """The file."""
    processor: Any
    """The library's own encoder."""

    @property
    def proto(self) -> Any:
        """The file's message, by the library's own schema."""
        message = sentencepiece_model_pb2.ModelProto()
        message.ParseFromString(self.model)
        return message


def train_pieces(kind: str, **settings: Any) -> Trained:
    """Train a "bpe" or "unigram" vocabulary."""
    buffer = io.BytesIO()
    defaults = {"vocab_size": 480, "hard_vocab_limit": False, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 4),
        model_writer=buffer,
        model_type=kind,
        **(defaults | settings),
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=buffer.getvalue())
    return Trained(model=buffer.getvalue(), processor=processor)


PLAIN = {
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
}
"""Settings of Llama's vocabulary."""


def train_byte_level() -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(LINES, trainer)
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    merges = tokenizer_merges(tokenizer)
    return tokens, merges


def tokenizer_merges(tokenizer: Tokenizer) -> list[str]:
    """Merges "left right" of a BPE."""
    entries = json.loads(tokenizer.to_str())["model"]["merges"]
    return [entry if isinstance(entry, str) else " ".join(entry) for entry in entries]


Extra = Callable[[gguf.GGUFWriter], None]


def write_tokenizer(
    path: Path,
    kind: str,
    tokens: Sequence[str],
    *,
    types: Sequence[int],
    architecture: str = "llama",
    extra: Extra = lambda _writer: None,
) -> Path:
    """A GGUF file without weights."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    extra(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_byte_level(path: Path, pre: str) -> Path:
    """A byte-level vocabulary with a cutting rule, three control tokens and a user-defined one."""
    tokens, merges = train_byte_level()
    num_plain = len(tokens)

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges(merges)
        writer.add_bos_token_id(num_plain)
        writer.add_eos_token_id(num_plain + 1)
        writer.add_add_bos_token(pre == "llama-bpe")

    tokens += ["<s>", "</s>", "<|end|>", "<tool>"]
    types = [1] * num_plain + [3, 3, 3, 4]
    return write_tokenizer(path, "gpt2", tokens, types=types, extra=extra)


def write_pieces(path: Path, trained: Trained, *, architecture: str = "llama") -> Path:
    """A sentencepiece vocabulary as llama.cpp's converter writes it."""
    proto = trained.proto
    is_unigram = proto.trainer_spec.model_type == 1

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_token_scores([piece.score for piece in proto.pieces])
        writer.add_add_space_prefix(proto.normalizer_spec.add_dummy_prefix)
        for name in ("bos", "eos", "unk", "pad"):
            token_id = getattr(proto.trainer_spec, f"{name}_id")
            if token_id >= 0:
                getattr(writer, f"add_{name}_token_id")(token_id)
        if is_unigram:
            spec = proto.normalizer_spec
            writer.add_remove_extra_whitespaces(spec.remove_extra_whitespaces)
            if spec.precompiled_charsmap:
                writer.add_precompiled_charsmap(spec.precompiled_charsmap)

    tokens = [
        piece.piece.replace("\u2581", " ") if piece.type == 4 else piece.piece
        for piece in proto.pieces
    ]
    return write_tokenizer(
        path,
        "t5" if is_unigram else "llama",
        tokens,
        types=[piece.type for piece in proto.pieces],
        architecture=architecture,
        extra=extra,
    )
