"""A tokenizer from tokenizer.model, the file of sentencepiece, where there is no tokenizer.json.

The file is one protobuf message, whose schema is sentencepiece's `src/sentencepiece_model.proto`.
The fields that are needed are declared here, under other names and in a pool of their own, as
transformers and sentencepiece each register the whole schema in the process.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from coordinator.text.piece_vocabulary import CONTROL, UNKNOWN, PieceVocabulary
from stagemesh.errors import CheckpointError, UnsupportedModel

FILE_NAME = "tokenizer.model"
"""What such a file is called in a model folder."""

MAX_BYTES = 64 << 20
"""Largest file that is read; that of Gemma 3 (262,144 pieces) has 4.7 MB."""

_PACKAGE = "stagemesh.sentencepiece"
_UNIGRAM, _BPE = 1, 2
_Field = descriptor_pb2.FieldDescriptorProto
# Message -> field -> (number, kind, default); enums are read as numbers.
_SCHEMA: dict[str, dict[str, tuple[int, Any, str]]] = {
    "Piece": {
        "piece": (1, _Field.TYPE_STRING, ""),
        "score": (2, _Field.TYPE_FLOAT, ""),
        "type": (3, _Field.TYPE_INT32, "1"),
    },
    "Trainer": {
        "model_type": (3, _Field.TYPE_INT32, "1"),
        "treat_whitespace_as_suffix": (24, _Field.TYPE_BOOL, ""),
        "byte_fallback": (35, _Field.TYPE_BOOL, ""),
        "unk_id": (40, _Field.TYPE_INT32, "0"),
        "bos_id": (41, _Field.TYPE_INT32, "1"),
        "eos_id": (42, _Field.TYPE_INT32, "2"),
        "pad_id": (43, _Field.TYPE_INT32, "-1"),
    },
    "Normalizer": {
        "precompiled_charsmap": (2, _Field.TYPE_BYTES, ""),
        "add_dummy_prefix": (3, _Field.TYPE_BOOL, "true"),
        "remove_extra_whitespaces": (4, _Field.TYPE_BOOL, "true"),
        "escape_whitespaces": (5, _Field.TYPE_BOOL, "true"),
    },
    "Model": {
        "pieces": (1, "Piece", ""),
        "trainer_spec": (2, "Trainer", ""),
        "normalizer_spec": (3, "Normalizer", ""),
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SentencePieceModel:
    """What the file gives."""

    vocabulary: PieceVocabulary
    """Pieces and what is done to text."""
    control_tokens: tuple[str, ...]
    """Pieces that steer the model."""
    special_tokens: dict[str, str]
    """Its own names for some of them: "bos_token", "eos_token", "unk_token", "pad_token"."""


def read_sentencepiece_model(
    path: Path, *, adds_space: bool | None = None, adds_space_once: bool = False
) -> SentencePieceModel:
    """Read a tokenizer.model.

    Args:
        path: of the file.
        adds_space: whether text gets a space in front; None for what the file says.
        adds_space_once: see `PieceVocabulary`.

    Raises:
        CheckpointError: it cannot be read, or is no such file.
        UnsupportedModel: a kind of vocabulary that is not supported.
    """
    model = _parse(path)
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    kinds = {_UNIGRAM: "unigram", _BPE: "bpe"}
    kind = kinds.get(trainer.model_type)
    if kind is None or trainer.treat_whitespace_as_suffix or not normalizer.escape_whitespaces:
        raise UnsupportedModel(
            f"{path}: model type {trainer.model_type} (supported: 1, unigram, and 2, BPE), white "
            f"space as suffix {trainer.treat_whitespace_as_suffix} (supported: False), white space "
            f"escaped {normalizer.escape_whitespaces} (supported: True)"
        )
    pieces = [entry.piece for entry in model.pieces]
    vocabulary = PieceVocabulary(
        kind="bpe" if kind == "bpe" else "unigram",
        pieces=pieces,
        scores=[entry.score for entry in model.pieces],
        types=[entry.type for entry in model.pieces],
        unknown_id=trainer.unk_id,
        spells_bytes=trainer.byte_fallback,
        adds_space=normalizer.add_dummy_prefix if adds_space is None else adds_space,
        adds_space_once=adds_space_once,
        removes_spaces=normalizer.remove_extra_whitespaces,
        character_map=normalizer.precompiled_charsmap,
        isolates_user_defined=True,
    )
    ids = {name: getattr(trainer, f"{name}_id") for name in ("bos", "eos", "unk", "pad")}
    return SentencePieceModel(
        vocabulary=vocabulary,
        control_tokens=tuple(
            entry.piece for entry in model.pieces if entry.type in (CONTROL, UNKNOWN)
        ),
        special_tokens={
            f"{name}_token": pieces[token_id]
            for name, token_id in ids.items()
            if 0 <= token_id < len(pieces)
        },
    )


def _parse(path: Path) -> Any:
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise CheckpointError(f"{path}: {size} bytes, over the limit of {MAX_BYTES}")
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    model = _message_class()()
    try:
        model.ParseFromString(raw)
        problem = "" if model.pieces else "it holds no pieces"
    except DecodeError as error:
        problem = str(error)
    if problem:
        raise CheckpointError(
            f"{path}: no sentencepiece model ({problem}); save the tokenizer with transformers "
            "(AutoTokenizer.from_pretrained(...).save_pretrained(folder)) to get a tokenizer.json"
        )
    return model


@functools.cache
def _message_class() -> type[Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="stagemesh/sentencepiece.proto", package=_PACKAGE, syntax="proto2"
    )
    for message_name, fields in _SCHEMA.items():
        message = file.message_type.add(name=message_name)
        for name, (number, kind, default) in fields.items():
            field = message.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL)
            if isinstance(kind, str):
                field.type, field.type_name = _Field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                field.type = kind
            if default:
                field.default_value = default
            if name == "pieces":
                field.label = _Field.LABEL_REPEATED
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.Model"))
