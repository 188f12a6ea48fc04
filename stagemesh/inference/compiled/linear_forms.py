"""Matrix products by the number of rows, in forms that torch's compiler makes good loops of.

A product with few rows takes as long as its weights take to be read. Written as sums over rows of
the weights, it is compiled to one loop that reads them once, in order, with a register for each
row's sum, fused with what stands around it; library kernels of matrix products reached half of the
memory's rate on the CPUs measured (docs/compile.md). Many rows are left to the library.

Weights stay as they are in the module, [out, in], and are arguments of the compiled code: so one
compiled layer serves all layers of its kind.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from stagemesh.models.packed_linear import can_pack, packable_dtypes

ROW_COUNTS = (1, 4, 8)
"""Numbers of tokens with code of their own; a step with fewer is filled up to the next."""

MANY = 0
"""In place of a number: code for any number of tokens."""

_BLOCK_ROWS = 4
"""Rows that one loop over the weights serves: more cost it the memory's rate."""

FORMS = (*ROW_COUNTS, MANY)


def forms_for(device: torch.device, dtype: torch.dtype) -> tuple[int, ...]:
    """The forms that are made for a stage, in the order in which they are worth most.

    In 16 bits each weight would be converted once for each row, which costs more than memory does.
    """
    return FORMS if device.type == "cpu" and dtype == torch.float32 else (1, MANY)


def form_of(num_tokens: int, forms: Collection[int]) -> int:
    """Which of these forms runs a step of so many tokens."""
    return min((form for form in forms if form >= num_tokens), default=MANY)


class FewRows(nn.Module):
    """y = x @ W.T + b for few rows, their number known; takes over the parameters of `linear`."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply: [..., in] -> [..., out]."""
        rows = x.reshape(-1, x.shape[-1])
        if rows.shape[0] > 1:
            # Or the loops that make the rows would be repeated inside of the product's.
            rows = torch.ops.stagemesh.hold(rows)
        weight = self.weight.float()[:, None, :]
        # [out, rows, in]: a row of the weights stays in the cache while a block's tokens use it.
        blocks = [
            (weight * block[None]).sum(-1).t() for block in torch.split(rows.float(), _BLOCK_ROWS)
        ]
        out = (blocks[0] if len(blocks) == 1 else torch.cat(blocks)).to(x.dtype)
        if self.bias is not None:
            out = out + self.bias
        return out.reshape(*x.shape[:-1], -1)


class ManyRows(nn.Module):
    """The same for any number of rows, by the library."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply: [..., in] -> [..., out]."""
        out: torch.Tensor = torch.ops.stagemesh.linear(x, self.weight, self.bias)
        return out


def use_form(module: nn.Module, form: int, *, device: torch.device) -> nn.Module:
    """Replace each plain `nn.Linear` in `module` by one of this form; returns the module."""
    if device.type != "cpu":
        return module
    kind = ManyRows if form == MANY else FewRows
    if type(module) is nn.Linear:
        return kind(module)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, kind(child))
    return module


# Kept for as long as the process lives: torch forgets the operator with it.
_LIBRARY: Any = torch.library.Library("stagemesh", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_LIBRARY.define("hold(Tensor x) -> Tensor")


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """oneDNN's product: for many rows a tenth faster than `F.linear` on AMD's CPUs."""
    if weight.dtype in packable_dtypes() and can_pack(weight.device):
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out
    return torch.nn.functional.linear(x, weight, bias)


def _fake_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _hold(x: torch.Tensor) -> torch.Tensor:
    """The same values in memory of their own; the compiler does not look through it."""
    return x.clone(memory_format=torch.contiguous_format)


def _fake_hold(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


_LIBRARY.impl("hold", _hold, "CompositeExplicitAutograd")
torch.library.register_fake("stagemesh::hold", _fake_hold, lib=_LIBRARY)
_LIBRARY.impl("linear", _linear, "CompositeExplicitAutograd")
torch.library.register_fake("stagemesh::linear", _fake_linear, lib=_LIBRARY)
