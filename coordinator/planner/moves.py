"""What must be loaded to get from one plan to another, in bytes and as a list."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import numpy as np

from coordinator.model_cost import ModelCost
from coordinator.planner.plan import PlacementPlan, StagePlan
from coordinator.planner.spans import Floats, Ints
from coordinator.planner.step_times import StepShape
from coordinator.planner.units import Unit, UnitCosts

Part = Literal["layers", "embedding", "head"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Weights that a node must get."""

    node_id: str
    """Who gets them."""
    part: Part
    """What they are."""
    start_layer: int
    """First layer; of an end of the model the layer next to it."""
    end_layer: int
    """One past the last layer."""
    num_bytes: int
    """In the run dtype."""
    sources: tuple[str, ...]
    """Nodes of the running plan that hold them and are still there; without any they come from
    the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a node holds of the model: layers [start, end), and of those a share."""

    start_layer: int
    end_layer: int
    groups: tuple[int, int]
    """KV groups [first, one past the last)."""
    columns: tuple[int, int]
    """MLP columns, likewise."""
    num_ranks: int
    """Of the stage: embedding and head are divided evenly."""
    rank: int


def held_by_node(plan: PlacementPlan) -> dict[str, Held]:
    """What each node of a plan holds."""
    return {
        node_id: held
        for replica in plan.replicas
        for stage in replica.stages
        for node_id, held in zip(stage.node_ids, _held_by_rank(stage), strict=True)
    }


def _held_by_rank(stage: StagePlan) -> list[Held]:
    result: list[Held] = []
    group = column = 0
    for rank, share in enumerate(stage.ranks):
        result.append(
            Held(
                start_layer=stage.start_layer,
                end_layer=stage.end_layer,
                groups=(group, group + share.kv_groups),
                columns=(column, column + share.mlp_columns),
                num_ranks=len(stage.ranks),
                rank=rank,
            )
        )
        group, column = group + share.kv_groups, column + share.mlp_columns
    return result


def list_moves(
    model: ModelCost, *, running: PlacementPlan, target: PlacementPlan, present: frozenset[str]
) -> tuple[Move, ...]:
    """What nodes must load, in the order of the target's stages.

    Args:
        model: the model.
        running: the plan that is loaded.
        target: the plan to get to.
        present: nodes that are still there.
    """
    before = {node: held for node, held in held_by_node(running).items() if node in present}
    moves: list[Move] = []
    for node_id, held in held_by_node(target).items():
        moves += _node_moves(model, node_id, held, before=before)
    return tuple(moves)


def _node_moves(
    model: ModelCost, node_id: str, held: Held, *, before: Mapping[str, Held]
) -> list[Move]:
    own = before.get(node_id)
    ends: list[tuple[Part, int, int]] = []
    if held.start_layer == 0:
        ends.append(("embedding", 0, model.embedding_bytes))
    if held.end_layer == model.num_layers and not (held.start_layer == 0 and model.tied):
        ends.append(("head", model.num_layers, model.head_bytes))
    moves = []
    for part, border, size in ends:
        sources = [n for n, h in before.items() if n != node_id and _has_end(h, border)]
        if own is None or not _has_end(own, border) or _slice(own) != _slice(held):
            moves.append(
                Move(
                    node_id=node_id,
                    part=part,
                    start_layer=max(0, border - 1),
                    end_layer=max(1, border),
                    num_bytes=-(-size // held.num_ranks),
                    sources=tuple(sources),
                )
            )
    needs = [
        (layer, _layer_bytes(model, layer, held, own), _sources(layer, node_id, before))
        for layer in range(held.start_layer, held.end_layer)
    ]
    for (_, sources_of_run), run in groupby(
        [need for need in needs if need[1]], key=lambda need: (need[0] - needs.index(need), need[2])
    ):
        layers = list(run)
        moves.append(
            Move(
                node_id=node_id,
                part="layers",
                start_layer=layers[0][0],
                end_layer=layers[-1][0] + 1,
                num_bytes=sum(size for _, size, _ in layers),
                sources=sources_of_run,
            )
        )
    return moves


def _has_end(held: Held, border: int) -> bool:
    return border in (held.start_layer, held.end_layer)


def _slice(held: Held) -> tuple[int, int]:
    return held.num_ranks, held.rank


def _sources(layer: int, node_id: str, before: Mapping[str, Held]) -> tuple[str, ...]:
    return tuple(
        name
        for name, held in before.items()
        if name != node_id and held.start_layer <= layer < held.end_layer
    )


def _layer_bytes(model: ModelCost, layer: int, held: Held, own: Held | None) -> int:
    """Bytes of a layer that a node holds in the target and not yet."""
    attention, mlp = model.split_attention_bytes[layer], model.split_mlp_bytes[layer]
    rest = model.layer_bytes[layer] - attention - mlp
    groups, columns = held.groups[1] - held.groups[0], held.columns[1] - held.columns[0]
    if own is not None and own.start_layer <= layer < own.end_layer:
        rest = 0
        groups -= _overlap(held.groups, own.groups)
        columns -= _overlap(held.columns, own.columns)
    return rest + -(-attention * groups // model.kv_groups) + -(-mlp * columns // model.mlp_columns)


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> int:
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))


