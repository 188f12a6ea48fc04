"""Low-bit values and kernels against gguf-py's dequantisation and matmuls in float64."""

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch

from stagemesh.models.low_bit_kernels import LowBitKernels
from stagemesh.models.low_bit_values import (
    groups_of_blocks,
    quantize_groups,
    quantize_rows,
    weight_of_groups,
    weight_of_rows,
)
from stagemesh.models.quantized_linear import Int4Linear, Int8Embedding, Int8Linear

CPU = torch.device("cpu")
BLOCKS = ("Q4_0", "Q4_1")


def random_weight(rows: int, columns: int, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * 0.1


def blocks_of(weight: torch.Tensor, encoding: str) -> tuple[torch.Tensor, np.ndarray]:
    """Blocks of gguf-py, and what gguf-py makes of them."""
    kind = gguf.GGMLQuantizationType[encoding]
    raw = gguf.quants.quantize(weight.numpy(), kind)
    return torch.from_numpy(raw), gguf.quants.dequantize(raw, kind)


def in_bfloat16_scales(raw: torch.Tensor, encoding: str) -> torch.Tensor:
    """The same blocks with numbers that both float16 and bfloat16 have."""
    size = {"Q4_0": 18, "Q4_1": 20}[encoding]
    header = size - 16
    split = raw.clone().view(raw.shape[0], -1, size)
    numbers = split[..., :header].contiguous().view(torch.float16)
    # A power of two at least as large: the minimum plus 8 scales stays exact, too.
    exact = torch.exp2(numbers.float().abs().log2().ceil()).copysign(numbers.float())
    split[..., :header] = exact.half().view(torch.uint8).view(*split.shape[:2], header)
    return split.view(raw.shape)


@pytest.mark.parametrize("encoding", BLOCKS)
def test_blocks_keep_their_integers_and_nearly_their_scales(encoding: str) -> None:
    raw, expected = blocks_of(random_weight(24, 96), encoding)
    got = weight_of_groups(*groups_of_blocks(raw, encoding)).numpy()
    # 2^-9 of the scale times at most 8, and of the zero.
    largest = np.abs(expected).reshape(24, 3, 32).max(-1).repeat(32, axis=-1).reshape(24, 96)
    assert (np.abs(got - expected) <= 2**-7 * largest).all()
    # Negative control: scales of the neighbouring group would be far off.
    values, scales_zeros = groups_of_blocks(raw, encoding)
    wrong = weight_of_groups(values, scales_zeros.roll(1, dims=0)).numpy()
    assert not (np.abs(wrong - expected) <= 2**-7 * largest).all()


@pytest.mark.parametrize("encoding", BLOCKS)
def test_blocks_are_exact_where_their_scales_are(encoding: str) -> None:
    raw = in_bfloat16_scales(blocks_of(random_weight(16, 64), encoding)[0], encoding)
    expected = gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType[encoding])
    got = weight_of_groups(*groups_of_blocks(raw, encoding)).numpy()
    np.testing.assert_array_equal(got, expected)


def test_what_is_quantised_is_within_half_a_step() -> None:
    weight = random_weight(48, 96)
    weight[3] = 0.0
    weight[5, 32:64] = 0.25
    values, scales = quantize_rows(weight)
    error = (weight_of_rows(values, scales) - weight).abs()
    assert (error <= scales.float()[:, None] * 0.501).all()
    assert values.abs().max() <= 127
    # The scale is the least bfloat16 that reaches the row's largest weight.
    assert (scales.float() <= weight.abs().amax(1) / 127 * (1 + 2**-7) + (weight == 0).all(1)).all()
    values, scales_zeros = quantize_groups(weight)
    error = (weight_of_groups(values, scales_zeros) - weight).abs().view(48, 3, 32)
    step = scales_zeros[..., 0].float().T[..., None]
    zero = scales_zeros[..., 1].float().T[..., None].abs()
    # Half a step, and where the rounded zero is above the least weight, what it is rounded by.
    assert (error <= step * 0.501 + zero * 2**-8).all()


