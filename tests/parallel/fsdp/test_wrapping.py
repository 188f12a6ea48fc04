"""What becomes a unit, what ranks must agree on, and what is refused."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import CollectiveMismatch, ConfigError
from stagemesh.parallel.fsdp.config import FsdpConfig, MixedPrecision, ShardingStrategy
from stagemesh.parallel.fsdp.fsdp import Fsdp
from stagemesh.parallel.fsdp.full_state import full_state_dict
from stagemesh.parallel.fsdp.wrap import plan_units
from tests.parallel.fsdp.training import Block, SmallLm, config, loss_of, make_model, wrap
from tests.support.ranks import run_ranks

LAYERS = [f"layers.{index}" for index in range(4)]
BLOCK_NUMEL = sum(parameter.numel() for parameter in Block().parameters())


def unit_names(policy: Any, min_param_size: int, module: nn.Module | None = None) -> list[str]:
    plans = plan_units(module or SmallLm(), policy=policy, min_param_size=min_param_size)
    return [plan.name for plan in plans]


@pytest.mark.parametrize(
    ("policy", "min_param_size", "expected"),
    [
        (None, 0, ["", *LAYERS]),
        (None, BLOCK_NUMEL, ["", *LAYERS]),
        (None, BLOCK_NUMEL + 1, [""]),
        ((), 0, [""]),
        ((Block,), 0, ["", *LAYERS]),
        (("Block",), 0, ["", *LAYERS]),
        (("layers.2",), 0, ["", "layers.2"]),
        # `down` has 264 elements, what is left of its block 298.
        (("layers.1", "layers.1.down"), 264, ["", "layers.1", "layers.1.down"]),
        (("layers.1", "layers.1.down"), 265, ["", "layers.1"]),
        # Only with those of `down` the block is large enough.
        (("layers.1", "layers.1.down"), 500, ["", "layers.1"]),
    ],
)
def test_units(policy: Any, min_param_size: int, expected: list[str]) -> None:
    assert unit_names(policy, min_param_size) == expected


def test_every_parameter_is_in_one_unit() -> None:
    model = SmallLm()
    plans = plan_units(model, policy=None, min_param_size=0)
    names = [member.names for plan in plans for member in plan.members]
    assert sorted(name for tied in names for name in tied) == sorted(
        name for name, _ in model.named_parameters(remove_duplicate=False)
    )
    assert ("embedding.weight", "head.weight") in names


def test_a_parameter_of_several_units_belongs_to_the_root() -> None:
    model = SmallLm()
    model.layers[2].up.weight = model.layers[0].up.weight
    root, *layers = plan_units(model, policy=None, min_param_size=0)
    shared = ("layers.0.up.weight", "layers.2.up.weight")
    assert shared in [member.names for member in root.members]
    assert all(shared[0] not in member.names for plan in layers for member in plan.members)


def test_lists_within_units_make_no_units() -> None:
    model = nn.Sequential(nn.ModuleList([nn.Sequential(nn.ModuleList([nn.Linear(3, 3)]))]))
    assert unit_names(None, 0, model) == ["", "0.0"]


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (("Blok",), "no module has the name or class 'Blok'"),
        ((nn.LSTM,), "no module has the name or class 'LSTM'"),
        ((nn.ModuleList,), "choose its children"),
    ],
)
def test_a_policy_that_cannot_be_followed(policy: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        unit_names(policy, 0)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: FsdpConfig(min_param_size=-1), "min_param_size must be at least 0, got -1"),
        (lambda: MixedPrecision(param_dtype=torch.int8), "param_dtype must be a floating dtype"),
    ],
)
def test_settings_that_are_refused(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make()


def test_the_defaults() -> None:
    defaults = FsdpConfig()
    assert defaults.sharding_strategy is ShardingStrategy.FULL_SHARD
    assert defaults.min_param_size == 1000
    assert defaults.cpu_offload is False
    assert defaults.mixed_precision is True
    assert defaults.flatten_parameters is True
    assert defaults.precision.param_dtype is torch.bfloat16


def errors_of(make: Callable[[ProcessGroup], nn.Module], **settings: Any) -> list[str]:
    def on_rank(group: ProcessGroup) -> str:
        with pytest.raises(ConfigError) as caught:
            Fsdp(make(group), process_group=group, config=config(**settings))
        return str(caught.value)

    return run_ranks(2, on_rank)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda group: nn.Sequential(*[nn.Linear(4, 4) for _ in range(2 - group.rank)]),
            ["4 parameters", "2 parameters"],
        ),
        (lambda group: nn.Linear(4, 2) if group.rank else nn.Linear(2, 4), ["[4, 2]", "[2, 4]"]),
        (
            lambda group: nn.ParameterDict({"ab"[group.rank]: nn.Parameter(torch.zeros(3))}),
            ["parameter a", "parameter b"],
        ),
    ],
)
def test_ranks_that_differ_are_refused_on_all(make: Any, words: list[str]) -> None:
    for text in errors_of(make):
        assert all(word in text for word in words)


def test_ranks_whose_settings_differ_are_refused_on_all() -> None:
    def on_rank(group: ProcessGroup) -> str:
        with pytest.raises(ConfigError) as caught:
            wrap(group, sharding_strategy=list(ShardingStrategy)[group.rank])
        return str(caught.value)

    for text in run_ranks(2, on_rank):
        assert "FULL_SHARD" in text
        assert "SHARD_GRAD_OP" in text


def test_wrapping_twice_is_refused() -> None:
    def on_rank(group: ProcessGroup) -> str:
        with pytest.raises(ConfigError) as caught:
            Fsdp(nn.Sequential(wrap(group)), process_group=group)
        return str(caught.value)

    assert "already" in run_ranks(1, on_rank)[0]


def test_casting_a_wrapped_module_is_refused() -> None:
    def on_rank(group: ProcessGroup) -> None:
        model = wrap(group)
        for cast in (model.half, model.double, lambda: model.to("meta")):
            with pytest.raises(ConfigError, match="before it is wrapped"):
                cast()

    run_ranks(1, on_rank)


@pytest.mark.parametrize("is_flattened", [True, False])
def test_all_ranks_get_the_values_of_rank_0(is_flattened: bool) -> None:
    def on_rank(group: ProcessGroup) -> dict[str, torch.Tensor]:
        module = make_model(seed=group.rank)
        module.temperature.fill_(1.0 + group.rank)
        settings = config(flatten_parameters=is_flattened)
        return full_state_dict(Fsdp(module, process_group=group, config=settings))

    expected = make_model(seed=0).state_dict() | {"temperature": torch.tensor([1.0])}
    for state in run_ranks(3, on_rank):
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_shards_tell_truly_what_they_are() -> None:
    def on_rank(group: ProcessGroup) -> Any:
        model = wrap(group, flatten_parameters=False)
        for sharded in model.sharded_parameters():
            at = sharded.metadata
            whole = make_model(seed=0).get_parameter(sharded.name)
            assert sharded.full_shape == tuple(whole.shape)
            expected = whole.detach().flatten()[at.offset : at.offset + at.numel]
            assert torch.equal(sharded.local_shard, expected)
            assert (at.owner_rank, at.end - at.start) == (group.rank, at.numel)
        return model.shard_table()

    for table in run_ranks(5, on_rank):
        pieces = table["layers.0.down.bias"]  # 12 elements on 5 ranks
        assert [piece.numel for piece in pieces] == [3, 3, 3, 3, 0]
        assert [piece.offset for piece in pieces] == [0, 3, 6, 9, 12]
        assert [piece.owner_rank for piece in pieces] == [0, 1, 2, 3, 4]
        assert [piece.numel for piece in table["layers.0.scale"]] == [1, 0, 0, 0, 0]


def test_flat_indexes_run_through_the_unit() -> None:
    def on_rank(group: ProcessGroup) -> Any:
        return wrap(group).shard_table()

    table = run_ranks(2, on_rank)[0]
    spans = [
        (piece.start, piece.end)
        for name, pieces in table.items()
        if name.startswith("layers.0.")
        for piece in pieces
        if piece.numel
    ]
    assert spans[0][0] == 0
    assert spans[-1][1] == BLOCK_NUMEL
    assert all(one[1] == other[0] for one, other in itertools.pairwise(spans))


@pytest.mark.parametrize("is_flattened", [True, False])
def test_freed_parameters_cannot_be_read(is_flattened: bool) -> None:
    """Their memory is gone; a read would be a crash."""

    def on_rank(group: ProcessGroup) -> None:
        model = wrap(group, flatten_parameters=is_flattened)
        linear = model.module.layers[0].up
        assert linear.weight.is_meta
        assert linear.weight.shape == (21, 12)
        assert "in_features=12" in repr(model)
        with model.whole_parameters() as wholes:
            assert not linear.weight.is_meta
            assert torch.equal(wholes["layers.0.up.weight"], make_model(0).layers[0].up.weight)

    run_ranks(2, on_rank)


def test_ranks_that_run_different_units_are_told() -> None:
    """The units have equal sizes, so nothing but their numbers tells them apart."""

    class Choice(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
            self.index = index

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.experts[self.index](x)

    def on_rank(group: ProcessGroup) -> None:
        model = Fsdp(Choice(group.rank), process_group=group, config=config(min_param_size=1))
        with pytest.raises(CollectiveMismatch):
            model(torch.ones(1, 8))

    run_ranks(2, on_rank)


def test_a_backward_that_raises_leaves_nothing_behind() -> None:
    def on_rank(group: ProcessGroup) -> float:
        model = wrap(group, flatten_parameters=False)
        tokens = torch.arange(10).view(2, 5)
        logits = model(tokens)
        logits.register_hook(lambda _: None)
        first = model.module.layers[1].register_full_backward_hook(_raise)
        with pytest.raises(ArithmeticError):
            loss_of(model, tokens).backward()
        first.remove()
        model.zero_grad()
        loss_of(model, tokens).backward()
        return sum(float(p.grad.square().sum()) for p in model.parameters())

    model = make_model()
    loss_of(model, torch.arange(10).view(2, 5)).backward()
    expected = sum(float(p.grad.square().sum()) for p in model.parameters())
    assert sum(run_ranks(2, on_rank)) == pytest.approx(expected, rel=1e-5)


def _raise(*_: Any) -> None:
    raise ArithmeticError("asked for")
