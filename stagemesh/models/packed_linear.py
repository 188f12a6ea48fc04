"""Linear layers whose weights lie in memory as oneDNN's kernels read them.

A stage multiplies the same weights with few rows for as long as it lives, so the one-time cost of
packing pays from the first tokens on. Measured on a 2-core AVX-512 CPU with 1536 x 576 weights
(`python -m benchmarks.packed_linear` repeats it): one row 1.2 to 2 times faster than
`torch.nn.functional.linear`, eight rows 1.7 to 2.6 times, in fp32 and in bf16.

With AVX-512, oneDNN's loop over one to three rows waits for its own sums and takes longer than the
one over four. So these are multiplied more than once where the weights are large enough to pay the
copy: by itself one row of 5632 x 2048 took 3.1 to 3.6 ms on that CPU, where four took 2.4 to 3.
"""

import functools
import logging

import torch
from torch import nn

from stagemesh.models.half_linear import HalfLinear, can_be_half

logger = logging.getLogger(__name__)

# The block layout depends on the row count that packing is told. Eight suits decode steps of one
# stream and of many; told one row, oneDNN picks a layout that is slow for all other counts.
_ROWS_HINT = 8

# How often so few rows are repeated, to be at least four, with weights of so many elements.
_REPEATS = {1: 4, 2: 2, 3: 2}
_REPEAT_ELEMENTS = 10**6


class PackedLinear(nn.Module):
    """y = x @ W.T + b with W [out, in] packed for oneDNN.

    Takes over the weight of `linear`, which must not be used afterwards.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight_bytes = linear.weight.numel() * linear.weight.element_size()
        self._repeats = _repeats(linear.weight)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS_HINT)
        bias: torch.Tensor | None = linear.bias
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply.

        Shapes:
            x: [..., in]; returns [..., out].
        """
        num_rows = x.numel() // self.in_features
        repeats = self._repeats.get(num_rows)
        if repeats is None:
            return self._multiply(x)
        rows = x.reshape(num_rows, self.in_features)
        out = self._multiply(torch.cat((rows,) * repeats))[:num_rows]
        return out.reshape(*x.shape[:-1], self.out_features)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self.bias, "none", [], ""
        )
        return out


def _repeats(weight: torch.Tensor) -> dict[int, int]:
    has_wide_loops = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return _REPEATS if has_wide_loops and weight.numel() >= _REPEAT_ELEMENTS else {}


@functools.cache
def packable_dtypes() -> tuple[torch.dtype, ...]:
    """Dtypes that oneDNN has kernels of on this processor: without AVX-512 not bfloat16."""
    has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return (torch.float32, torch.bfloat16) if has_bfloat16 else (torch.float32,)


def can_pack(device: torch.device) -> bool:
    """Whether this build of torch has the kernels for `device`."""
    return (
        device.type == "cpu"
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def pack_linears(module: nn.Module) -> int:
    """Replace each plain `nn.Linear` below `module` by a packed one; return how many.

    Those in 16 bits that oneDNN has no kernels for on this processor become a `HalfLinear` where
    they can. Subclasses of `nn.Linear` keep their own forward. Each weight is freed as soon as it
    is packed, so the peak is one weight above the resting size.
    """
    count = 0
    dtypes = packable_dtypes()
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear:
                continue
            if child.weight.dtype in dtypes:
                setattr(parent, name, PackedLinear(child))
                count += 1
            elif can_be_half(child.weight):
                setattr(parent, name, HalfLinear(child))
                count += 1
    logger.debug("linears packed", extra={"num_linears": count})
    return count
