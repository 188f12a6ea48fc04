"""Column- and row-parallel layers against the layers that they are cut from."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import ConfigError
from stagemesh.parallel.tensor.linear import (
    ColParallelLinear,
    ColumnParallelLinear,
    RowParallelLinear,
    SharedInput,
)
from stagemesh.parallel.tensor.plan import LayerRule, parallelize
from tests.parallel.tensor.support import (
    FP32_TOLERANCE,
    Attention,
    CountedGroup,
    Mlp,
    built,
    relative_error,
    seeded,
    train,
    trained_on_ranks,
    worst_error,
)
from tests.support.ranks import BACKENDS, run_ranks


def linear(weight: list[list[float]], bias: list[float] | None = None) -> nn.Linear:
    layer = nn.Linear(len(weight[0]), len(weight), bias=bias is not None)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weight))
        if bias is not None:
            layer.bias.copy_(torch.tensor(bias))
    return layer


def test_the_bias_of_a_row_parallel_layer_counts_once() -> None:
    whole = linear([[1.0] * 4] * 2, [10.0, 20.0])
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])

    def run(group: ProcessGroup) -> Any:
        layer = RowParallelLinear.from_linear(
            copy.deepcopy(whole), process_group=group, input_is_split=False
        )
        y = layer(x)
        y.sum().backward()
        return y.tolist(), layer.bias.grad.tolist()

    assert run_ranks(2, run) == [([20.0, 30.0], [1.0, 1.0])] * 2


def test_the_input_gradient_of_a_column_parallel_layer_is_summed_once() -> None:
    whole = linear([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [2.0, 0.0]])

    def run(group: ProcessGroup) -> Any:
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        ColumnParallelLinear.from_linear(whole, process_group=group)(x).sum().backward()
        return x.grad.tolist()

    assert run_ranks(2, run) == [[4.0, 2.0]] * 2


def test_the_input_gradient_of_a_row_parallel_layer_is_the_ranks_own() -> None:
    whole = linear([[1.0, 2.0, 3.0, 4.0]])

    def run(group: ProcessGroup) -> Any:
        x = torch.ones(2, requires_grad=True)
        RowParallelLinear.from_linear(whole, process_group=group)(x).sum().backward()
        return x.grad.tolist()

    assert run_ranks(2, run) == [[1.0, 2.0], [3.0, 4.0]]


LAYERS = [
    ("colwise_gather_output", (4, 4)),
    ("colwise_gather_output", (5, 3)),
    ("rowwise_split_input", (3, 3)),
    ("rowwise_split_input", (1, 5)),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("style", "sizes"), LAYERS)
@pytest.mark.parametrize("bias", [True, False])
def test_one_layer_with_whole_input_and_output(
    style: Any, sizes: tuple[int, ...], bias: bool, backend: str
) -> None:
    whole = built(lambda: nn.Sequential(nn.Linear(6, 8, bias=bias)))
    x, weight = seeded(2, 3, 6), seeded(2, 3, 8, seed=1)
    inner = x.clone().requires_grad_()
    y = whole(inner)
    y.backward(weight)
    expected = {name: p.grad for name, p in whole.named_parameters()}

    def run(group: ProcessGroup) -> None:
        own = copy.deepcopy(whole)
        own.zero_grad()
        parallelize(own, {"0": LayerRule(style=style, sizes=sizes)}, process_group=group)
        mine = x.clone().requires_grad_()
        output = own(mine)
        output.backward(weight)
        assert relative_error(output.detach(), y.detach()) < FP32_TOLERANCE
        assert relative_error(mine.grad, inner.grad) < FP32_TOLERANCE
        for name, p in own.named_parameters():
            full = expected[name]
            if (shard := getattr(p, "tensor_shard", None)) is not None:
                full = torch.split(full, sizes, shard.dim)[group.rank]
            assert relative_error(p.grad, full) < FP32_TOLERANCE

    run_ranks(2, run, backend=backend)


def mse(model: nn.Module, step: int) -> torch.Tensor:
    x = seeded(2, 5, 12, seed=100 + step).to(next(model.parameters()).dtype)
    return (model(x) - x.roll(1, -1)).square().mean()


def cut_mlp(sizes: tuple[int, ...] | None) -> Any:
    plan = {
        "up": LayerRule(style="colwise", sizes=sizes),
        "down": LayerRule(style="rowwise", sizes=sizes),
    }
    return lambda model, group: parallelize(model, plan, process_group=group)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", [(8, 8), (11, 5), (4, 10, 2)])
def test_an_mlp_trains_as_in_one_piece(sizes: tuple[int, ...], backend: str) -> None:
    model = built(lambda: Mlp(12, 16))
    whole = copy.deepcopy(model)
    options = {"num_steps": 20, "lr": 0.3, "momentum": 0.9}
    expected = train(whole, mse, **options)
    assert expected[-1] < 0.9 * expected[0]
    results = trained_on_ranks(
        model, cut_mlp(sizes), mse, world_size=len(sizes), backend=backend, **options
    )
    for losses, weights in results:
        assert losses == pytest.approx(expected, rel=FP32_TOLERANCE)
        assert worst_error(weights, whole.state_dict()) < FP32_TOLERANCE


def test_an_mlp_in_bf16_stays_close() -> None:
    model = built(lambda: Mlp(12, 16)).to(torch.bfloat16)
    whole = copy.deepcopy(model)
    train(whole, mse, num_steps=5, lr=0.3)
    for _, weights in trained_on_ranks(
        model, cut_mlp((11, 5)), mse, world_size=2, num_steps=5, lr=0.3
    ):
        # bf16 keeps 8 bits, and each sum of partial results rounds once more.
        assert worst_error(weights, whole.state_dict()) < 1e-2


def test_partial_results_in_bf16_are_added_in_fp32() -> None:
    """256 + 1 + 1 + 1 is 256 when each sum is rounded to bf16, and 260 when only the last is."""
    whole = linear([[256.0, 1.0, 1.0, 1.0]]).to(torch.bfloat16)

    def run(group: ProcessGroup) -> float:
        layer = RowParallelLinear.from_linear(whole, process_group=group)
        return layer(torch.ones(1, dtype=torch.bfloat16)).item()

    assert run_ranks(4, run) == [260.0] * 4


def cut_attention(shared_input: str | None) -> Any:
    sizes = (4, 8)
    plan = {
        name: LayerRule(style="colwise", sizes=sizes, shared_input=shared_input) for name in "qkv"
    } | {"o": LayerRule(style="rowwise", sizes=sizes)}
    return lambda model, group: parallelize(model, plan, process_group=group)


@pytest.mark.parametrize("shared_input", [None, "qkv"])
def test_attention_with_uneven_heads_trains_as_in_one_piece(shared_input: str | None) -> None:
    model = built(lambda: Attention(12, 4))
    whole = copy.deepcopy(model)
    options = {"num_steps": 20, "lr": 0.3, "momentum": 0.9}
    expected = train(whole, mse, **options)
    assert expected[-1] < 0.95 * expected[0]
    for losses, weights in trained_on_ranks(
        model, cut_attention(shared_input), mse, world_size=2, **options
    ):
        assert losses == pytest.approx(expected, rel=FP32_TOLERANCE)
        # The gradient of k's bias is zero but for rounding, and so is what became of it.
        weights.pop("k.bias")
        wanted = {name: value for name, value in whole.state_dict().items() if name != "k.bias"}
        assert worst_error(weights, wanted) < FP32_TOLERANCE


@pytest.mark.parametrize(("shared_input", "num_reduced"), [(None, 3), ("qkv", 1)])
def test_layers_that_share_an_input_reduce_its_gradient_once(
    shared_input: str | None, num_reduced: int
) -> None:
    model = built(lambda: Attention(12, 4))
    x = seeded(1, 3, 12)
    inner = x.clone().requires_grad_()
    model(inner).square().sum().backward()

    def run(group: ProcessGroup) -> Any:
        counted: Any = CountedGroup(group)
        own = cut_attention(shared_input)(copy.deepcopy(model), counted)
        mine = x.clone().requires_grad_()
        loss = own(mine).square().sum()
        counted.calls.clear()
        loss.backward()
        assert relative_error(mine.grad, inner.grad) < FP32_TOLERANCE
        return counted.calls

    assert run_ranks(2, run) == [["all_reduce"] * num_reduced] * 2


def shared_pair(group: ProcessGroup) -> tuple[nn.Linear, nn.Linear, Any, Any]:
    first, second = (built(lambda: nn.Linear(4, 6), seed=seed) for seed in (1, 2))
    cut = [
        ColumnParallelLinear.from_linear(layer, process_group=group, gather_output=True)
        for layer in (first, second)
    ]
    SharedInput(cut)
    return first, second, *cut


def test_a_shared_input_is_known_by_what_it_is_not_by_its_place() -> None:
    def run(group: ProcessGroup) -> None:
        first, second, a, b = shared_pair(group)
        x, other = seeded(2, 4).requires_grad_(), seeded(2, 4, seed=7).requires_grad_()
        a(x)
        torch.testing.assert_close(b(other), second(other))
        torch.testing.assert_close(a(other), first(other))
        torch.testing.assert_close(b(other), second(other))
        # The same tensor with other values, and the same input for other weights.
        y = x * 1
        a(y)
        y.mul_(2)
        torch.testing.assert_close(b(y), second(x * 2))
        a(x)
        with torch.no_grad():
            b.weight.zero_()
            b.bias.zero_()
        assert not b(x).any()

    run_ranks(2, run)


def test_a_shared_input_keeps_nothing_when_all_have_taken_theirs() -> None:
    def run(group: ProcessGroup) -> None:
        _, _, a, b = shared_pair(group)
        x = seeded(2, 4).requires_grad_()
        a(x), b(x)
        assert a.shared_input._input is None
        assert a.shared_input._waiting == {}

    run_ranks(2, run)


def test_an_output_that_is_not_used_and_frozen_parameters() -> None:
    def run(group: ProcessGroup) -> None:
        _, second, a, b = shared_pair(group)
        b.weight.requires_grad_(False)
        x = seeded(2, 4).requires_grad_()
        a(x)
        b(x).sum().backward()
        torch.testing.assert_close(x.grad, second.weight.sum(0).expand(2, 4))
        assert (a.weight.grad, b.weight.grad) == (None, None)
        assert b.bias.grad.tolist() == [2.0] * 3

    run_ranks(2, run)


class _Log(TorchDispatchMode):
    """Notes the order of matrix products, and of the begin and end of an all-reduce."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self.size, self.rank = group.size, group.rank
        self.events: list[str] = []
        self._group = group

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.events.append("mm")
        return func(*args, **(kwargs or {}))

    def all_reduce(self, tensor: torch.Tensor, *, async_op: bool) -> Any:
        self.events.append("begin")
        self._work = self._group.all_reduce(tensor, async_op=async_op)
        return self

    def wait(self) -> None:
        self._work.wait()
        self.events.append("end")