class MoveCosts:
    """Bytes that each unit would have to load for each stage, as `UnitCosts` has seconds."""

    def __init__(self, model: ModelCost, before: Mapping[str, Held]) -> None:
        self._model = model
        self._before = before
        self._known: dict[tuple[Unit, StepShape], Floats] = {}

    def matrix(self, unit: Unit, costs: UnitCosts, shape: StepShape) -> Floats:
        """Bytes by [start, end], with the shares that `costs` prices."""
        if (unit, shape) not in self._known:
            groups, columns = costs.shares(unit, shape)
            total = np.zeros(groups.shape[:2])
            for rank, index in enumerate(unit):
                own = self._before.get(costs.node(index).node_id)
                total += self._rank_bytes(own, rank=rank, groups=groups, columns=columns)
            self._known[unit, shape] = total
        return self._known[unit, shape]

    def _rank_bytes(self, own: Held | None, *, rank: int, groups: Ints, columns: Ints) -> Floats:
        model = self._model
        num_layers, num_ranks = model.num_layers, groups.shape[2]
        is_held = np.zeros(num_layers, dtype=bool)
        if own is not None:
            is_held[own.start_layer : own.end_layer] = True
        attention = np.array(model.split_attention_bytes, dtype=np.float64)
        mlp = np.array(model.split_mlp_bytes, dtype=np.float64)
        rest = np.array(model.layer_bytes, dtype=np.float64) - attention - mlp
        total = _sums(rest * ~is_held)
        for sizes, shares, whole, had in (
            (attention, groups, model.kv_groups, own.groups if own else (0, 0)),
            (mlp, columns, model.mlp_columns, own.columns if own else (0, 0)),
        ):
            first = shares[:, :, :rank].sum(axis=2)
            last = first + shares[:, :, rank]
            kept = np.clip(np.minimum(last, had[1]) - np.maximum(first, had[0]), 0, None)
            total += _sums(sizes * ~is_held) * shares[:, :, rank] / whole
            total += _sums(sizes * is_held) * (shares[:, :, rank] - kept) / whole
        is_same = own is not None and _slice(own) == (num_ranks, rank)
        ends = np.zeros_like(total)
        if not (is_same and own is not None and _has_end(own, 0)):
            ends[0] += model.embedding_bytes / num_ranks
        if not (is_same and own is not None and _has_end(own, num_layers)):
            ends[:, num_layers] += model.head_bytes / num_ranks
            if model.tied:
                ends[0, num_layers] -= model.head_bytes / num_ranks
        return total + ends


def _sums(values: Floats) -> Floats:
    """By [start, end]."""
    prefix = np.concatenate(([0.0], np.cumsum(values)))
    return prefix[None, :] - prefix[:, None]


def total_bytes(moves: Sequence[Move]) -> int:
    """Of all moves."""
    return sum(move.num_bytes for move in moves)
