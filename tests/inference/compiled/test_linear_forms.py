"""The forms of a matrix product against torch's own."""

import pytest
import torch
from torch import nn

from stagemesh.inference.compiled.huge_pages import use_huge_pages
from stagemesh.inference.compiled.linear_forms import (
    MANY,
    ROW_COUNTS,
    form_of,
    forms_for,
    use_form,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", [*ROW_COUNTS, MANY])
@pytest.mark.parametrize("bias", [True, False])
def test_a_form_multiplies(dtype: torch.dtype, form: int, *, bias: bool) -> None:
    torch.manual_seed(form)
    linear = nn.Linear(48, 20, bias=bias, dtype=dtype).requires_grad_(requires_grad=False)
    x = torch.randn(1, form or 33, 48, dtype=dtype)
    expected = linear(x)
    module = nn.Sequential(nn.Linear(48, 20, bias=bias, dtype=dtype))
    module[0] = linear
    formed = use_form(module, form, device=CPU)
    assert type(formed[0]) is not nn.Linear
    assert [n for n, _ in formed.named_parameters()] == ["0.weight", "0.bias"][: 1 + bias]
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(formed(x), expected, rtol=tolerance, atol=tolerance)


def test_each_number_of_tokens_has_a_form_that_takes_it() -> None:
    for count in range(1, 40):
        form = form_of(count, forms_for(CPU, torch.float32))
        assert form == MANY or form >= count
        assert (form == MANY) == (count > ROW_COUNTS[-1])
    low = forms_for(CPU, torch.bfloat16)
    assert [form_of(n, low) for n in (1, 2, 8)] == [1, MANY, MANY]
    assert forms_for(torch.device("cuda"), torch.float32) == low


def test_moving_weights_changes_none() -> None:
    module = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 3))
    before = [p.detach().clone() for p in module.parameters()]
    places = [p.data_ptr() for p in module.parameters()]
    use_huge_pages(module)
    for old, new in zip(before, module.parameters(), strict=True):
        assert torch.equal(old, new)
    assert all(a != p.data_ptr() for a, p in zip(places, module.parameters(), strict=True))
