"""Attention as one opaque operator, so that all of a layer can be compiled around it.

What attention needs of a step (sessions, caches, rules) is Python, changes with each step, and
shall not become part of compiled code. So the operator takes only tensors and numbers; the step
stands in a context variable while a compiled layer runs.

Shapes as in `stagemesh.inference.attention`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from stagemesh.inference.attention import STEP_ARGUMENT, MaskRule, StepContext, segment_attention


@dataclass(frozen=True, slots=True)
class RunningLayer:
    """The layer that is being run."""

    step: StepContext
    rule: MaskRule | None
    layer_idx: int
    """Model-wide, as the family's attention layers call it."""


_RUNNING: ContextVar[RunningLayer] = ContextVar("stagemesh_running_layer")

# Kept for as long as the process lives: torch forgets the operator with it.
_LIBRARY: Any = torch.library.Library("stagemesh", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "attend(Tensor query, Tensor key, Tensor value, Tensor? sinks, float? scaling, "
    "float? softcap) -> Tensor"
)


@contextmanager
def running(layer: RunningLayer) -> Iterator[None]:
    """Attention inside is that of this layer."""
    token = _RUNNING.set(layer)
    try:
        yield
    finally:
        _RUNNING.reset(token)


def traced_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function for transformers while a layer is traced: the operator.

    The arguments have been checked by the eager steps before, see `segment_attention`.
    """
    out: torch.Tensor = torch.ops.stagemesh.attend(query, key, value, s_aux, scaling, softcap)
    return out, None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    layer = _RUNNING.get()
    module: Any = layer
    rest: dict[str, Any] = {STEP_ARGUMENT: layer.step}
    out, _ = segment_attention(
        module,
        query,
        key,
        value,
        layer.rule,
        scaling=scaling,
        softcap=softcap,
        s_aux=sinks,
        **rest,
    )
    # Rows behind the step's tokens only fill a form up.
    num_filled = query.shape[2] - out.shape[1]
    if num_filled:
        return F.pad(out, (0, 0, 0, 0, 0, num_filled))
    # Compiled code reads the result with the strides that it was promised.
    return out.contiguous()


def _fake_attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


_LIBRARY.impl("attend", _attend, "CompositeExplicitAutograd")
torch.library.register_fake("stagemesh::attend", _fake_attend, lib=_LIBRARY)
