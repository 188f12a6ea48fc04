"""How a family's model calls one of its layers: noted from two calls, told as data.

The compiler works in another process, which has neither the model's weights nor its forward. What
it gets is this: where the tensors stand among a layer's arguments, which of their axes count
tokens, and the plain values beside them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from stagemesh.errors import UnsupportedModel
from stagemesh.inference.attention import STEP_ARGUMENT, MaskRule, StepContext

Path = tuple[str | int, ...]
"""Where an argument stands: "args" or "kwargs", then positions and names."""

_PLAIN = (bool, int, float, str)
DTYPES_BY_NAME = {
    str(dtype): dtype
    for dtype in (
        *(torch.float32, torch.bfloat16, torch.float16),
        *(torch.int64, torch.int32, torch.bool),
    )
}
"""Dtypes that a layer's arguments may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorArgument:
    """A tensor among the arguments."""

    path: Path
    shape: tuple[int | None, ...]
    """Sizes; None for the token axis."""
    dtype: str

    @property
    def token_axis(self) -> int | None:
        """The axis that counts tokens."""
        return self.shape.index(None) if None in self.shape else None

    def zeros(self, num_tokens: int, *, device: torch.device) -> torch.Tensor:
        """One of this kind."""
        sizes = [num_tokens if size is None else size for size in self.shape]
        return torch.zeros(sizes, dtype=DTYPES_BY_NAME[self.dtype], device=device)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCall:
    """A layer's arguments."""

    tensors: tuple[TensorArgument, ...]
    values: tuple[tuple[Path, Any], ...]
    """Arguments that are the same in each step: None, flags, numbers, words."""
    rule: Path | None
    """Where the attention's rule stands."""
    num_args: int
    """Arguments without names."""

    @property
    def activation(self) -> TensorArgument:
        """The first tensor with a token axis: what the layer transforms."""
        return next(t for t in self.tensors if t.token_axis is not None)

    def tensors_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors of a call, in order."""
        return [_at(argument.path, args, kwargs) for argument in self.tensors]

    def rule_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MaskRule | None:
        """The attention's rule in a call."""
        return None if self.rule is None else _at(self.rule, args, kwargs)

    def arguments(
        self,
        tensors: list[torch.Tensor],
        *,
        rule: MaskRule | None = None,
        step: StepContext | None = None,
    ) -> tuple[list[Any], dict[str, Any]]:
        """Put arguments together again."""
        args: dict[Any, Any] = {}
        kwargs: dict[Any, Any] = {} if step is None else {STEP_ARGUMENT: step}
        placed = [(a.path, t) for a, t in zip(self.tensors, tensors, strict=True)]
        for path, value in [*placed, *self.values]:
            _put(args if path[0] == "args" else kwargs, path[1:], value)
        if self.rule is not None:
            _put(args if self.rule[0] == "args" else kwargs, self.rule[1:], rule)
        for name, value in kwargs.items():
            kwargs[name] = _as_tuple(value)
        return [_as_tuple(args[index]) for index in range(self.num_args)], kwargs

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "tensors": [[list(t.path), list(t.shape), t.dtype] for t in self.tensors],
            "values": [[list(path), value] for path, value in self.values],
            "rule": None if self.rule is None else list(self.rule),
            "num_args": self.num_args,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "LayerCall":
        """From what `to_json` gave."""
        return cls(
            tensors=tuple(
                TensorArgument(path=tuple(path), shape=tuple(shape), dtype=dtype)
                for path, shape, dtype in data["tensors"]
            ),
            values=tuple((tuple(path), value) for path, value in data["values"]),
            rule=None if data["rule"] is None else tuple(data["rule"]),
            num_args=data["num_args"],
        )


def note_call(
    few: tuple[tuple[Any, ...], dict[str, Any]], many: tuple[tuple[Any, ...], dict[str, Any]]
) -> LayerCall:
    """Compare two calls of a layer with different numbers of tokens.

    Args:
        few: positional and named arguments of one call.
        many: those of the other.

    Raises:
        UnsupportedModel: an argument is of a kind that cannot be told, or has two token axes.
    """
    tensors: list[TensorArgument] = []
    values: list[tuple[Path, Any]] = []
    rule: Path | None = None
    others = dict(_walk(many))
    for path, value in _walk(few):
        other = others.get(path)
        if isinstance(value, StepContext):
            continue
        if isinstance(value, MaskRule):
            rule = path
        elif isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
            tensors.append(_tensor_argument(path, value, other))
        elif value is None or isinstance(value, _PLAIN):
            values.append((path, value))
        else:
            raise UnsupportedModel(f"layers get a {type(value).__name__} as {_name(path)}")
    if not any(tensor.token_axis is not None for tensor in tensors):
        raise UnsupportedModel("layers get no tensor with a token axis")
    return LayerCall(tensors=tuple(tensors), values=tuple(values), rule=rule, num_args=len(few[0]))


def _tensor_argument(path: Path, few: torch.Tensor, many: torch.Tensor) -> TensorArgument:
    if str(few.dtype) not in DTYPES_BY_NAME:
        raise UnsupportedModel(f"layers get {_name(path)} of {few.dtype}")
    shape = tuple(a if a == b else None for a, b in zip(few.shape, many.shape, strict=True))
    if shape.count(None) > 1:
        raise UnsupportedModel(f"{_name(path)} has two axes that count tokens")
    return TensorArgument(path=path, shape=shape, dtype=str(few.dtype))


def _walk(call: tuple[tuple[Any, ...], dict[str, Any]]) -> Iterator[tuple[Path, Any]]:
    for index, value in enumerate(call[0]):
        yield from _leaves(("args", index), value)
    for name, value in call[1].items():
        yield from _leaves(("kwargs", name), value)


def _leaves(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _leaves((*path, index), inner)
    else:
        yield path, value


def _at(path: Path, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    value: Any = args if path[0] == "args" else kwargs
    for key in path[1:]:
        value = value[key]
    return value


def _put(place: dict[Any, Any], path: Path, value: Any) -> None:
    for key in path[:-1]:
        place = place.setdefault(key, {})
    place[path[-1]] = value


def _as_tuple(value: Any) -> Any:
    """Nested arguments were collected by position."""
    if not isinstance(value, dict):
        return value
    return tuple(_as_tuple(value[index]) for index in range(len(value)))


def _name(path: Path) -> str:
    return f"argument {path[1]}" + "".join(f"[{key}]" for key in path[2:])
