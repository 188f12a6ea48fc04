"""The two halves of a backward: equal to the whole, and no more work than it."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from stagemesh.parallel.pipeline.backward import backward_inputs
from stagemesh.parallel.pipeline.payload import payload_of
from stagemesh.parallel.pipeline.stage import PipelineStage


class FlopCount(TorchDispatchMode):
    """Counts; unlike torch's own counter it hooks no module, which a split backward cannot have."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.total += count(*args, **(kwargs or {}), out_val=out)
        return out


class Attention(nn.Module):
    """A block with branches, norms, a residual and a fused kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8, bias=False)
        self.gate = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 2, 12).transpose(1, 2).chunk(3, -1)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(x.shape)) * self.gate


class UsedTwice(nn.Module):
    """One weight at several places of the line, directly and through a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8) * 1.5)
        self.once = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x * self.scale)
        return self.linear(torch.tanh(self.once(h))) * self.scale


class BesideTheLine(nn.Module):
    """An output that does not depend on the input, and a weight that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.free = nn.Parameter(torch.randn(2, 3, 8))
        self.unused = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x), (self.free * 2).tanh()


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 3, 3, padding=1)
        self.emb = nn.Embedding(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x) + self.emb(torch.tensor([1, 3, 1]))


MODULES = {
    "mlp": lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)),
    "attention": lambda: nn.Sequential(Attention(), Attention()),
    "used twice": UsedTwice,
    "beside": BesideTheLine,
    "convolution": Convolution,
    "frozen": lambda: nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)),
    "no weights": lambda: nn.Tanh(),
}


def make(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODULES[name]()


def run_stage(name: str, *, halves: bool, checkpoint: bool = False):
    stage = PipelineStage(make(name), index=0, checkpoint_activations=checkpoint)
    generator = torch.Generator().manual_seed(5)
    counter = FlopCount()
    input_gradients = []
    with counter:
        for microbatch in range(2):
            x = torch.randn(2, 3, 8, generator=generator).requires_grad_()
            outputs = stage.forward(microbatch, payload_of((x,)))
        for microbatch in range(2):
            gradients = [torch.randn(o.shape, generator=generator) for o in outputs]
            if halves:
                made = stage.backward_input(microbatch, gradients)
                before = {n: p.grad is None for n, p in stage.module.named_parameters()}
                assert microbatch or all(before.values())
            else:
                made = stage.backward(microbatch, gradients)
            input_gradients += made.tensors
        if halves:
            for microbatch in range(2):
                stage.backward_weight(microbatch)
    assert stage.num_in_flight == 0
    weights = {name: p.grad for name, p in stage.module.named_parameters()}
    return input_gradients, weights, counter.total


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_halves_give_the_gradients_of_the_whole(name: str, checkpoint: bool) -> None:
    inputs, weights, _ = run_stage(name, halves=False)
    half_inputs, half_weights, _ = run_stage(name, halves=True, checkpoint=checkpoint)
    for mine, right in zip(half_inputs, inputs, strict=True):
        assert torch.equal(mine, right)
    assert weights.keys() == half_weights.keys()
    for key, right in weights.items():
        assert (half_weights[key] is None) == (right is None), key
        if right is not None:
            torch.testing.assert_close(half_weights[key], right)


@pytest.mark.parametrize("name", [name for name in MODULES if name != "used twice"])
def test_halves_do_the_products_of_the_whole_and_no_more(name: str) -> None:
    whole, halves = run_stage(name, halves=False)[2], run_stage(name, halves=True)[2]
    assert halves == whole
    assert whole > 0 or name == "no weights"


def test_checkpointing_computes_the_forward_twice_and_not_three_times() -> None:
    module = make("mlp")
    calls = []
    module.register_forward_hook(lambda *_: calls.append(1))
    stage = PipelineStage(module, index=0, checkpoint_activations=True)
    x = torch.randn(2, 8, requires_grad=True)
    (output,) = stage.forward(0, payload_of((x,)))
    stage.backward_input(0, [torch.ones_like(output)])
    stage.backward_weight(0)
    assert len(calls) == 2


def test_a_weight_half_that_starts_at_the_outputs_repeats_work() -> None:
    # The negative control of the count above: the plain way to split a backward.
    module = make("mlp")
    x = torch.randn(6, 8, requires_grad=True)
    whole, plain = FlopCount(), FlopCount()
    y = module(x)
    with whole:
        y.backward(torch.ones_like(y), retain_graph=True)
    with plain:
        torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
        y.backward(torch.ones_like(y), inputs=list(module.parameters()))
    assert plain.total > whole.total


def test_dropout_is_the_same_when_it_is_computed_anew() -> None:
    def gradients(checkpoint: bool):
        torch.manual_seed(11)
        module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
        stage = PipelineStage(module, index=0, checkpoint_activations=checkpoint)
        x = torch.ones(16, 8, requires_grad=True)
        outputs = [stage.forward(i, payload_of((x,)))[0] for i in range(2)]
        made = [stage.backward(i, [torch.ones_like(outputs[i])]).tensors[0] for i in range(2)]
        return [*outputs, *made, module[0].weight.grad]

    for mine, right in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(mine, right)


def test_an_input_that_an_output_does_not_need_has_no_gradient() -> None:
    x, y = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
    output = x * 2
    found, half = backward_inputs([output], gradients=[torch.ones_like(output)], inputs=[x, y])
    half.run()
    assert torch.equal(found[0], torch.full((2, 3), 2.0))
    assert found[1] is None
