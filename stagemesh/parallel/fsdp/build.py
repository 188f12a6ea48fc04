"""From the plan of the units to units with flat parameters."""

from collections.abc import Sequence

import torch
from torch import nn

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.parallel.fsdp.collectives import FlatCollectives
from stagemesh.parallel.fsdp.config import FsdpConfig, ShardingStrategy
from stagemesh.parallel.fsdp.flat_parameter import FlatParameter, Member, is_tensor_sharded
from stagemesh.parallel.fsdp.gradient import FlatGradient
from stagemesh.parallel.fsdp.layout import flat_layout, per_parameter_layout
from stagemesh.parallel.fsdp.memory import MemoryMeter
from stagemesh.parallel.fsdp.unit import FsdpUnit
from stagemesh.parallel.fsdp.wrap import ROOT, UnitPlan

_CPU = torch.device("cpu")


def build_units(
    plans: Sequence[UnitPlan],
    *,
    config: FsdpConfig,
    process_group: ProcessGroup,
    meter: MemoryMeter,
) -> tuple[FsdpUnit, ...]:
    """Cut the members of each unit, and register the shards in its module. A collective."""
    gather_group, reduce_group = _own_groups(process_group)
    units = []
    num_flats = 0
    for plan in plans:
        flats = []
        for members in _alike(plan.members):
            collectives = FlatCollectives(
                index=num_flats, gather_group=gather_group, reduce_group=reduce_group
            )
            num_flats += 1
            flats.append(_flat_parameter(members, config, collectives, process_group.rank, meter))
        _register(plan.module, flats, is_flattened=config.flatten_parameters)
        units.append(
            FsdpUnit(
                plan.module,
                name=plan.name,
                is_root=plan.name == ROOT,
                flats=tuple(flats),
                gradients=tuple(
                    FlatGradient(flat, reduce_dtype=config.precision.reduce_dtype)
                    for flat in flats
                    if flat.requires_grad
                ),
            )
        )
    return tuple(units)


def _own_groups(process_group: ProcessGroup) -> tuple[ProcessGroup, ProcessGroup]:
    """Groups of the same ranks: what is started ahead has no place in the order of the user's."""
    if process_group.size == 1:
        return process_group, process_group
    ranks = range(process_group.size)
    gather_group, reduce_group = process_group.subgroup(ranks), process_group.subgroup(ranks)
    assert gather_group is not None
    assert reduce_group is not None
    return gather_group, reduce_group


def _alike(members: Sequence[Member]) -> list[list[Member]]:
    """Members that can share a flat parameter: of one dtype, all trained or all frozen.

    Shards of tensor-parallel layers are kept apart, too: a norm counts them once per rank of that
    axis, and parameters that are equal there once.
    """
    alike: dict[tuple[torch.dtype, torch.device, bool, bool], list[Member]] = {}
    for member in members:
        parameter = member.parameter
        key = (
            parameter.dtype,
            parameter.device,
            parameter.requires_grad,
            is_tensor_sharded(parameter),
        )
        alike.setdefault(key, []).append(member)
    return list(alike.values())


def _flat_parameter(
    members: Sequence[Member],
    config: FsdpConfig,
    collectives: FlatCollectives,
    rank: int,
    meter: MemoryMeter,
) -> FlatParameter:
    is_sharded = config.sharding_strategy is not ShardingStrategy.NO_SHARD
    first = members[0].parameter
    make_layout = flat_layout if config.flatten_parameters else per_parameter_layout
    wanted = config.precision.param_dtype
    return FlatParameter(
        members,
        layout=make_layout(
            [tuple(member.parameter.shape) for member in members],
            num_shards=collectives.size if is_sharded else 1,
        ),
        rank=rank if is_sharded else 0,
        is_flattened=config.flatten_parameters,
        compute_dtype=wanted if wanted and first.is_floating_point() else first.dtype,
        storage_device=_CPU if config.cpu_offload else first.device,
        collectives=collectives,
        meter=meter,
    )


def _register(module: nn.Module, flats: Sequence[FlatParameter], *, is_flattened: bool) -> None:
    """Put the shards in the originals' place."""
    for index, flat in enumerate(flats):
        for slot, member in enumerate(flat.members):
            for owner, attribute in member.places:
                # Directly: the attribute itself is taken by the whole parameter.
                if is_flattened:
                    del owner._parameters[attribute]
                else:
                    owner._parameters[attribute] = flat.shards[slot].parameter
        if is_flattened:
            module.register_parameter(f"flat_parameter_{index}", flat.shards[0].parameter)
