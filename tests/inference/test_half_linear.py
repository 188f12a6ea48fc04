"""Linear layers in 16 bits where the processor computes in 32, against products in float64."""

import pytest
import torch
from torch import nn

from stagemesh.models import half_linear, packed_linear
from stagemesh.models.half_linear import HalfLinear, can_be_half
from stagemesh.models.packed_linear import PackedLinear, pack_linears

pytestmark = pytest.mark.skipif(
    not can_be_half(torch.ones(1, 512, dtype=torch.float16)), reason="this torch has no FBGEMM"
)
LOST_BITS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def random_linear(
    dtype: torch.dtype, *, columns: int = 512, has_bias: bool = True, scale: float = 1.0
) -> nn.Linear:
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(columns, 53, bias=has_bias)
    for parameter in linear.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * scale
    return linear.to(dtype).requires_grad_(requires_grad=False)


@pytest.mark.parametrize("rows", [0, 1, 2, 8, 33])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("columns", [512, 549, 900])
@pytest.mark.parametrize("dtype", LOST_BITS)
def test_the_product_is_rounded_once(
    rows: int,
    has_bias: bool,
    columns: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But for few rows in bfloat16: there the columns behind the last whole block are once more."""
    linear = random_linear(dtype, columns=columns, has_bias=has_bias)
    x = torch.randn(1, rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype)
    exact = x.double() @ linear.weight.double().T
    exact += linear.bias.double() if has_bias else 0.0
    allowed = exact.abs()
    if dtype == torch.bfloat16 and rows <= half_linear._FEW_ROWS:
        allowed = allowed + (x[..., 512:].double() @ linear.weight[:, 512:].double().T).abs()
    whole = HalfLinear(linear)
    monkeypatch.setattr(half_linear, "_PIECE_ELEMENTS", columns * 20)
    in_three_pieces = HalfLinear(linear)
    for half in (whole, in_three_pieces):
        got = half(x)
        assert got.dtype == dtype
        assert got.shape == (1, rows, 53)
        # Half a unit of the last bit, and what float32 rounds off the sums.
        assert ((got.double() - exact).abs() <= LOST_BITS[dtype] * allowed + 1e-4).all()
        assert half.weight_bytes == 53 * columns * 2


def test_rows_do_not_depend_on_each_other() -> None:
    half = HalfLinear(random_linear(torch.bfloat16))
    x = torch.randn(9, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    single = torch.cat([half(x[i : i + 1]) for i in range(9)])
    torch.testing.assert_close(half(x), single, rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "scale", "expected"),
    [
        (torch.bfloat16, 1.0, True),
        (torch.float16, 1.0, True),
        (torch.float32, 1.0, False),
        (torch.bfloat16, 1e5, False),  # beyond float16
        (torch.bfloat16, 1e-4, False),  # all that float16 holds of them are a few bits
    ],
)
def test_what_float16_does_not_hold_well_is_left_alone(
    dtype: torch.dtype, scale: float, expected: bool
) -> None:
    assert can_be_half(random_linear(dtype, scale=scale).weight) is expected
    # Less than a block of columns would be padded to one.
    assert not can_be_half(random_linear(dtype, columns=256, scale=scale).weight)


def test_linears_become_what_the_processor_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without AVX-512 oneDNN refuses to pack bfloat16."""
    monkeypatch.setattr(packed_linear, "packable_dtypes", lambda: (torch.float32,))
    module = nn.Sequential(
        random_linear(torch.bfloat16),
        random_linear(torch.float16),
        random_linear(torch.float32),
        random_linear(torch.bfloat16, scale=1e5),
    )
    assert pack_linears(module) == 3
    assert [type(m) for m in module] == [HalfLinear, HalfLinear, PackedLinear, nn.Linear]
