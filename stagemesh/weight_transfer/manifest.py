"""A model as messages: everything that its headers tell, and none of its data."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stagemesh.checkpoint.stored_form import AS_IT_IS, RowOrder, StoredForm
from stagemesh.checkpoint.tensor_groups import TensorGroups
from stagemesh.checkpoint.tensor_info import TensorInfo
from stagemesh.errors import ProtocolError
from stagemesh.model_spec import ModelSpec
from stagemesh.rpc.v1 import weights_pb2

_JSON_BYTES = 2**20
_TENSORS_PER_PART = 1000
_MAX_JSON_BYTES = 64 * 2**20
_MAX_TENSORS = 2_000_000
_MAX_DIMS = 8
_MAX_TENSOR_BYTES = 2**48
_NOT_JSON = frozenset({"path", "tensors", "groups"})
# Tokens are the coordinator's business, and most of a GGUF file's header.
_TOKENIZER_PREFIX = "tokenizer."

_PLACES = weights_pb2.TensorPlace


def model_parts(spec: ModelSpec) -> Iterator[weights_pb2.ModelPart]:
    """The model in messages far below the limit of one, whatever its number of tensors."""
    fields = {
        field.name: getattr(spec, field.name)
        for field in dataclasses.fields(spec)
        if field.name not in _NOT_JSON
    }
    if spec.gguf_metadata is not None:
        fields["gguf_metadata"] = {
            key: value
            for key, value in spec.gguf_metadata.items()
            if not key.startswith(_TOKENIZER_PREFIX)
        }
    fields["generation_defaults"] = dict(spec.generation_defaults)
    text = json.dumps({**fields, "embedding": spec.groups.embedding.name}).encode()
    for start in range(0, len(text), _JSON_BYTES):
        yield weights_pb2.ModelPart(spec_json=text[start : start + _JSON_BYTES])
    entries = list(_entries(spec))
    for start in range(0, len(entries), _TENSORS_PER_PART):
        yield weights_pb2.ModelPart(tensors=entries[start : start + _TENSORS_PER_PART])


def _entries(spec: ModelSpec) -> Iterator[weights_pb2.TensorEntry]:
    groups = spec.groups
    places: dict[str, tuple[weights_pb2.TensorPlace.ValueType, int]] = {}
    for place, infos in (
        (_PLACES.TENSOR_PLACE_FIRST, groups.first),
        (_PLACES.TENSOR_PLACE_LAST, groups.last),
        (_PLACES.TENSOR_PLACE_HEAD, groups.head),
    ):
        places |= {info.name: (place, 0) for info in infos}
    for index, infos in enumerate(groups.layers):
        places |= {info.name: (_PLACES.TENSOR_PLACE_LAYER, index) for info in infos}
    if groups.unused_head is not None:
        places[groups.unused_head.name] = (_PLACES.TENSOR_PLACE_UNUSED_HEAD, 0)
    for info in spec.tensors.values():
        place, layer = places.get(info.name, (_PLACES.TENSOR_PLACE_UNUSED, 0))
        yield weights_pb2.TensorEntry(
            name=info.name,
            source_name=info.source_name,
            encoding=info.encoding,
            shape=info.shape,
            num_bytes=info.num_bytes,
            place=place,
            layer=layer,
            stored_json="" if info.stored == AS_IT_IS else json.dumps(asdict(info.stored)),
        )


class ModelAssembler:
    """Puts a model together again, from a coordinator that may run another version.

    Args:
        where: stands for the model's folder, and in errors.
    """

    def __init__(self, *, where: Path) -> None:
        self._where = where
        self._json = bytearray()
        self._entries: list[weights_pb2.TensorEntry] = []

    def add(self, part: weights_pb2.ModelPart) -> None:
        """Take a message in.

        Raises:
            ProtocolError: there are more than any model has.
        """
        self._json += part.spec_json
        self._entries.extend(part.tensors)
        if len(self._json) > _MAX_JSON_BYTES or len(self._entries) > _MAX_TENSORS:
            raise ProtocolError(
                f"a model of more than {_MAX_TENSORS} tensors, or with more than "
                f"{_MAX_JSON_BYTES} bytes of configuration, is not taken"
            )

    def spec(self) -> ModelSpec:
        """The model; its tensors have no data yet, see `relocated`.

        Raises:
            ProtocolError: something is missing or makes no sense.
        """
        try:
            fields = json.loads(bytes(self._json))
            embedding = fields.pop("embedding")
            tensors = {entry.name: self._tensor(entry) for entry in self._entries}
            known = {field.name for field in dataclasses.fields(ModelSpec)} - _NOT_JSON
            # JSON knows no tuples; no field is a list.
            values: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in fields.items()
                if name in known
            }
            groups = self._groups(tensors, tensors[embedding], num_layers=values["num_layers"])
            return ModelSpec(**values, path=self._where, tensors=tensors, groups=groups)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ProtocolError(
                f"the coordinator's description of the model is not one: {error!r:.200}; "
                "run the same version of stagemesh on all hosts"
            ) from error

    def _tensor(self, entry: weights_pb2.TensorEntry) -> TensorInfo:
        if (
            not entry.name
            or entry.num_bytes > _MAX_TENSOR_BYTES
            or len(entry.shape) > _MAX_DIMS
            or max(entry.shape, default=0) > _MAX_TENSOR_BYTES
        ):
            raise ValueError(f"tensor {entry.name!r:.100} of {entry.num_bytes} bytes")
        return TensorInfo(
            name=entry.name,
            source_name=entry.source_name,
            file=self._where,
            offset=0,
            num_bytes=entry.num_bytes,
            shape=tuple(entry.shape),
            encoding=entry.encoding,
            stored=_stored(entry.stored_json),
        )

    def _groups(
        self, tensors: dict[str, TensorInfo], embedding: TensorInfo, *, num_layers: int
    ) -> TensorGroups:
        by_place: dict[int, list[TensorInfo]] = {}
        layers: dict[int, list[TensorInfo]] = {}
        for entry in self._entries:
            if entry.place == _PLACES.TENSOR_PLACE_LAYER:
                layers.setdefault(entry.layer, []).append(tensors[entry.name])
            else:
                by_place.setdefault(entry.place, []).append(tensors[entry.name])
        if sorted(layers) != list(range(num_layers)):
            raise ValueError(f"tensors of {len(layers)} layers, not {num_layers}")
        unused = by_place.get(_PLACES.TENSOR_PLACE_UNUSED_HEAD)
        return TensorGroups(
            embedding=embedding,
            first=tuple(by_place.get(_PLACES.TENSOR_PLACE_FIRST, ())),
            layers=tuple(tuple(layers[index]) for index in range(num_layers)),
            last=tuple(by_place.get(_PLACES.TENSOR_PLACE_LAST, ())),
            head=tuple(by_place.get(_PLACES.TENSOR_PLACE_HEAD, ())),
            unused_head=unused[0] if unused else None,
        )


def _stored(text: str) -> StoredForm:
    if not text:
        return AS_IT_IS
    fields = json.loads(text)
    order = fields.pop("row_order")
    return StoredForm(**fields, row_order=None if order is None else RowOrder(**order))


def relocated(spec: ModelSpec, place: Callable[[TensorInfo], TensorInfo]) -> ModelSpec:
    """The same model with its tensors elsewhere.

    Args:
        spec: a model.
        place: from a tensor as the model has it to the same one elsewhere.
    """
    moved = {name: place(info) for name, info in spec.tensors.items()}

    def of(infos: tuple[TensorInfo, ...]) -> tuple[TensorInfo, ...]:
        return tuple(moved[info.name] for info in infos)

    groups = spec.groups
    changed: dict[str, Any] = {
        "embedding": moved[groups.embedding.name],
        "first": of(groups.first),
        "layers": tuple(of(layer) for layer in groups.layers),
        "last": of(groups.last),
        "head": of(groups.head),
        "unused_head": None if groups.unused_head is None else moved[groups.unused_head.name],
    }
    return dataclasses.replace(spec, tensors=moved, groups=dataclasses.replace(groups, **changed))
