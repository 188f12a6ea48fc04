"""Tensors within the arguments and results of modules, however they are nested."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in tuples, lists, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """The value with floating tensors in another dtype; containers of other types stay as is."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if type(value) is dict:
        return {key: cast_floating(item, dtype) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(cast_floating(item, dtype) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast_floating(item, dtype) for item in value))
    return value
