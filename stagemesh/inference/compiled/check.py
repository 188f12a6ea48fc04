"""Is compiled code what the family's code computes? Asked of each layer before it takes over."""

import torch

from stagemesh.errors import UnsupportedModel
from stagemesh.inference.attention import SegmentSpan, StepContext
from stagemesh.inference.compiled.code import CompiledForward, Filler, Packages
from stagemesh.inference.compiled.noted import MANY_TOKENS, Unit
from stagemesh.inference.kv_cache import KVCache, KVLayout

# Length of the difference as part of the output's: other orders of the same sums give less.
_FP32_LIMIT = 1e-4
_16_BIT_LIMIT = 3e-2

_COUNTS = (1, 3, 8, MANY_TOKENS)
"""Tokens that each form is tried with."""


@torch.inference_mode()
def checked_forward(
    unit: Unit, packages: Packages, *, filler: Filler, layout: KVLayout, first_layer: int
) -> CompiledForward:
    """The compiled forward of a layer or head, compared with its eager one on random activations.

    Args:
        unit: eager.
        packages: the code of its kind.
        filler: of the stage.
        layout: of the stage's caches.
        first_layer: of the stage.

    Raises:
        UnsupportedModel: they differ by more than rounding, or the layer returns more than an
            activation.
    """
    trial = _Trial(unit, layout=layout, first_layer=first_layer)
    forward = CompiledForward(
        unit.module, call=unit.kind.call, packages=packages, layer=unit.layer, filler=filler
    )
    for count in _COUNTS:
        expected = trial.run(unit.module.forward, count)
        if isinstance(expected, tuple):
            if any(rest is not None for rest in expected[1:]):
                raise UnsupportedModel("the layer returns more than an activation")
            forward.in_tuple = True
        _compare(_first(trial.run(forward, count)), _first(expected), count=count)
    return forward


class _Trial:
    """Calls of one layer outside of any step."""

    def __init__(self, unit: Unit, *, layout: KVLayout, first_layer: int) -> None:
        self._call = unit.kind.call
        self._tensors = self._call.tensors_of(*unit.sample)
        self._rule = self._call.rule_of(*unit.sample)
        self._cache = KVCache(layout, limit_bytes=2**62)
        self._first_layer = first_layer
        self._needs_step = unit.layer is not None

    def run(self, forward: object, count: int) -> object:
        """Call `forward` with `count` tokens, the same ones each time."""
        self._cache.clear()
        session = self._cache.reserve(0, start_position=0, num_tokens=count)
        step = StepContext([SegmentSpan(session, 0, count, 0)], first_layer=self._first_layer)
        generator = torch.Generator().manual_seed(count)
        tensors = []
        for argument, tensor in zip(self._call.tensors, self._tensors, strict=True):
            axis = argument.token_axis
            part = tensor if axis is None else tensor.narrow(axis, 0, count)
            if argument is self._call.activation:
                noise = torch.randn(part.shape, generator=generator)
                part = noise.to(dtype=part.dtype, device=part.device)
            tensors.append(part.contiguous())
        args, kwargs = self._call.arguments(
            tensors, rule=self._rule, step=step if self._needs_step else None
        )
        assert callable(forward)
        return forward(*args, **kwargs)


def _first(output: object) -> torch.Tensor:
    first = output[0] if isinstance(output, tuple) else output
    assert isinstance(first, torch.Tensor)
    return first


def _compare(got: torch.Tensor, expected: torch.Tensor, *, count: int) -> None:
    limit = _FP32_LIMIT if expected.dtype == torch.float32 else _16_BIT_LIMIT
    if got.shape != expected.shape:
        raise UnsupportedModel(
            f"compiled code gives the shape {list(got.shape)} instead of {list(expected.shape)}"
        )
    error = float((got.float() - expected.float()).norm() / expected.float().norm().clamp(1e-6))
    # Not `error > limit`: what is not a number shall not pass.
    if not error <= limit:
        raise UnsupportedModel(
            f"compiled code differs from the family's by {error:.2g} of the activation's length at "
            f"{count} tokens; rounding explains {limit:.2g}"
        )
