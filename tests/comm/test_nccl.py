"""Backend nccl: one suite for it and, where there is no device, for what stands in for NCCL.

The stand-in is Gloo under the wire for NCCL: all of ours runs, but not NCCL itself and no device.
"""

import datetime
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

from stagemesh.comm import backends, gloo_opener
from stagemesh.comm.backends import GroupConfig, init_process_group
from stagemesh.comm.nccl_wire import NcclWire
from stagemesh.comm.process_group import ProcessGroup
from stagemesh.comm.reduce import ReduceOp
from stagemesh.comm.rendezvous import AddressList
from stagemesh.errors import CollectiveMismatch, ConfigError, GroupAborted
from tests.support.ranks import run_ranks

HAS_NCCL = dist.is_nccl_available() and torch.cuda.is_available()
NUM_DEVICES = torch.cuda.device_count() if HAS_NCCL else 0

# In a message, in a round of its own, in segments, and by torch's own all_reduce.
NUMELS = (6, 6000, 600_000, 3_000_000)
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


class StandIn(NcclWire):
    """The wire for NCCL, over Gloo."""

    def synchronize(self) -> None:
        pass


def connect_stand_in(
    store: Any, *, rank: int, size: int, device: torch.device, timeout_seconds: float
) -> NcclWire:
    options = ProcessGroupGloo._Options()
    options._timeout = datetime.timedelta(seconds=timeout_seconds)
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return StandIn(ProcessGroupGloo(store, rank, size, options), device=device)


@pytest.fixture(params=["stand-in", pytest.param("nccl", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "nccl":
        if not NUM_DEVICES:
            pytest.skip("torch finds no device for NCCL here")
        return "cuda"
    monkeypatch.setattr(backends, "nccl_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(gloo_opener, "connect_nccl", connect_stand_in)
    monkeypatch.setattr(torch.cuda, "set_device", lambda rank: None)
    return "cpu"


def num_ranks(device: str) -> int:
    return 2 if device == "cpu" else min(2, NUM_DEVICES)


def part(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(rank)) * 50
    return values > 0 if dtype == torch.bool else values.to(dtype)


def operations(group: ProcessGroup, numel: int, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Each operation once; what it gave."""
    rank, size, root = group.rank, group.size, group.size - 1
    where = torch.device(device, rank) if device == "cuda" else torch.device(device)
    mine = part(rank, numel, dtype).to(where)
    pieces = [piece.clone() for piece in mine[: numel // size * size].chunk(size)]
    piece = pieces[rank].clone()
    lists = [torch.zeros_like(mine) for _ in range(size)]
    swapped = [torch.zeros_like(each) for each in pieces]
    wide = mine.repeat(2, 1).t().contiguous()
    gives = {
        "sum": group.all_reduce(mine.clone()),
        "max": group.all_reduce(mine.clone(), op=ReduceOp.MAX),
        "strided": group.all_reduce(wide[:, 0], op=ReduceOp.PRODUCT),
        "reduce": group.reduce(mine.clone(), dst=root),
        "broadcast": group.broadcast(mine.clone(), src=root),
        "reduce_scatter": group.reduce_scatter(piece, pieces),
        "all_gather": torch.cat(list(group.all_gather(lists, mine))),
        "all_to_all": torch.cat(list(group.all_to_all(swapped, pieces))),
        "scatter": group.scatter(piece.clone(), src=root, inputs=pieces if rank == root else None),
        "variable": torch.cat(group.all_gather_variable(mine[: rank + 1])),
        "wide": wide,
    }
    if dtype.is_floating_point:
        gives["avg"] = group.all_reduce(mine.clone(), op=ReduceOp.AVG)
    gathered = group.gather(mine, dst=root)
    gives["gather"] = None if gathered is None else torch.cat(list(gathered))
    group.barrier()
    assert all(given is None or given.device.type in (device, "cpu") for given in gives.values())
    return {name: None if given is None else given.cpu() for name, given in gives.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", NUMELS)
def test_each_operation_gives_the_bits_of_the_mesh(
    device: str, numel: int, dtype: torch.dtype
) -> None:
    size = num_ranks(device)
    wanted = run_ranks(size, lambda g: operations(g, numel, dtype, "cpu"))
    given = run_ranks(size, lambda g: operations(g, numel, dtype, device), backend="nccl")
    for ours, theirs in zip(given, wanted, strict=True):
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            same = tensor is ours[name] if tensor is None else torch.equal(ours[name], tensor)
            assert same, name


def test_messages_go_between_devices(device: str) -> None:
    size = num_ranks(device)
    if size == 1:
        pytest.skip("one device has nobody to talk to")

    def run(group: ProcessGroup) -> Any:
        where = torch.device(device, group.rank) if device == "cuda" else torch.device(device)
        for numel in (3, 100_000):
            if group.rank:
                group.send(torch.full((numel,), float(numel), device=where), dst=0, tag=numel)
            else:
                target = torch.zeros(numel, device=where)
                assert group.recv(target, tag=numel) == 1
                assert target.eq(numel).all()

    run_ranks(size, run, backend="nccl")


def test_ranks_that_call_different_things_hear_of_it(device: str) -> None:
    size = num_ranks(device)

    def run(group: ProcessGroup) -> None:
        where = torch.device(device, group.rank) if device == "cuda" else torch.device(device)
        if size > 1:
            with pytest.raises(CollectiveMismatch, match="ranks disagree"):
                group.all_reduce(torch.ones(2 + group.rank, device=where))
        assert group.all_reduce(torch.ones(2, device=where)).tolist() == [size, size]
        group.barrier()
        if group.rank == size - 1:
            group.abort("enough")
        with pytest.raises(GroupAborted, match="enough"):
            group.all_reduce(torch.ones(2, device=where))

    run_ranks(size, run, backend="nccl")


@pytest.mark.skipif(HAS_NCCL, reason="this machine can run NCCL")
def test_it_is_refused_where_it_cannot_run() -> None:
    config = GroupConfig(
        backend="nccl",
        rendezvous=AddressList(addresses=["127.0.0.1:1"]),
        rank=0,
        world_size=1,
    )
    with pytest.raises(ConfigError, match=r"backend 'nccl' needs a .*'gloo'"):
        init_process_group(config)
