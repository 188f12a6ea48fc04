"""The 4-bit and 8-bit matrix kernels of torch, and when unpacking the weights beats them.

PyTorch's weight-only kernels read the integers as they lie in memory and take bfloat16 activations:
they are made for few rows. For many rows (a prompt) a tile of the weights is turned into floats and
multiplied by the ordinary kernel. Where to change over is a fixed table and no measurement at load:
the two ways round differently, and the same request shall have the same answer each time.
"""

from dataclasses import dataclass

import torch

from stagemesh.checkpoint.low_bit import GROUP

# Rows up to which the low-bit kernel is faster than unpacking to that type, with 1536 x 576 and
# 576 x 1536 weights and 1 and 2 threads (`python -m benchmarks.low_bit_kernels`): on CPUs with
# bfloat16 instructions, and on one with AVX2. With one thread unpacking pays a little earlier than
# this, with two a little later.
_INT8_ROWS = {torch.bfloat16: 8, torch.float32: 32}
_INT4_ROWS = {torch.bfloat16: 128, torch.float32: 64}
_INT8_VECTOR = 32
_TILE_ELEMENTS = 2**18

_HALF_BLOCKS = (32, 16)
"""Half of the rows that a block of the 4-bit layout has, by instruction set: AVX-512, AVX2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowBitKernels:
    """What one device does with low-bit weights."""

    device: torch.device
    """Where the weights are."""
    wide: torch.dtype
    """What tiles are unpacked to."""
    int8_rows: int
    """Up to so many rows go through the 8-bit kernel; 0 where there is none."""
    int4_rows: int
    """Up to so many rows go through the 4-bit kernel."""
    half_block: int
    """Half of the rows of a block of the 4-bit layout; 0 where it cannot be unpacked."""

    @classmethod
    def of(cls, device: torch.device) -> "LowBitKernels":
        """The kernels of a device."""
        if device.type != "cpu":
            # On the meta device there is nothing to compute: a draft has shapes alone.
            has_int8 = device.type != "meta" and torch._C._dispatch_has_kernel_for_dispatch_key(
                "aten::_weight_int8pack_mm", device.type.upper()
            )
            return cls(
                device=device,
                wide=torch.bfloat16,
                int8_rows=_INT8_ROWS[torch.bfloat16] if has_int8 else 0,
                int4_rows=2**31,
                half_block=0,
            )
        # Without its own instructions bfloat16 takes four times as long as float32.
        wide = torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32
        return cls(
            device=device,
            wide=wide,
            int8_rows=_INT8_ROWS[wide],
            int4_rows=_INT4_ROWS[wide],
            half_block=_find_half_block(),
        )

    def pack_int4(self, values: torch.Tensor) -> torch.Tensor:
        """Lay 4-bit integers out as the kernel reads them.

        Args:
            values: any rows on the CPU; parts of a matrix that begin at a multiple of 64 rows may
                be packed one by one and put together.

        Shapes:
            values: uint8 [rows, columns]; returns uint8 [rows, columns / 2] on the CPU, and
            int32 in the layout of its tensor cores on a GPU.
        """
        if self.device.type == "cpu":
            packed: torch.Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
                values.to(torch.int32), 1
            )
            return packed
        pairs = (values[:, ::2] << 4 | values[:, 1::2]).to(self.device)
        columns = values.shape[1]
        inner_tiles = next(tiles for tiles in (8, 4, 2) if columns % (16 * tiles) == 0)
        packed = torch.ops.aten._convert_weight_to_int4pack(pairs, inner_tiles)
        return packed

    def matmul_int8(
        self, x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor
    ) -> torch.Tensor:
        """x @ W.T with W in 8 bits.

        Shapes:
            x: [T, in]; values: int8 [out, in]; scales: bfloat16 [out]; returns [T, out].
        """
        # The kernel reads vectors: of a row that ends within one it would read what is behind it.
        if x.shape[0] <= self.int8_rows and x.shape[1] % _INT8_VECTOR == 0:
            few: torch.Tensor = torch.ops.aten._weight_int8pack_mm(
                x.to(torch.bfloat16), values, scales
            )
            return few.to(x.dtype)
        wide = x.to(self.wide)
        out = x.new_empty((x.shape[0], values.shape[0]))
        step = _tile_rows(values.shape[1])
        for start in range(0, values.shape[0], step):
            tile = values[start : start + step].to(self.wide)
            product = wide @ tile.T
            torch.mul(product, scales[start : start + step], out=out[:, start : start + step])
        return out

    def matmul_int4(
        self, x: torch.Tensor, packed: torch.Tensor, scales_zeros: torch.Tensor
    ) -> torch.Tensor:
        """x @ W.T with W in 4 bits.

        Shapes:
            x: [T, in]; packed: of `pack_int4`; scales_zeros: bfloat16 [in / 32, out, 2];
            returns [T, out].
        """
        if x.shape[0] <= self.int4_rows or not self._can_unpack(scales_zeros.shape[1]):
            few: torch.Tensor = self._int4_kernel(x.to(torch.bfloat16), packed, scales_zeros)
            return few.to(x.dtype)
        wide = x.to(self.wide)
        rows, columns = scales_zeros.shape[1], x.shape[1]
        out = x.new_empty((x.shape[0], rows))
        # Whole blocks of rows.
        step = _tile_rows(columns)
        for start in range(0, rows, step):
            end = min(start + step, rows)
            tile = self.unpack_int4(packed[start:end], scales_zeros[:, start:end])
            out[:, start:end] = wide @ tile
        return out

    def unpack_int4(self, packed: torch.Tensor, scales_zeros: torch.Tensor) -> torch.Tensor:
        """Whole blocks of a packed matrix as floats, transposed.

        Shapes:
            packed: uint8 [rows, columns / 2]; scales_zeros: [columns / 32, rows, 2];
            returns [columns, rows].
        """
        half, (rows, pairs) = self.half_block, packed.shape
        columns, blocks = 2 * pairs, rows // (2 * half)
        # A block is [columns, half]: low halves are its first rows, high halves the others.
        raw = packed.view(blocks, columns, half)
        values = torch.stack([raw & 15, raw >> 4], dim=2).transpose(0, 1)
        groups = values.to(self.wide, memory_format=torch.contiguous_format)
        scales, zeros = scales_zeros.to(self.wide).unbind(-1)
        weight = torch.addcmul(
            (zeros - 8 * scales)[:, None],
            groups.view(columns // GROUP, GROUP, rows),
            scales[:, None],
        )
        return weight.view(columns, rows)

    def _can_unpack(self, rows: int) -> bool:
        return self.half_block > 0 and rows % (2 * self.half_block) == 0

    def _int4_kernel(
        self, x: torch.Tensor, packed: torch.Tensor, scales_zeros: torch.Tensor
    ) -> torch.Tensor:
        operators = torch.ops.aten
        is_cpu = self.device.type == "cpu"
        kernel = operators._weight_int4pack_mm_for_cpu if is_cpu else operators._weight_int4pack_mm
        result: torch.Tensor = kernel(x, packed, GROUP, scales_zeros)
        return result


def _tile_rows(columns: int) -> int:
    """Rows of a tile that stays in the second-level cache while it is made and multiplied."""
    return max(64, _TILE_ELEMENTS // columns // 64 * 64)


def _find_half_block() -> int:
    """How this processor's 4-bit layout is unpacked, found by packing numbers that tell."""
    rows, columns = 64, GROUP
    values = torch.arange(rows * columns).mul_(7).div_(3, rounding_mode="floor").view(rows, columns)
    values = values.remainder_(16).to(torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 1)
    for half in _HALF_BLOCKS:
        raw = packed.view(rows // (2 * half), columns, half).transpose(0, 1)
        unpacked = torch.stack([raw & 15, raw >> 4], dim=2).view(columns, rows)
        if torch.equal(unpacked.to(torch.int32), values.T):
            return half
    return 0
