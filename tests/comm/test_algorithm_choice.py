"""Which algorithm a collective takes: by size of tensor and group, and as the user says."""

from typing import Any

import pytest
import torch

from stagemesh.comm.async_group import AsyncGroup
from stagemesh.comm.backends import GroupConfig
from stagemesh.comm.local import LocalNetwork
from stagemesh.comm.message_group import DEFAULT_DIRECT_BYTES, DEFAULT_MESSAGE_BYTES
from stagemesh.comm.process_group import ProcessGroup
from stagemesh.comm.rendezvous import AddressList
from stagemesh.errors import CollectiveTimeout, ConfigError, ProtocolError
from tests.comm.counting import CountingTransport
from tests.comm.groups import on_ranks
from tests.support.ranks import BACKENDS, run_ranks

NUM_BYTES = 1200


async def _sent(size: int, run: Any, **sizes: int) -> list[tuple[int, int]]:
    """What each rank sends: messages, bytes."""
    network = LocalNetwork(size=size)
    counts = [CountingTransport(network.join(rank)) for rank in range(size)]
    ranks = [AsyncGroup(count, group_id="g", timeout_seconds=5, **sizes) for count in counts]
    results = await on_ranks(ranks, run)
    assert not any(isinstance(result, Exception) for result in results)
    return [(count.num_messages, count.num_bytes) for count in counts]


@pytest.mark.parametrize(
    ("size", "direct_bytes", "is_direct"),
    [
        (2, NUM_BYTES, True),
        (2, NUM_BYTES - 1, False),
        # Two and three copies count.
        (3, NUM_BYTES, False),
        (3, 2 * NUM_BYTES, True),
        (4, 2 * NUM_BYTES, False),
        (4, 3 * NUM_BYTES, True),
    ],
)
async def test_more_ranks_cut_a_tensor_sooner(size, direct_bytes, is_direct):
    def ones(group):
        return torch.ones(NUM_BYTES // 4)

    sums = await _sent(size, lambda g: g.all_reduce(ones(g)), direct_bytes=direct_bytes)
    whole = (size - 1) * NUM_BYTES
    cut = 2 * (size - 1) * NUM_BYTES // size
    assert [num_bytes for _, num_bytes in sums] == [whole if is_direct else cut] * size
    assert all(messages == (size - 1) * (1 if is_direct else 3) for messages, _ in sums)
    broadcasts = await _sent(size, lambda g: g.broadcast(ones(g), src=0), direct_bytes=direct_bytes)
    assert broadcasts[0][1] == (whole if is_direct else NUM_BYTES)


async def test_where_each_rank_gets_other_bytes_their_own_size_counts():
    """Cut or whole, an all_gather moves as much: only the hops differ."""
    sent = await _sent(
        4,
        lambda g: g.all_gather_tensor(torch.zeros(4 * NUM_BYTES // 4), torch.ones(NUM_BYTES // 4)),
        direct_bytes=NUM_BYTES,
    )
    assert sent == [(3, 3 * NUM_BYTES)] * 4


@pytest.mark.parametrize("backend", ["local", "grpc"])
def test_the_configuration_reaches_groups_and_subgroups(backend: str) -> None:
    def run(world: ProcessGroup) -> list[tuple[int, int]]:
        made = world.subgroup([1, 0])
        assert made is not None
        with made:
            tensor = torch.arange(1000.0) * (world.rank + 1)
            assert torch.equal(made.all_reduce(tensor), torch.arange(1000.0) * 3)
            groups = (world.async_group, made.async_group)
            return [(group.direct_bytes, group.chunk_bytes) for group in groups]

    sizes = {"direct_bytes": 0, "chunk_bytes": 96}
    assert run_ranks(2, run, backend=backend, **sizes) == [[(0, 96)] * 2] * 2
    # Control: without a word they are the defaults.
    standard = (DEFAULT_DIRECT_BYTES, DEFAULT_MESSAGE_BYTES)
    assert run_ranks(2, run, backend=backend) == [[standard] * 2] * 2


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"direct_bytes": -1}, "direct_bytes must be >= 0"),
        ({"chunk_bytes": 0}, "chunk_bytes >= 1"),
        ({"direct_bytes": 0, "backend": "gloo"}, "'gloo' cuts tensors by itself"),
        ({"chunk_bytes": 5, "backend": "nccl"}, "'nccl' cuts tensors by itself"),
    ],
)
def test_sizes_that_no_group_has_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        GroupConfig(rendezvous=AddressList(addresses=["127.0.0.1:1"]), **settings)


async def test_ranks_with_other_sizes_raise_and_never_sum_wrongly():
    network = LocalNetwork(size=2)
    ranks = [
        AsyncGroup(network.join(rank), group_id="g", timeout_seconds=0.3, direct_bytes=4096 * rank)
        for rank in range(2)
    ]
    first, second = await on_ranks(ranks, lambda g: g.all_reduce(torch.ones(100)))
    assert isinstance(first, CollectiveTimeout)
    assert isinstance(second, ProtocolError)
    assert "all ranks need the same direct_bytes" in str(second)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_result_out_of_place_leaves_the_tensor(backend: str) -> None:
    def run(group: ProcessGroup) -> None:
        # One that rides in the agreement, and one that is cut.
        for numel in (6, 200_000):
            tensor = torch.arange(float(numel)) * (group.rank + 1)
            kept = tensor.clone()
            base = torch.full((numel, 2), -1.0)
            out = base[:, 0]
            assert group.all_reduce(tensor, out=out) is out
            assert torch.equal(out, torch.arange(float(numel)) * 6)
            assert group.all_reduce(tensor, out=out, async_op=True).wait() is out
            assert torch.equal(out, torch.arange(float(numel)) * 6)
            assert (base[:, 1] == -1).all()
            assert torch.equal(tensor, kept)
            out = torch.full((numel,), -1.0)
            result = group.reduce(tensor, dst=1, out=out)
            assert torch.equal(tensor, kept)
            if group.rank == 1:
                assert result is out
                assert torch.equal(out, torch.arange(float(numel)) * 6)
            else:
                assert result is tensor
                assert (out == -1).all()

    run_ranks(3, run, backend=backend)


@pytest.mark.parametrize(
    ("out", "text"),
    [
        (torch.zeros(4), r"out must be float32\[3\], got float32\[4\]"),
        (torch.zeros(3, dtype=torch.float64), r"out must be float32\[3\], got float64\[3\]"),
        (torch.zeros(1).expand(3), "share memory"),
    ],
    ids=["shape", "dtype", "expanded"],
)
async def test_a_wrong_out_is_named_and_counts_as_no_call(out, text):
    group = AsyncGroup(LocalNetwork(size=1).join(0), group_id="g", timeout_seconds=5)
    with pytest.raises(ConfigError, match=text):
        await group.all_reduce(torch.ones(3), out=out)
    # A tensor that could not be written to may be summed into another one.
    result = await group.all_reduce(torch.ones(1).expand(3), out=torch.zeros(3))
    assert result.tolist() == [1.0] * 3
