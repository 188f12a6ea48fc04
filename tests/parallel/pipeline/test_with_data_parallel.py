"""Pipelines side by side, whose stages average their gradients: (dp, pp) in one program."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.parallel.data.data_parallel import DataParallel
from stagemesh.parallel.fsdp.config import FsdpConfig
from stagemesh.parallel.fsdp.fsdp import Fsdp
from stagemesh.parallel.pipeline import PipelineParallel, split_sequential
from stagemesh.topology import Topology
from tests.parallel.pipeline.reference import (
    Trained,
    assert_same,
    copied,
    gradients_of,
    make_batch,
    make_model,
    train_alone,
)
from tests.support.ranks import run_ranks


def groups_of(world: ProcessGroup, topology: Topology) -> dict[str, ProcessGroup]:
    found = {}
    for axis in ("dp", "pp"):
        for ranks in topology.all_groups(axis):
            group = world.subgroup(ranks)
            if group is not None:
                found[axis] = group
    return found


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "zero_bubble"])
@pytest.mark.parametrize("num_samples", [4, 8])
def test_two_replicas_of_two_stages(schedule: str, num_samples: int) -> None:
    # 4 samples: of a replica's 4 micro-batches two are empty, and the reduction still comes.
    topology = Topology(dp=2, pp=2)
    batches = [make_batch(num_samples, seed=seed) for seed in range(3)]

    def run(world: ProcessGroup) -> Any:
        groups = groups_of(world, topology)
        at = topology.coordinates(world.rank)
        stage = split_sequential(copy.deepcopy(make_model()), counts=[3, 5])[at.pp]
        pipeline = PipelineParallel(
            DataParallel(stage, process_group=groups["dp"]),
            process_group=groups["pp"],
            num_microbatches=4,
            schedule=schedule,
            loss_fn=nn.functional.mse_loss,
        )
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.05, momentum=0.9)
        for inputs, targets in batches:
            optimizer.zero_grad()
            own = [tensor.chunk(2)[at.dp] for tensor in (inputs, targets)]
            pipeline.step(*own)
            gradients = gradients_of(stage)
            optimizer.step()
        return gradients, copied(stage.state_dict())

    reference = train_alone(make_model(), batches)
    reference.losses.clear()
    results = run_ranks(4, run)
    for replica in (0, 1):
        first, second = results[2 * replica : 2 * replica + 2]
        ours = Trained(gradients=first[0] | second[0], parameters=first[1] | second[1])
        assert_same(ours, reference)


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "zero_bubble"])
@pytest.mark.parametrize("num_samples", [4, 8])
def test_two_stages_whose_parameters_are_sharded(schedule: str, num_samples: int) -> None:
    topology = Topology(dp=2, pp=2)
    batches = [make_batch(num_samples, seed=seed) for seed in range(3)]
    config = FsdpConfig(min_param_size=1, mixed_precision=False)

    def run(world: ProcessGroup) -> dict[str, torch.Tensor]:
        groups = groups_of(world, topology)
        at = topology.coordinates(world.rank)
        stage = split_sequential(copy.deepcopy(make_model()), counts=[3, 5])[at.pp]
        sharded = Fsdp(stage, process_group=groups["dp"], config=config)
        pipeline = PipelineParallel(
            sharded,
            process_group=groups["pp"],
            num_microbatches=4,
            schedule=schedule,
            loss_fn=nn.functional.mse_loss,
        )
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.05, momentum=0.9)
        for inputs, targets in batches:
            optimizer.zero_grad()
            pipeline.step(*[tensor.chunk(2)[at.dp] for tensor in (inputs, targets)])
            optimizer.step()
        with sharded.whole_parameters() as whole:
            return copied(whole)

    reference = train_alone(make_model(), batches).parameters
    results = run_ranks(4, run)
    for rank in range(4):
        for name, value in results[rank].items():
            torch.testing.assert_close(value, reference[name], rtol=1e-5, atol=1e-6)
    assert results[0].keys() | results[1].keys() == reference.keys()
