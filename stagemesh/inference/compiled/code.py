"""A module's forward by compiled code."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from stagemesh.inference.attention import STEP_ARGUMENT
from stagemesh.inference.compiled.attention_op import RunningLayer, running
from stagemesh.inference.compiled.layer_call import LayerCall
from stagemesh.inference.compiled.linear_forms import MANY, form_of
from stagemesh.inference.compiled.units import tensors_of

_MOST_FILLED = 32


@dataclass(frozen=True, slots=True)
class Packages:
    """The loaded code of one kind."""

    forms: dict[int, Any]

    @classmethod
    def load(cls, paths: dict[int, Path], *, device: torch.device) -> "Packages":
        """Load each form's file.

        Raises:
            RuntimeError: a file is not a package that this process can run.
        """
        index = device.index if device.type == "cuda" else -1
        return cls(
            {
                form: torch._inductor.aoti_load_package(str(path), device_index=index)
                for form, path in paths.items()
            }
        )


class Filler:
    """Fills token axes up with zeros; what all layers of a step are given is filled once."""

    def __init__(self) -> None:
        # With the tensors themselves, since an id may be given away again.
        self._filled: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def fill(self, tensor: torch.Tensor, axis: int, count: int) -> torch.Tensor:
        """`tensor` with `count` tokens on `axis`."""
        key = (id(tensor), count)
        held = self._filled.get(key)
        if held is not None and held[0] is tensor:
            return held[1]
        if len(self._filled) >= _MOST_FILLED:
            self._filled.clear()
        behind = tensor.dim() - 1 - axis
        filled = F.pad(tensor, (0, 0) * behind + (0, count - tensor.shape[axis]))
        self._filled[key] = (tensor, filled)
        return filled


class CompiledForward:
    """Stands for the forward of one layer or head; its weights stay where they are.

    Args:
        module: whose forward it is.
        call: how it is called.
        packages: the code of its kind.
        layer: model-wide index; None for a head.
        filler: of the stage.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        call: LayerCall,
        packages: Packages,
        layer: int | None,
        filler: Filler,
    ) -> None:
        self.in_tuple = False
        """Whether the result is wrapped in a tuple."""
        self._module = module
        self.take_weights()
        self._call = call
        self._forms = packages.forms
        self._layer = layer
        self._filler = filler
        self._axes = [argument.token_axis for argument in call.tensors]
        self._activation = call.tensors.index(call.activation)

    def take_weights(self) -> None:
        """Take the module's tensors anew, for example since they were moved."""
        self._weights = [tensor.detach() for _, tensor in tensors_of(self._module)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's forward."""
        tensors = self._call.tensors_of(args, kwargs)
        activation = tensors[self._activation]
        axis = self._axes[self._activation]
        assert axis is not None
        count = activation.shape[axis]
        form = form_of(count, self._forms)
        is_filled = form not in (MANY, count)
        if is_filled:
            tensors = [
                tensor if at is None else self._filler.fill(tensor, at, form)
                for tensor, at in zip(tensors, self._axes, strict=True)
            ]
        code = self._forms[form]
        if self._layer is None:
            out = code(self._weights, tensors)
        else:
            rule = self._call.rule_of(args, kwargs)
            with running(RunningLayer(kwargs[STEP_ARGUMENT], rule, self._layer)):
                out = code(self._weights, tensors)
        if is_filled:
            out = out.narrow(axis, 0, count)
        return (out,) if self.in_tuple else out
