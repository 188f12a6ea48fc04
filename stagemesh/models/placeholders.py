"""Modules that stand where another stage has the real one."""

from typing import Any

import torch
from torch import nn

from stagemesh.errors import UnsupportedModel


class Passthrough(nn.Module):
    """Returns the activation that it is given.

    Args:
        width: of the activation; needed where it is not the first argument.
        in_tuple: whether the family's layers return a tuple.
    """

    def __init__(self, *, width: int | None = None, in_tuple: bool = False) -> None:
        super().__init__()
        self._width = width
        self._in_tuple = in_tuple

    @classmethod
    def instead_of(cls, layer: nn.Module, *, in_tuple: bool = False) -> "Passthrough":
        """One with the layer's plain attributes, which some forwards read (its kind, say)."""
        made = cls(in_tuple=in_tuple)
        for name, value in vars(layer).items():
            if not hasattr(made, name) and isinstance(value, (bool, int, float, str)):
                setattr(made, name, value)
        return made

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the activation [1, T, D] unchanged."""
        hidden_states = self._activation(args, kwargs)
        return (hidden_states,) if self._in_tuple else hidden_states

    def _activation(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        if self._width is None and args and isinstance(args[0], torch.Tensor):
            return args[0]
        for value in (*args, *kwargs.values()):
            if is_activation(value, width=self._width):
                found: torch.Tensor = value
                return found
        raise UnsupportedModel(
            "a module that another stage has is called without the activation of the stage before"
        )


class NoAddition(nn.Module):
    """Stands where the first stage adds a table's rows to the activation: zeros to add."""

    def __init__(self, *, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._width = width
        # The activation's, or the sum would be of another type.
        self._dtype = dtype

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return zeros [1, 1, D]."""
        given = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
        device = given[0].device if given else None
        return torch.zeros(1, 1, self._width, dtype=self._dtype, device=device)


class OneSide(nn.Module):
    """A module without weights that a family uses before its layers and after them.

    On a stage in the middle the calls of both sides return what they are given.

    Args:
        module: the family's.
        num_before: calls before the layers in each forward.
        num_after: calls after them.
        is_first: whether the stage has the first layer.
        is_last: whether it has the last one.
    """

    def __init__(
        self, module: nn.Module, *, num_before: int, num_after: int, is_first: bool, is_last: bool
    ) -> None:
        super().__init__()
        self._module = module
        self._computes = [is_first] * num_before + [is_last] * num_after
        self._next = 0

    def begin(self, *_: Any, **__: Any) -> None:
        """A forward begins."""
        self._next = 0

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Compute, or pass on."""
        is_computed = self._computes[self._next]
        self._next += 1
        result: torch.Tensor = self._module(hidden_states) if is_computed else hidden_states
        return result


class Elsewhere(nn.Module):
    """Stands where a module of another stage was; using it is a bug or an unsupported family."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        """Raise."""
        raise UnsupportedModel(f"this stage has no {self._name}, but the model's forward uses it")


def is_activation(value: object, *, width: int | None) -> bool:
    """Whether an argument is an activation [1, T, D] of this width."""
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dim() == 3
        and (width is None or value.shape[-1] == width)
    )
