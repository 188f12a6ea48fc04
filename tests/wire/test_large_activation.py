"""Activations between two stages that are larger than any message of gRPC."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from node.next_stage import NextStage
from node.service import NodeServicer
from node.stage_runner import QueuedStep
from stagemesh.errors import CapacityExceeded
from stagemesh.rpc.channels import MAX_MESSAGE_BYTES
from stagemesh.rpc.server import RpcServer, Service
from stagemesh.rpc.v1 import node_pb2_grpc
from stagemesh.steps import Segment, Step

ACTIVATIONS = {
    # Just above gRPC's usual limit, and far above ours.
    "4 MiB and 4 bytes": torch.arange(1048577, dtype=torch.float32).view(-1, 1),
    "64 MiB": torch.arange(16 * 2**20, dtype=torch.float32).view(16384, 1024),
}


class _Runner:
    def __init__(self) -> None:
        self.taken: list[QueuedStep] = []
        self.has_both = asyncio.Event()

    async def submit(self, step: QueuedStep) -> None:
        self.taken.append(step)
        if len(self.taken) == 2:
            self.has_both.set()


async def _send(activation: torch.Tensor, *, max_tensor_bytes: int) -> list[QueuedStep]:
    """What the second stage of a deployment takes in, and a step after it."""
    unused: Any = None
    servicer = NodeServicer(
        node_id="b",
        describe=unused,
        status=unused,
        loader=unused,
        compute=unused,
        comm=unused,
        token=None,
        max_tensor_bytes=max_tensor_bytes,
    )
    runner = _Runner()
    deployment: Any = SimpleNamespace(
        request=SimpleNamespace(incarnation=1, stage=1), tensor_rank=0, runner=runner
    )
    servicer._deployments["d"] = deployment
    add = node_pb2_grpc.add_NodeServiceServicer_to_server
    service = Service(name="stagemesh.rpc.v1.NodeService", servicer=servicer, add=add)
    async with RpcServer("127.0.0.1:0", services=[service]) as server:
        link = NextStage(
            node_id="b",
            address=server.address,
            deployment_id="d",
            incarnation=1,
            stage=1,
            tensor_rank=0,
            token=None,
        )
        try:
            await link.connect(5.0)
            for number, each in enumerate((activation, activation[:1])):
                segment = Segment(session_id=1, start_position=0, num_tokens=len(each))
                step = Step(step_id=number, segments=(segment,))
                await link.send(step, each, timings=())
            await asyncio.wait_for(runner.has_both.wait(), 20)
        finally:
            await link.close()
    return runner.taken


@pytest.mark.parametrize("name", ACTIVATIONS)
async def test_a_large_activation_arrives_bit_for_bit(name):
    activation = ACTIVATIONS[name]
    taken = await _send(activation, max_tensor_bytes=2**30)
    assert [step.step.step_id for step in taken] == [0, 1]
    assert torch.equal(taken[0].activation, activation)
    assert torch.equal(taken[1].activation, activation[:1])


async def test_above_the_nodes_limit_both_numbers_are_named():
    activation = ACTIVATIONS["64 MiB"]
    with pytest.raises(CapacityExceeded, match=rf"{2**26} bytes; the limit is {2**26 - 1}"):
        await _send(activation, max_tensor_bytes=2**26 - 1)


def test_the_largest_is_larger_than_a_message():
    """Control: it could not have come in one."""
    sizes = [each.numel() * each.element_size() for each in ACTIVATIONS.values()]
    assert min(sizes) > 4 * 2**20
    assert max(sizes) > MAX_MESSAGE_BYTES