def test_the_weight_gradient_is_computed_while_the_input_gradient_travels() -> None:
    def run(group: ProcessGroup) -> list[str]:
        log: Any = _Log(group)
        layer = ColumnParallelLinear.from_linear(built(lambda: nn.Linear(4, 6)), process_group=log)
        loss = layer(seeded(2, 4).requires_grad_()).square().sum()
        with log:
            loss.backward()
        return log.events

    assert run_ranks(2, run) == [["mm", "begin", "mm", "end"]] * 2


def test_an_input_without_gradient_needs_no_all_reduce() -> None:
    def run(group: ProcessGroup) -> list[str]:
        counted: Any = CountedGroup(group)
        layer = ColumnParallelLinear.from_linear(
            built(lambda: nn.Linear(4, 6)), process_group=counted
        )
        layer(seeded(2, 4)).sum().backward()
        assert layer.weight.grad is not None
        return counted.calls

    assert run_ranks(2, run) == [[], []]


class _ReducedTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.group.all_reduce(grad.clone()), None


@pytest.mark.parametrize("wrong", ["twice", "never"])
def test_a_wrong_input_gradient_is_noticed(wrong: str) -> None:
    """Negative control of the comparisons above."""
    whole = built(lambda: nn.Linear(4, 6))
    x = seeded(2, 4)
    inner = x.clone().requires_grad_()
    whole(inner).square().sum().backward()

    def run(group: ProcessGroup) -> torch.Tensor:
        layer = ColumnParallelLinear.from_linear(whole, process_group=group)
        mine = x.clone().requires_grad_()
        if wrong == "twice":
            output = layer(_ReducedTwice.apply(mine, group))
        else:
            output = nn.functional.linear(mine, layer.weight, layer.bias)
        output.square().sum().backward()
        return mine.grad

    for grad in run_ranks(2, run):
        assert relative_error(grad, inner.grad) > 0.1


