"""Element-wise reduction of the ranks' tensors: which (dtype, op) pairs exist, and their bits.

Each rank reduces the same parts in rank order, so all ranks get the same bits. Types of 16 bits or
fewer accumulate in float32 (complex32 in complex64) and are rounded once, at the end.
Each element depends on its parts only, not on its place: chunks of any size give the same bits.

    dtype       sum, product     avg          min, max
    float*      yes              yes          yes, NaN wins
    complex*    yes              yes          no (no order)
    int, uint   yes, wraps       no           yes
    bool        or, and          no           and, or

float8_e8m0fnu and float4_e2m1fn_x2 have no arithmetic and are refused.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from types import MappingProxyType

import torch

from stagemesh.comm.raw import own_copy
from stagemesh.errors import ConfigError
from stagemesh.rpc.codec import dtype_name


class ReduceOp(enum.Enum):
    """How elements of different ranks become one."""

    SUM = "sum"
    AVG = "avg"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


_Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_COMBINE: Mapping[ReduceOp, _Combine] = MappingProxyType(
    {
        ReduceOp.SUM: torch.add,
        ReduceOp.AVG: torch.add,
        ReduceOp.MIN: torch.minimum,
        ReduceOp.MAX: torch.maximum,
        ReduceOp.PRODUCT: torch.mul,
    }
)

_COMBINE_BOOL: Mapping[ReduceOp, _Combine] = MappingProxyType(
    {
        ReduceOp.SUM: torch.logical_or,
        ReduceOp.MAX: torch.logical_or,
        ReduceOp.MIN: torch.logical_and,
        ReduceOp.PRODUCT: torch.logical_and,
    }
)

_ACCUMULATE_IN: Mapping[torch.dtype, torch.dtype] = MappingProxyType(
    {
        torch.float16: torch.float32,
        torch.bfloat16: torch.float32,
        torch.float8_e4m3fn: torch.float32,
        torch.float8_e4m3fnuz: torch.float32,
        torch.float8_e5m2: torch.float32,
        torch.float8_e5m2fnuz: torch.float32,
    }
)

# torch lacks arithmetic for these: it is done on the signed type of the same width.
_SIGNED: Mapping[torch.dtype, torch.dtype] = MappingProxyType(
    {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
)

_NO_ARITHMETIC = frozenset({torch.float8_e8m0fnu, torch.float4_e2m1fn_x2})


def check_reducible(dtype: torch.dtype, op: ReduceOp) -> None:
    """Refuse a pair that has no meaning.

    Raises:
        ConfigError: naming dtype and op.
    """
    if dtype in _NO_ARITHMETIC:
        raise ConfigError(f"{dtype_name(dtype)} has no arithmetic; convert it before reducing")
    is_fraction = dtype.is_floating_point or dtype.is_complex
    if op is ReduceOp.AVG and not is_fraction:
        raise ConfigError(
            f"avg of {dtype_name(dtype)} would lose fractions; use sum, or convert to a float"
        )
    if op in (ReduceOp.MIN, ReduceOp.MAX) and dtype.is_complex:
        raise ConfigError(f"{op.value} of {dtype_name(dtype)}: complex numbers have no order")


def reduce_in_order(parts: Sequence[torch.Tensor], *, op: ReduceOp) -> torch.Tensor:
    """The reduction of `parts`, first to last.

    Shapes:
        parts: each of one shape and dtype, one per rank in rank order.
        result: that shape and dtype, memory of its own.

    Raises:
        ConfigError: the dtype does not support the op.
    """
    dtype = parts[0].dtype
    check_reducible(dtype, op)
    if len(parts) == 1:
        return own_copy(parts[0], keep_device=True)
    if dtype == torch.bool:
        return reduce(_COMBINE_BOOL[op], parts)
    if dtype in _SIGNED:
        return _reduce_unsigned(parts, op)
    if dtype.is_complex:
        return _reduce_complex(parts, op)
    wide = _ACCUMULATE_IN.get(dtype)
    if wide is None:
        total = reduce(_COMBINE[op], parts)
        return total / len(parts) if op is ReduceOp.AVG else total
    total = reduce(_COMBINE[op], [part.to(wide) for part in parts])
    if op is ReduceOp.AVG:
        total = total / len(parts)
    return total.to(dtype)


def _reduce_complex(parts: Sequence[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """As operations on real numbers, whose bits do not depend on an element's place.

    torch's own complex product rounds otherwise at the end of a tensor than in its middle.
    """
    dtype = parts[0].dtype
    # Not part.to(): torch warns whenever it allocates complex32.
    pairs = [torch.view_as_real(part) for part in parts]
    wide = torch.float32 if dtype == torch.complex32 else pairs[0].dtype
    combine = _multiply_pairs if op is ReduceOp.PRODUCT else torch.add
    total = reduce(combine, [pair.to(wide) for pair in pairs])
    if op is ReduceOp.AVG:
        total = total / len(parts)
    return torch.view_as_complex(total.to(pairs[0].dtype))


def _multiply_pairs(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The complex product. Shapes: [..., 2] with real and imaginary parts."""
    a, b = left.unbind(-1)
    c, d = right.unbind(-1)
    return torch.stack([a * c - b * d, a * d + b * c], dim=-1)


def _reduce_unsigned(parts: Sequence[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    dtype = parts[0].dtype
    signed = _SIGNED[dtype]
    if op in (ReduceOp.SUM, ReduceOp.PRODUCT):
        # Two's complement: the low bits of sum and product are the same with and without sign.
        return reduce(_COMBINE[op], [part.view(signed) for part in parts]).view(dtype)
    # Flipping the top bit turns the unsigned order into the signed one.
    flip = torch.iinfo(signed).min
    ordered = [part.view(signed).bitwise_xor(flip) for part in parts]
    return reduce(_COMBINE[op], ordered).bitwise_xor(flip).view(dtype)
