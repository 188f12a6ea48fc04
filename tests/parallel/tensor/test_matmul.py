"""A matrix product over the ranks."""

from typing import Any

import pytest
import torch

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import ConfigError
from stagemesh.parallel.tensor.matmul import TensorParallel
from tests.parallel.tensor.support import FP32_TOLERANCE, relative_error, seeded
from tests.support.ranks import BACKENDS, run_ranks


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_out", [6, 5, 1])
def test_equals_the_whole_product_with_its_gradients(
    num_out: int, world_size: int, backend: str
) -> None:
    a, b, weight = seeded(4, 3), seeded(num_out, 3, seed=1), seeded(4, num_out, seed=2)

    def run(group: ProcessGroup) -> None:
        x, y = a.clone().requires_grad_(), b.clone().requires_grad_()
        product = TensorParallel(group).matmul(x, y)
        product.backward(weight)
        assert relative_error(product.detach(), a @ b.t()) < FP32_TOLERANCE
        assert relative_error(x.grad, weight @ b) < FP32_TOLERANCE
        assert relative_error(y.grad, weight.t() @ a) < FP32_TOLERANCE

    run_ranks(world_size, run, backend=backend)


def test_each_rank_computes_its_columns_only() -> None:
    """Rank 1's b is another one than rank 0's, so that the columns show who computed them."""

    def run(group: ProcessGroup) -> list[list[float]]:
        b = torch.full((5, 2), float(group.rank + 1))
        return TensorParallel(group).matmul(torch.ones(1, 2), b).tolist()

    assert run_ranks(2, run) == [[[2.0, 2.0, 2.0, 4.0, 4.0]]] * 2


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        ((4, 3), (6, 5), r"\[4, 3\].*\[6, 5\].*3 is not 5"),
        ((3,), (6, 3), r"\[3\]"),
        ((2, 4, 3), (6, 3), r"\[2, 4, 3\]"),
        ((4, 3), (1, 6, 3), r"\[1, 6, 3\]"),
    ],
)
def test_what_does_not_fit_is_named(a: Any, b: Any, words: str) -> None:
    def run(group: ProcessGroup) -> None:
        with pytest.raises(ConfigError, match=words):
            TensorParallel(group).matmul(torch.ones(a), torch.ones(b))

    run_ranks(2, run)
