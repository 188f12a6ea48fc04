"""Weights as small integers and scales: from floats, and from the blocks of GGUF files.

    8 bits, a scale for each row r         w[r, k] = s[r] q[r, k]                  |q| <= 127
    4 bits, for each group g of 32 values  w[r, k] = s[g, r] (q[r, k] - 8) + z[g, r]   0 <= q <= 15

Scales and zeros are bfloat16, as the kernels read them. What is quantised from floats is rounded to
the scale as it is held, so that rounding it adds no error. A GGUF block has its scale d and its
minimum m in float16 and keeps its 4-bit integers as they are: s = d and z = m + 8 d for Q4_1,
s = d and z = 0 for Q4_0. Only the three bits that bfloat16 lacks are lost, at most 2^-9 of each.
"""

import torch

from stagemesh.checkpoint.low_bit import GROUP

_BLOCK_HEADER = {"Q4_0": 1, "Q4_1": 2}
"""float16 numbers before the integers of a block."""

BLOCK_ENCODINGS = frozenset(_BLOCK_HEADER)
"""GGUF types whose integers are kept."""


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """To 8 bits with a scale for each row.

    Shapes:
        weight: [rows, columns] float; returns int8 [rows, columns] and bfloat16 [rows].
    """
    wide = weight.float()
    scales = _rounded_up(wide.abs().amax(dim=1) / 127)
    values = (wide / scales.float()[:, None]).round_().to(torch.int8)
    return values, scales


def quantize_groups(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """To 4 bits with a scale and a zero for each group, from the group's least to its greatest.

    Shapes:
        weight: [rows, columns] float; returns uint8 [rows, columns] and bfloat16
        [columns / 32, rows, 2], scale before zero.
    """
    groups = weight.float().reshape(weight.shape[0], -1, GROUP)
    least, greatest = groups.aminmax(dim=-1)
    scales = _rounded_up((greatest - least) / 15)
    zeros = (least + 8 * scales.float()).to(torch.bfloat16)
    shifted = (groups - zeros.float()[..., None]) / scales.float()[..., None]
    values = (shifted + 8).round_().clamp_(0, 15).to(torch.uint8)
    return values.flatten(1), _by_group(scales, zeros)


def groups_of_blocks(blocks: torch.Tensor, encoding: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The integers of Q4_0 or Q4_1 blocks, with scales and zeros as the kernels want them.

    Args:
        blocks: rows of a matrix as the file has them.
        encoding: "Q4_0" or "Q4_1".

    Shapes:
        blocks: uint8 [rows, bytes]; returns as `quantize_groups`.
    """
    header = 2 * _BLOCK_HEADER[encoding]
    split = blocks.view(blocks.shape[0], -1, header + GROUP // 2)
    numbers = split[..., :header].contiguous().view(torch.float16).float()
    packed = split[..., header:]
    # The low halves of the bytes are the first 16 values, the high halves the other 16.
    values = torch.cat([packed & 15, packed >> 4], dim=-1).flatten(1)
    scales = numbers[..., 0]
    zeros = torch.zeros_like(scales) if encoding == "Q4_0" else numbers[..., 1] + 8 * scales
    return values, _by_group(scales.to(torch.bfloat16), zeros.to(torch.bfloat16))


def weight_of_rows(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Back to float32.

    Shapes:
        values: int8 [rows, columns]; scales: [rows]; returns [rows, columns].
    """
    return values.float() * scales.float()[:, None]


def weight_of_groups(values: torch.Tensor, scales_zeros: torch.Tensor) -> torch.Tensor:
    """Back to float32.

    Shapes:
        values: uint8 [rows, columns]; scales_zeros: [columns / 32, rows, 2];
        returns [rows, columns].
    """
    scales, zeros = scales_zeros.float().permute(1, 0, 2).unbind(-1)
    groups = values.float().view(values.shape[0], -1, GROUP)
    return ((groups - 8) * scales[..., None] + zeros[..., None]).flatten(1)


def _rounded_up(scales: torch.Tensor) -> torch.Tensor:
    """To bfloat16, never to less, so that the largest integer still reaches; 1 in place of 0."""
    rounded = scales.to(torch.bfloat16)
    short = rounded.float() < scales
    rounded = torch.where(short, _next_up(rounded), rounded)
    return torch.where(rounded > 0, rounded, torch.ones_like(rounded))


def _next_up(values: torch.Tensor) -> torch.Tensor:
    """The next larger bfloat16 of positive numbers: their bits count upwards."""
    return (values.view(torch.int16) + 1).view(torch.bfloat16)


def _by_group(scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    return torch.stack([scales, zeros], dim=-1).transpose(0, 1).contiguous()
