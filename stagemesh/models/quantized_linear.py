"""Linear layers and the token table with weights in 8 or 4 bits; see `low_bit_values`.

Activations come and go in the run dtype. Inside, few rows are multiplied in bfloat16, whatever the
run dtype is; see `low_bit_kernels`.
"""

import torch
from torch import nn

from stagemesh.models.low_bit_kernels import LowBitKernels


class Int8Linear(nn.Module):
    """y = x @ W.T + b with W in 8 bits and a scale for each output.

    Args:
        values: int8 [out, in].
        scales: bfloat16 [out].
        bias: [out], or None.
        kernels: of the device that the weights are on.
        shares_weights: whether the token table has the same memory and counts it.
    """

    def __init__(
        self,
        values: torch.Tensor,
        scales: torch.Tensor,
        bias: nn.Parameter | None,
        *,
        kernels: LowBitKernels,
        shares_weights: bool = False,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = values.shape
        # Not persistent: checkpoints have no such tensors.
        self.register_buffer("values", values, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.register_parameter("bias", bias)
        self.weight_bytes = 0 if shares_weights else values.nbytes + scales.nbytes
        self._kernels = kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply.

        Shapes:
            x: [..., in]; returns [..., out] in the dtype of x.
        """
        values: torch.Tensor = self.values  # type: ignore[assignment]
        scales: torch.Tensor = self.scales  # type: ignore[assignment]
        out = self._kernels.matmul_int8(x.flatten(0, -2), values, scales)
        return _with_bias(out.view(*x.shape[:-1], self.out_features), self._parameters["bias"])


class Int4Linear(nn.Module):
    """y = x @ W.T + b with W in 4 bits, and a scale and a zero for each group of 32 inputs.

    Args:
        packed: of `LowBitKernels.pack_int4`.
        scales_zeros: bfloat16 [in / 32, out, 2].
        bias: [out], or None.
        kernels: of the device that the weights are on.
    """

    def __init__(
        self,
        packed: torch.Tensor,
        scales_zeros: torch.Tensor,
        bias: nn.Parameter | None,
        *,
        kernels: LowBitKernels,
    ) -> None:
        super().__init__()
        self.out_features = scales_zeros.shape[1]
        self.in_features = 2 * packed.nbytes // self.out_features
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("scales_zeros", scales_zeros, persistent=False)
        self.register_parameter("bias", bias)
        self.weight_bytes = packed.nbytes + scales_zeros.nbytes
        self._kernels = kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply.

        Shapes:
            x: [..., in]; returns [..., out] in the dtype of x.
        """
        packed: torch.Tensor = self.packed  # type: ignore[assignment]
        scales_zeros: torch.Tensor = self.scales_zeros  # type: ignore[assignment]
        out = self._kernels.matmul_int4(x.flatten(0, -2), packed, scales_zeros)
        return _with_bias(out.view(*x.shape[:-1], self.out_features), self._parameters["bias"])


class Int8Embedding(nn.Module):
    """Rows of a token table in 8 bits, of which only those asked for become floats.

    Args:
        values: int8 [words, width].
        scales: bfloat16 [words].
        dtype: run dtype.
        factor: what the family multiplies its embeddings by.
    """

    def __init__(
        self,
        values: torch.Tensor,
        scales: torch.Tensor,
        *,
        dtype: torch.dtype,
        factor: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = values.shape
        self.padding_idx: int | None = None
        # Named as in nn.Embedding, whose shape others ask for.
        self.register_buffer("weight", values, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.register_buffer("factor", factor, persistent=False)
        self.weight_bytes = values.nbytes + scales.nbytes
        self._dtype = dtype

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up.

        Shapes:
            ids: [..., T]; returns [..., T, width] in the run dtype.
        """
        values: torch.Tensor = self.weight  # type: ignore[assignment]
        scales: torch.Tensor = self.scales  # type: ignore[assignment]
        rows = (values[ids].float() * scales[ids].float()[..., None]).to(self._dtype)
        factor: torch.Tensor | None = self.factor  # type: ignore[assignment]
        return rows if factor is None else rows * factor.to(self._dtype)


LOW_BIT_MODULES = (Int8Linear, Int4Linear, Int8Embedding)
"""Modules that hold weights outside of parameters, and count them in `weight_bytes`."""


def _with_bias(out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return out if bias is None else out + bias
