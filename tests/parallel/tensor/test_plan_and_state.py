"""Swapping layers by name, and whole weights to and from the ranks' parts."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import CheckpointError, ConfigError
from stagemesh.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from stagemesh.parallel.tensor.plan import LayerRule, matching_names, parallelize
from stagemesh.parallel.tensor.state import (
    TensorShard,
    gather_full_state_dict,
    gather_tensor,
    load_full_state_dict,
    tensor_shard_of,
)
from tests.parallel.tensor.support import CountedGroup, Mlp, built, seeded
from tests.support.ranks import BACKENDS, run_ranks


class Small(nn.Module):
    """An embedding and a head with one table, and blocks between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.blocks = nn.ModuleList([Mlp(6, 8) for _ in range(2)])
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))


PLAN: dict[str, Any] = {
    "embed": LayerRule(style="embedding_vocab", sizes=(7, 3)),
    "blocks.*.up": LayerRule(style="colwise", sizes=(3, 5)),
    "blocks.*.down": LayerRule(style="rowwise", sizes=(3, 5)),
    "head": LayerRule(style="colwise_gather_output", sizes=(7, 3)),
}


def cut(model: nn.Module, group: Any, plan: Any = None) -> Any:
    return parallelize(copy.deepcopy(model), plan or PLAN, process_group=group)


def test_names() -> None:
    model = Small()
    assert matching_names(model, "blocks.*.up") == ["blocks.0.up", "blocks.1.up"]
    assert matching_names(model, "blocks.*") == ["blocks.0", "blocks.1"]
    assert matching_names(model, "*") == ["", "embed", "blocks", "norm", "head"]
    assert matching_names(model, "block.") == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_whole_weights_come_back_as_they_went(backend: str) -> None:
    model = built(Small)
    expected = model.state_dict()
    other = {name: value + 1 for name, value in expected.items()}

    def run(group: ProcessGroup) -> None:
        own = cut(model, group)
        full = gather_full_state_dict(own, process_group=group)
        assert list(full) == list(expected)
        assert all(full[name].equal(expected[name]) for name in expected)
        assert own.head.weight is own.embed.weight
        load_full_state_dict(own, other, process_group=group)
        assert own.blocks[0].down.weight.equal(
            other["blocks.0.down.weight"].split((3, 5), 1)[group.rank]
        )
        only = gather_full_state_dict(own, process_group=group, dst=1)
        assert list(only) == (list(expected) if group.rank == 1 else [])
        assert all(only[name].equal(other[name]) for name in only)

    run_ranks(2, run, backend=backend)


def test_a_whole_bias_is_cut_by_rows_and_kept_by_columns() -> None:
    weight, bias = seeded(6, 4), seeded(6)

    def run(group: ProcessGroup) -> None:
        for kind, shapes in (
            (RowParallelLinear, [(6, 2), (6,)]),
            (ColumnParallelLinear, [(3, 4), (3,)]),
        ):
            layer = kind(4, 6, process_group=group)
            load_full_state_dict(layer, {"weight": weight, "bias": bias}, process_group=group)
            assert [tuple(p.shape) for p in layer.parameters()] == shapes
            full = gather_full_state_dict(layer, process_group=group)
            assert full["weight"].equal(weight)
            assert full["bias"].equal(bias)

    run_ranks(2, run)


def test_a_tied_parameter_travels_once_and_loads_by_either_name() -> None:
    model = built(Small)

    def run(group: ProcessGroup) -> None:
        counted: Any = CountedGroup(group)
        own = cut(model, counted)
        counted.calls.clear()
        state = gather_full_state_dict(own, process_group=counted)
        # The table, and weight and bias of up and weight of down of two blocks.
        assert len(counted.calls) == 1 + 2 * 3
        del state["head.weight"]
        state["embed.weight"] = state["embed.weight"] + 1
        load_full_state_dict(own, state, process_group=group)
        assert own.head.weight.equal(state["embed.weight"].split((7, 3))[group.rank])

    run_ranks(2, run)


