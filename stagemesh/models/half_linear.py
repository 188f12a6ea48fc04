"""Linear layers with weights in 16 bits on processors that compute in 32 only.

Without AVX-512 torch multiplies bfloat16 and float16 at a fraction of the speed of float32, the
more rows the worse. FBGEMM's kernel reads weights in float16, widens them in registers and
multiplies in float32: it reads half the memory for few rows and computes as fast for many, so there
is no number of rows from which on another kernel would pay. Measured on a 2-core AVX2 CPU, one
thread, 1536 x 576 weights (`python -m benchmarks.low_bit_kernels` repeats it): for 1, 8 and 128
rows 1.2, 4 and 8 times faster than torch's bfloat16, and 2.5, 1.9 and 1.1 times faster than packed
float32.

A bfloat16 weight has fewer bits than a float16 one, but a wider range. What is below 2^-14 is
rounded to a multiple of 2^-24; a matrix where that could matter, or that has larger weights than
float16 holds, is left to torch.

FBGEMM lays out blocks of 512 columns, and a part of a block takes the room of a whole one. So the
columns behind the last whole block stay as they are, and a stage holds what its plan counts. Few
rows in bfloat16 are multiplied with them by torch's own kernel, which is quick then; for more the
columns are widened first.
"""

import torch
from torch import nn

_HALF_DTYPES = (torch.bfloat16, torch.float16)
# A weight is off by 2^-25 at most: beside the largest one of this size that is a 2^-16th, far less
# than the 2^-9th that bfloat16 rounds off it.
_LEAST_LARGEST = 2.0**-9
_LARGEST = 65504.0
_ENGINES = ("fbgemm", "x86")
_BLOCK = 512
# Up to here torch's bfloat16 takes less time than to widen the weights and multiply them.
_FEW_ROWS = 4
# Elements that are packed at once: packing wants them in float32, then 128 MiB.
_PIECE_ELEMENTS = 2**25


class HalfLinear(nn.Module):
    """y = x @ W.T + b with W in 16 bits, x and y in the run dtype, sums in float32.

    One exception: what few bfloat16 rows make with the columns behind the blocks is rounded to
    bfloat16 before it is added.

    Takes over the weight of `linear`, which must not be used afterwards.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        weight = linear.weight.detach()
        bias: torch.Tensor | None = linear.bias
        self._num_packed = self.in_features - self.in_features % _BLOCK
        rows = max(1, _PIECE_ELEMENTS // self.in_features)
        self._pieces = [
            torch.ops.quantized.linear_prepack_fp16(
                weight[start : start + rows, : self._num_packed].float(),
                None if bias is None else bias.detach()[start : start + rows].float(),
            )
            for start in range(0, self.out_features, rows)
        ]
        self._rest = weight[:, self._num_packed :].clone()
        self.weight_bytes = 2 * self.out_features * self.in_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply.

        Shapes:
            x: [..., in]; returns [..., out] in the dtype of x.
        """
        if x.numel() == 0:  # which the kernel does not take
            return x.new_empty((*x.shape[:-1], self.out_features))
        wide = x.float()
        packed = wide[..., : self._num_packed]
        outs = [torch.ops.quantized.linear_dynamic_fp16(packed, piece) for piece in self._pieces]
        out: torch.Tensor = outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)
        if self._num_packed < self.in_features:
            out += self._behind_the_blocks(x[..., self._num_packed :])
        return out.to(x.dtype)

    def _behind_the_blocks(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == self._rest.dtype == torch.bfloat16 and x.shape[:-1].numel() <= _FEW_ROWS:
            return nn.functional.linear(x, self._rest)
        return nn.functional.linear(x.float(), self._rest.float())


def can_be_half(weight: torch.Tensor) -> bool:
    """Whether this processor has the kernel, and float16 holds the weight [out, in] well."""
    if weight.dtype not in _HALF_DTYPES or torch.backends.quantized.engine not in _ENGINES:
        return False
    return weight.shape[1] >= _BLOCK and _LEAST_LARGEST <= float(weight.abs().max()) <= _LARGEST
