"""What of a stage is compiled: its layers and its head, and which of them are alike."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stagemesh.inference.compiled.layer_call import LayerCall

Tensors = tuple[tuple[str, tuple[int, ...], str], ...]
"""Name, shape and dtype of parameters and buffers."""

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitKind:
    """Modules that run the same code: alike in all but the values of their tensors."""

    layer: int | None
    """Model-wide index of the first such layer; None for the head."""
    call: LayerCall
    tensors: Tensors
    attributes: str
    """Hash of the plain attributes of its modules."""

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "layer": self.layer,
            "call": self.call.to_json(),
            "tensors": [[name, list(shape), dtype] for name, shape, dtype in self.tensors],
            "attributes": self.attributes,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "UnitKind":
        """From what `to_json` gave."""
        return cls(
            layer=data["layer"],
            call=LayerCall.from_json(data["call"]),
            tensors=tuple((name, tuple(shape), dtype) for name, shape, dtype in data["tensors"]),
            attributes=data["attributes"],
        )

    def key(self, environment: dict[str, Any], form: int) -> str:
        """Name of its code in the cache; differs where the code may."""
        own = self.to_json()
        # Layers of one kind have one key wherever the stage begins.
        own["layer"] = None if self.layer is None else "layer"
        text = json.dumps([environment, form, own], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:40]


def tensors_of(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers, in the order in which compiled code takes them."""
    return [*module.named_parameters(), *module.named_buffers()]


def describe(module: nn.Module, *, layer: int | None, call: LayerCall) -> UnitKind:
    """The kind of a layer or of a head."""
    return UnitKind(
        layer=layer,
        call=call,
        tensors=tuple((n, tuple(t.shape), str(t.dtype)) for n, t in tensors_of(module)),
        attributes=hashlib.sha256(json.dumps(list(_attributes(module))).encode()).hexdigest(),
    )


def _attributes(module: nn.Module) -> Iterator[list[Any]]:
    """Plain attributes of all modules, but for the number that a layer's modules have of it."""
    for path, child in module.named_modules():
        yield [path, type(child).__qualname__]
        for name, value in sorted(vars(child).items()):
            if name != "layer_idx" and not name.startswith("_") and isinstance(value, _PLAIN):
                yield [path, name, value]
