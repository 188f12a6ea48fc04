"""Small tokenizers and model folders, built on the spot."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from coordinator.text.pieces import byte_alphabet
from stagemesh.model_spec import ModelSpec

BOS, EOS, IM_START, IM_END = "<s>", "</s>", "<|im_start|>", "<|im_end|>"


def byte_vocabulary() -> dict[str, int]:
    """One token for each byte, at the byte's own value."""
    return dict(byte_alphabet().items())


def byte_tokenizer(
    *,
    specials: tuple[str, ...] = (BOS, EOS, IM_START, IM_END),
    merges: tuple[tuple[str, str], ...] = (),
    bos: str | None = None,
) -> tokenizers.Tokenizer:
    """A byte-level tokenizer: ids 0..255 are bytes, then the merges, then special tokens.

    With `bos` its post-processor writes that token in front of each text.
    """
    vocabulary = byte_vocabulary()
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in specials])
    if bos is not None:
        token_id = backend.token_to_id(bos)
        assert token_id is not None
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, token_id)]
        )
    return backend


SP_PIECES = (
    *("\u2581", "h", "i", "e", "l", "o", "w", "r", "d", "he", "ll", "hell", "hello", "\u2581hello"),
    *("\u2581w", "or", "\u2581wor", "ld", "\u2581world", "lo", "llo", "ell"),
)
SP_SPECIALS = ("<unk>", "<s>", "</s>")


def sentencepiece_tokens() -> list[str]:
    """A small Llama-2-like vocabulary: specials, 256 bytes, pieces."""
    return [*SP_SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *SP_PIECES]


def sentencepiece_metadata(**more: Any) -> dict[str, Any]:
    """GGUF metadata of that vocabulary, with scores that fall in the order of the pieces."""
    tokens = sentencepiece_tokens()
    num_fixed = len(tokens) - len(SP_PIECES)
    scores = [0.0] * num_fixed + [-float(index) for index in range(len(SP_PIECES))]
    types = [2, 3, 3, *([6] * 256), *([1] * len(SP_PIECES))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **more,
    }


def sentencepiece_json() -> tokenizers.Tokenizer:
    """The same vocabulary as a tokenizer.json would hold it (without merges: one per character)."""
    vocabulary = {token: index for index, token in enumerate(sentencepiece_tokens())}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in SP_SPECIALS])
    return backend


def write_folder(
    folder: Path,
    backend: tokenizers.Tokenizer,
    *,
    config: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
    special_map: dict[str, Any] | None = None,
    template_file: str | None = None,
) -> Path:
    """Write the text files of a model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    for name, content in (
        ("tokenizer_config.json", config),
        ("generation_config.json", generation),
        ("special_tokens_map.json", special_map),
    ):
        if content is not None:
            (folder / name).write_text(json.dumps(content), encoding="utf-8")
    if template_file is not None:
        (folder / "chat_template.jinja").write_text(template_file, encoding="utf-8")
    return folder


def folder_spec(
    folder: Path, *, config: dict[str, Any] | None = None, vocab_size: int = 10_000
) -> ModelSpec:
    """The fields of a ModelSpec that the text layer reads, for a folder."""
    return cast(
        ModelSpec,
        SimpleNamespace(
            name="tiny",
            path=folder,
            format="safetensors",
            config=config or {},
            gguf_metadata=None,
            eos_token_ids=(),
            bos_token_id=None,
            vocab_size=vocab_size,
        ),
    )


def gguf_spec(metadata: dict[str, Any], *, vocab_size: int = 10_000) -> ModelSpec:
    """The same for the metadata of a GGUF file."""
    return cast(
        ModelSpec,
        SimpleNamespace(
            name="tiny",
            path=Path("tiny.gguf"),
            format="gguf",
            config={},
            gguf_metadata=metadata,
            eos_token_ids=(),
            bos_token_id=None,
            vocab_size=vocab_size,
        ),
    )