def test_weights_move_to_another_number_of_ranks() -> None:
    model = built(Small).eval()
    ids = torch.tensor([[0, 9, 4], [7, 6, 3]]).flatten()
    saved = run_ranks(
        2, lambda group: gather_full_state_dict(cut(model, group), process_group=group)
    )

    def run(group: ProcessGroup) -> torch.Tensor:
        plan = {
            "embed": LayerRule(style="embedding_vocab", sizes=(4, 4, 2)),
            "head": LayerRule(style="colwise_gather_output", sizes=(4, 4, 2)),
        }
        own = cut(built(Small, seed=5).eval(), group, plan)
        load_full_state_dict(own, saved[0], process_group=group)
        return own(ids).detach()

    for logits in run_ranks(3, run):
        torch.testing.assert_close(logits, model(ids).detach())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"norm.weight": None}, r"missing \['norm.weight'\]"),
        ({"extra": torch.ones(1)}, r"unknown \['extra'\]"),
        ({"blocks.0.up.weight": torch.ones(3, 6)}, r"blocks.0.up.weight.*\[3, 6\].*\[8, 6\]"),
    ],
)
def test_a_state_dict_that_does_not_fit_changes_nothing(change: Any, words: str) -> None:
    model = built(Small)
    state = {
        name: value + 1
        for name, value in (model.state_dict() | change).items()
        if value is not None
    }

    def run(group: ProcessGroup) -> None:
        own = cut(model, group)
        with pytest.raises(CheckpointError, match=words):
            load_full_state_dict(own, state, process_group=group)
        full = gather_full_state_dict(own, process_group=group)
        assert all(full[name].equal(value) for name, value in model.state_dict().items())

    run_ranks(2, run)


def test_parameters_say_how_they_are_cut() -> None:
    def run(group: ProcessGroup) -> None:
        own = cut(built(Small), group)
        shard = tensor_shard_of(own.blocks[1].down.weight)
        assert shard == TensorShard(dim=1, sizes=(3, 5), full_shape=(6, 8))
        assert [shard.shape_on(rank) for rank in (0, 1)] == [(6, 3), (6, 5)]
        assert tensor_shard_of(own.blocks[1].down.bias) is None
        # As for a parameter, so for what an optimizer keeps of it.
        moment = torch.full(shard.shape_on(group.rank), float(group.rank))
        whole = gather_tensor(moment, shard=shard, process_group=group)
        assert whole.equal(torch.tensor([0.0] * 3 + [1.0] * 5).expand(6, 8))

    run_ranks(2, run)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"blocks.*.gate": "colwise"}, r"'blocks.\*.gate' matches no layer"),
        ({"blocks.*.up": "colwise", "blocks.0.*": "colwise"}, "both .* match layer blocks.0.up"),
        ({"norm": "colwise"}, "layer norm: style colwise is for a Linear, not a BatchNorm1d"),
        ({"head": "embedding_vocab"}, "is for a Embedding, not a Linear"),
        ({"blocks.0.up": LayerRule(style="colwise", sizes=(3, 3))}, r"blocks.0.up.*8.*\[3, 3\]"),
        ({"embed": "embedding_vocab"}, "head.weight is tied"),
        (
            {"embed": LayerRule(style="embedding_vocab", sizes=(7, 3)), "head": "colwise"},
            "tied to a layer that is cut in another way",
        ),
        (
            {"blocks.0.down": LayerRule(style="rowwise", shared_input="x")},
            "only column-parallel layers",
        ),
    ],
)
def test_a_plan_that_does_not_fit_changes_nothing(plan: Any, words: str) -> None:
    def run(group: ProcessGroup) -> None:
        own = built(Small)
        before = dict(own.named_modules())
        with pytest.raises(ConfigError, match=words):
            parallelize(own, plan, process_group=group)
        assert dict(own.named_modules()) == before

    run_ranks(2, run)


def test_an_unknown_style_is_refused() -> None:
    style: Any = "diagonal"
    with pytest.raises(ConfigError, match=r"colwise.*'diagonal'"):
        LayerRule(style=style)


def test_ranks_with_other_values_are_refused() -> None:
    def run(group: ProcessGroup) -> None:
        own = built(Small)
        with torch.no_grad():
            own.blocks[1].up.bias[2] += float(group.rank == 2) * 1e-6
        with pytest.raises(ConfigError, match=r"blocks.1.up.bias .* ranks \[2\]"):
            parallelize(own, {"blocks.*.up": "colwise_gather_output"}, process_group=group)

    run_ranks(4, run)


def test_frozen_layers_stay_frozen_and_modes_stay() -> None:
    def run(group: ProcessGroup) -> None:
        model = built(Small).requires_grad_(False).eval()
        own = cut(model, group)
        assert not any(p.requires_grad for p in own.parameters())
        assert not any(module.training for module in own.modules())

    run_ranks(2, run)