@pytest.mark.parametrize("rows", [1, 3, 8, 9, 40])
@pytest.mark.parametrize("shape", [(192, 64), (80, 96), (64, 32)])
def test_products_are_those_of_the_same_weights(shape: tuple[int, int], rows: int) -> None:
    """The kernel for few rows in bfloat16, and unpacked tiles in float32."""
    weight = random_weight(*shape)
    x = random_weight(rows, shape[1], seed=1)
    few = replace(LowBitKernels.of(CPU), int8_rows=99, int4_rows=99)
    many = replace(few, int8_rows=0, int4_rows=0, wide=torch.float32)
    values, scales = quantize_rows(weight)
    groups, scales_zeros = quantize_groups(weight)
    for kernels, limit in ((few, 2e-2), (many, 1e-6)):
        packed = kernels.pack_int4(groups)
        products = [
            (kernels.matmul_int8(x, values, scales), weight_of_rows(values, scales)),
            (
                kernels.matmul_int4(x, packed, scales_zeros),
                weight_of_groups(groups, scales_zeros),
            ),
        ]
        for got, same_weight in products:
            expected = x.double() @ same_weight.double().T
            # Rows of a matrix that is no whole number of blocks go through the kernel always.
            is_kernel = got is products[1][0] and shape[0] % 64
            allowed = 2e-2 if is_kernel else limit
            assert (got - expected).abs().max() <= allowed * expected.abs().max()
        wrong = few.matmul_int4(x, packed, scales_zeros.roll(1, dims=1))
        assert (wrong - expected).abs().max() > 2e-2 * expected.abs().max()


@pytest.mark.parametrize("shape", [(7, 50), (64, 78), (1, 33)])
def test_rows_of_any_length_are_multiplied_in_8_bits(shape: tuple[int, int]) -> None:
    """torch's kernel would read behind a row that is no whole number of vectors."""
    weight, x = random_weight(*shape), random_weight(2, shape[1], seed=1)
    values, scales = quantize_rows(weight)
    got = LowBitKernels.of(CPU).matmul_int8(x, values, scales)
    expected = x @ weight_of_rows(values, scales).T
    assert (got - expected).abs().max() <= 2e-2 * expected.abs().max()


def test_a_matrix_packed_in_parts_is_the_same() -> None:
    kernels = LowBitKernels.of(CPU)
    groups, scales_zeros = quantize_groups(random_weight(208, 64))
    whole = kernels.pack_int4(groups)
    parts = [kernels.pack_int4(groups[start : start + 64]) for start in range(0, 208, 64)]
    assert torch.equal(torch.cat(parts), whole)
    assert kernels.half_block > 0, "no way to unpack this processor's layout is known"
    unpacked = kernels.unpack_int4(whole[:192], scales_zeros[:, :192])
    expected = weight_of_groups(groups, scales_zeros)[:192]
    torch.testing.assert_close(unpacked.T.float(), expected, rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layers_take_and_give_the_run_dtype(dtype: torch.dtype) -> None:
    kernels = LowBitKernels.of(CPU)
    weight, bias = random_weight(64, 32), torch.nn.Parameter(random_weight(1, 64)[0].to(dtype))
    groups, scales_zeros = quantize_groups(weight)
    layers = [
        Int8Linear(*quantize_rows(weight), bias, kernels=kernels),
        Int4Linear(kernels.pack_int4(groups), scales_zeros, bias, kernels=kernels),
    ]
    x = random_weight(10, 32, seed=2).view(2, 5, 32).to(dtype)
    expected = torch.nn.functional.linear(x.float(), weight, bias.float())
    for layer in layers:
        got = layer(x)
        assert got.dtype == dtype
        assert got.shape == (2, 5, 64)
        assert (got.float() - expected).abs().max() < 0.15 * expected.abs().max()
        # Checkpoints have only the bias.
        assert list(layer.state_dict()) == ["bias"]
    assert [layer.weight_bytes for layer in layers] == [64 * 34, 64 * 16 + 64 * 4]


def test_a_table_gives_the_rows_that_are_asked_for() -> None:
    weight = random_weight(20, 16)
    table = Int8Embedding(*quantize_rows(weight), dtype=torch.float32, factor=torch.tensor(3.0))
    ids = torch.tensor([[3, 19], [0, 3]])
    torch.testing.assert_close(table(ids), 3 * weight[ids], rtol=0, atol=6e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("rows", [1, 8, 200])
def test_products_on_an_accelerator(rows: int) -> None:
    device = torch.device("cuda")
    kernels = LowBitKernels.of(device)
    weight = random_weight(256, 128)
    x = random_weight(rows, 128, seed=1)
    values, scales = quantize_rows(weight)
    groups, scales_zeros = quantize_groups(weight)
    eight = kernels.matmul_int8(x.to(device), values.to(device), scales.to(device))
    four = kernels.matmul_int4(x.to(device), kernels.pack_int4(groups), scales_zeros.to(device))
    for got, same in (
        (eight, weight_of_rows(values, scales)),
        (four, weight_of_groups(groups, scales_zeros)),
    ):
        expected = x @ same.T
        assert (got.cpu() - expected).abs().max() <= 2e-2 * expected.abs().max()
