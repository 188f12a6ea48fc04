"""Tensor-parallel layers under a backward in two halves, as zero-bubble pipelines make it."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.parallel.pipeline.payload import payload_of
from stagemesh.parallel.pipeline.stage import PipelineStage
from stagemesh.parallel.tensor import column_linear
from stagemesh.parallel.tensor.plan import LayerRule, parallelize
from tests.parallel.tensor.support import CountedGroup, built, seeded
from tests.support.ranks import run_ranks

RULES = {
    "0": LayerRule(style="colwise"),
    "2": LayerRule(style="rowwise"),
    "3": LayerRule(style="colwise"),
    "4": LayerRule(style="rowwise"),
}


class _Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


# The first layer reads the stage's input itself, a leaf; the third what others have computed.
WHOLE = built(
    lambda: nn.Sequential(
        nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6), nn.Linear(6, 8, bias=False), nn.Linear(8, 6)
    )
)


def backward(group: ProcessGroup, *, in_halves: bool) -> tuple[dict[str, Any], int, int]:
    """Gradients by name, matrix products, all-reduces."""
    counted: Any = CountedGroup(group)
    module = parallelize(copy.deepcopy(WHOLE), RULES, process_group=counted)
    stage = PipelineStage(module, index=0, checkpoint_activations=False)
    x = seeded(5, 6).requires_grad_()
    (y,) = stage.forward(0, payload_of((x,)))
    counted.calls.clear()
    gradient = [seeded(*y.shape, seed=1)]
    with _Products() as products:
        if in_halves:
            made = stage.backward_input(0, gradient)
            assert all(p.grad is None for p in module.parameters())
            stage.backward_weight(0)
        else:
            made = stage.backward(0, gradient)
    gradients = {name: p.grad for name, p in module.named_parameters()}
    return (
        {**gradients, "input": made.tensors[0]},
        products.count,
        counted.calls.count("all_reduce"),
    )


def test_halves_compute_and_send_what_the_whole_does_and_no_more() -> None:
    def run(group: ProcessGroup) -> None:
        expected, *work = backward(group, in_halves=False)
        found, *work_of_halves = backward(group, in_halves=True)
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        # Four layers, two products each; one sum for each column-parallel layer.
        assert work == work_of_halves == [8, 2]

    run_ranks(2, run)


def test_a_layer_that_does_not_ask_does_it_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: what the forward knows of its gradients is not what a half wants."""
    monkeypatch.setattr(column_linear, "_gradients_asked_for", lambda ctx: ctx.needs_input_grad[1:])

    def run(group: ProcessGroup) -> list[int]:
        return list(backward(group, in_halves=True)[1:])

    for num_products, num_sums in run_ranks(2, run):
        assert num_products > 8
        assert num_sums > 2
