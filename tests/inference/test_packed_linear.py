"""PackedLinear against torch's own linear."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stagemesh.models.packed_linear import PackedLinear, can_pack, pack_linears, packable_dtypes

pytestmark = pytest.mark.skipif(not can_pack(torch.device("cpu")), reason="no oneDNN in this torch")


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 8, 9, 33])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"]
)
def test_the_same_product(rows: int, has_bias: bool, dtype: torch.dtype, limit: float) -> None:
    if dtype not in packable_dtypes():
        pytest.skip(f"oneDNN has no kernels for {dtype} on this processor")
    generator = torch.Generator().manual_seed(rows)
    linear = nn.Linear(37, 53, bias=has_bias).to(dtype).requires_grad_(requires_grad=False)
    linear.weight.copy_(torch.randn(53, 37, generator=generator))
    if has_bias:
        linear.bias.copy_(torch.randn(53, generator=generator))
    x = torch.randn(1, rows, 37, generator=generator).to(dtype)
    expected = F.linear(x, linear.weight, linear.bias)
    with torch.inference_mode():
        got = PackedLinear(linear)(x)
    assert got.dtype == dtype
    assert got.shape == (1, rows, 53)
    exact = F.linear(
        x.double(), linear.weight.double(), None if linear.bias is None else linear.bias.double()
    )
    scale = max(1.0, float(exact.abs().max())) if rows else 1.0
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=limit * scale)
    torch.testing.assert_close(got, expected, rtol=0, atol=limit * scale)


def test_rows_do_not_depend_on_each_other() -> None:
    linear = nn.Linear(64, 48).requires_grad_(requires_grad=False)
    x = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        packed = PackedLinear(linear)
        whole = packed(x)
        single = torch.cat([packed(x[:, i : i + 1]) for i in range(9)], dim=1)
    torch.testing.assert_close(whole, single, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("has_bias", [False, True])
def test_few_rows_of_large_weights(rows: int, has_bias: bool) -> None:
    """Where the processor has AVX-512, up to three rows are multiplied more than once."""
    torch.manual_seed(rows)
    linear = nn.Linear(1001, 1003, bias=has_bias).requires_grad_(requires_grad=False)
    x = torch.randn(rows, 1, 1001)
    exact = linear.double()(x.double())
    with torch.inference_mode():
        packed = PackedLinear(linear.float())
        got = packed(x)
        together = packed(torch.cat([x, torch.ones(5, 1, 1001)]))[:rows]
    assert got.shape == (rows, 1, 1003)
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=1e-5)
    torch.testing.assert_close(got, together, rtol=0, atol=1e-5)


def test_only_plain_linears_of_known_dtypes_are_packed() -> None:
    class Special(nn.Linear):
        pass

    module = nn.ModuleDict(
        {
            "plain": nn.Linear(4, 4),
            "special": Special(4, 4),
            "wide": nn.Linear(4, 4).double(),
            "inner": nn.Sequential(nn.Linear(4, 4, bias=False)),
        }
    )
    assert pack_linears(module) == 2
    kinds = [type(m) for m in (module["plain"], module["special"], module["wide"])]
    assert kinds == [PackedLinear, Special, nn.Linear]
    assert isinstance(module["inner"][0], PackedLinear)
    assert module["inner"][0].weight_bytes == 64