def test_with_equal_seeds_the_ranks_draw_what_one_process_draws() -> None:
    torch.manual_seed(3)
    whole = [nn.Linear(6, 8), nn.Linear(8, 6)]

    def run(group: ProcessGroup) -> None:
        for rank in range(group.size):
            # Ranks that are threads have one random state among them: one draws at a time.
            if rank == group.rank:
                torch.manual_seed(3)
                up = ColParallelLinear(6, 8, process_group=group, sizes=(3, 5))
                down = RowParallelLinear(8, 6, process_group=group)
            group.barrier()
        assert up.weight.equal(whole[0].weight.split((3, 5))[group.rank])
        assert up.bias.equal(whole[0].bias.split((3, 5))[group.rank])
        assert down.weight.equal(whole[1].weight.split(4, 1)[group.rank])
        assert down.bias.equal(whole[1].bias)

    run_ranks(2, run)


def test_what_does_not_fit_is_named() -> None:
    def run(group: ProcessGroup) -> None:
        options: Any = {"process_group": group, "device": "meta"}
        with pytest.raises(ConfigError, match=r"out_features of 7 .* 2 ranks"):
            ColumnParallelLinear(4, 7, **options)
        with pytest.raises(ConfigError, match=r"in_features of 7 .* 2 ranks"):
            RowParallelLinear(7, 4, **options)
        with pytest.raises(ConfigError, match=r"out_features .* sum 7.*\[3, 3\]"):
            ColumnParallelLinear(4, 7, sizes=(3, 3), **options)
        layer = RowParallelLinear(6, 4, **options)
        with pytest.raises(ConfigError, match=r"6 features; rank \d expects 3 of 6"):
            layer(torch.ones(6, device="meta"))
        with pytest.raises(ConfigError, match=r"\[4, 5\]"):
            SharedInput([ColumnParallelLinear(size, 4, **options) for size in (4, 5)])

    run_ranks(2, run)


def test_a_group_of_one_is_the_layer_itself_without_copies() -> None:
    whole = built(lambda: Mlp(12, 16))
    expected = whole(seeded(2, 12))
    pointer = whole.up.weight.data_ptr()

    def run(group: ProcessGroup) -> None:
        counted: Any = CountedGroup(group)
        own = parallelize(whole, {"up": "colwise", "down": "rowwise"}, process_group=counted)
        assert isinstance(own.up, ColumnParallelLinear)
        assert own.up.weight.data_ptr() == pointer
        assert own(seeded(2, 12)).equal(expected)
        assert counted.calls == []

    run_ranks(1, run)
