"""Gloo beside our own transports: the same bits, its ways to meet, and its faults."""

import json
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stagemesh.comm.backends import GroupConfig, init_process_group
from stagemesh.comm.comm_loop import CommLoop
from stagemesh.comm.gloo_opener import serve_store
from stagemesh.comm.process_group import ProcessGroup
from stagemesh.comm.reduce import ReduceOp, reduce_in_order
from stagemesh.comm.rendezvous import AddressList, Rendezvous, SharedFolder
from stagemesh.errors import CollectiveTimeout, CommError, ConfigError, PeerLost
from tests.comm.test_rendezvous import free_port, store_meeting, together
from tests.process.children import children
from tests.support.ranks import BACKENDS, run_ranks

SIZE = 3

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
]


def random_bytes(rank: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    values = torch.randn(shape, generator=generator) * 50
    return values.to(torch.bool) if dtype == torch.bool else values.abs().to(dtype)


def raw(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (7, 5), (300, 400)], ids=str)
def test_all_backends_give_the_same_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    def run(group: ProcessGroup) -> list[Any]:
        mine = random_bytes(group.rank, dtype, *shape)
        total = group.all_reduce(mine.clone())
        # Every other element of a wider one: strided, and its gaps must stay.
        wide = torch.stack([mine, mine], dim=-1)
        group.all_reduce(wide[..., 0], op=ReduceOp.PRODUCT)
        gathered = group.gather(mine, dst=2) or []
        return [raw(total), raw(wide), *(raw(tensor) for tensor in gathered)]

    first, *others = [run_ranks(SIZE, run, backend=backend) for backend in BACKENDS]
    assert len(first[2]) == 2 + SIZE
    for other in others:
        assert other == first


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_gloo_gives_large_tensors_our_bits_in_each_operation(size: int, dtype: torch.dtype) -> None:
    """Some segments and a rest, which the ranks do not divide."""
    rows = 9 * 2**20 // dtype.itemsize // 6 * 6 + 6
    parts = [random_bytes(rank, dtype, rows) for rank in range(size)]
    ops = [ReduceOp.SUM, ReduceOp.MAX, *([ReduceOp.AVG] if dtype.is_floating_point else [])]

    def run(group: ProcessGroup) -> Any:
        mine, last = parts[group.rank], size - 1
        given = {f"all_reduce {op.name}": group.all_reduce(mine[1:].clone(), op=op) for op in ops}
        given["reduce"] = group.reduce(mine[1:].clone(), dst=last)
        given["reduce_scatter"] = group.reduce_scatter_tensor(mine[: rows // size].clone(), mine)
        lists = [mine[: rows // size].clone() for _ in range(size)]
        given["scattered"] = group.scatter(
            lists[0].clone(),
            src=0,
            inputs=list(mine.split(rows // size)) if not group.rank else None,
        )
        inputs = [piece.clone() for piece in mine.split(rows // size)]
        group.reduce_scatter(lists[0], inputs)
        given["reduce_scatter of a list"] = lists[0]
        whole = torch.zeros(size * rows, dtype=dtype)
        # In place: the input is a piece of the output, that of another rank on most.
        whole[:rows] = mine
        given["all_gather"] = group.all_gather_tensor(whole, whole[:rows])
        given["broadcast"] = group.broadcast(mine.clone(), src=last)
        return given

    results = run_ranks(size, run, backend="gloo")
    total, last = reduce_in_order(parts, op=ReduceOp.SUM), size - 1
    for rank, given in enumerate(results):
        piece = slice(rank * (rows // size), (rank + 1) * (rows // size))
        wanted = {
            f"all_reduce {op.name}": reduce_in_order([part[1:] for part in parts], op=op)
            for op in ops
        }
        wanted["reduce"] = total[1:] if rank == last else parts[rank][1:]
        wanted["reduce_scatter"] = wanted["reduce_scatter of a list"] = total[piece]
        wanted["scattered"] = parts[0][piece]
        wanted["all_gather"] = torch.cat(parts)
        wanted["broadcast"] = parts[last]
        assert given.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(given[name], tensor), (name, rank)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG], ids=str)
def test_reducing_in_place_gives_the_same_bits(op: ReduceOp) -> None:
    parts = [random_bytes(rank, torch.float32, 1_500_000) for rank in range(2)]

    def run(group: ProcessGroup) -> list[torch.Tensor]:
        mine = parts[group.rank].clone()
        # One that torch cannot have, as it has gaps.
        wide = torch.stack([mine, mine], dim=-1)
        group.all_reduce(wide[:, 0], op=op)
        assert torch.equal(wide[:, 1], mine)
        with torch.inference_mode():
            inferred = parts[group.rank].clone()
        group.all_reduce(inferred, op=op)
        return [group.all_reduce(mine, op=op), wide[:, 0], inferred]

    for given in run_ranks(2, run, backend="gloo", reduce_in_place=True):
        for tensor in given:
            assert torch.equal(tensor, reduce_in_order(parts, op=op))


def test_a_difference_would_be_seen() -> None:
    """Negative control of the comparison: a sum in another order has other bits."""
    parts = [random_bytes(rank, torch.float32, 300, 400) for rank in range(SIZE)]
    forwards, backwards = parts[0] + parts[1] + parts[2], parts[2] + parts[1] + parts[0]
    assert raw(forwards) != raw(backwards)


def test_gloo_sets_no_global_group() -> None:
    def run(group: ProcessGroup) -> bool:
        group.barrier()
        return dist.is_initialized()

    assert run_ranks(2, run, backend="gloo") == [False, False]


def make_gloo(
    rendezvous: Callable[[int], Rendezvous], *, loop: CommLoop, world_size: int | None = 2
) -> list[Any]:
    def run(rank: int) -> float:
        config = GroupConfig(
            backend="gloo",
            rendezvous=rendezvous(rank),
            rank=rank,
            world_size=world_size,
            timeout_seconds=10,
        )
        with init_process_group(config, loop=loop) as group:
            return group.all_reduce(torch.tensor([group.rank + 1.0])).item()

    return together([lambda: run(0), lambda: run(1)])


def test_gloo_meets_in_each_way(tmp_path: Path) -> None:
    port, addresses = free_port(), [f"127.0.0.1:{free_port()}" for _ in range(2)]
    with CommLoop() as loop:
        assert make_gloo(lambda _: AddressList(addresses=addresses), loop=loop) == [3.0, 3.0]
        assert make_gloo(lambda _: SharedFolder(path=tmp_path), loop=loop) == [3.0, 3.0]
        assert make_gloo(lambda rank: store_meeting(rank, 2, port), loop=loop) == [3.0, 3.0]


def test_the_store_of_rank_0_listens_only_where_it_should() -> None:
    served = serve_store("127.0.0.1:0", advertise=None, timeout_seconds=5)
    port = int(served.address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        assert connection.getpeername() == ("127.0.0.1", port)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    with pytest.raises(ConfigError, match="choose another port"):
        serve_store(served.address, advertise=None, timeout_seconds=5)


@pytest.mark.filterwarnings("ignore")
def test_gloo_names_the_rank_that_does_not_come_to_a_subgroup() -> None:
    def run(group: ProcessGroup) -> Any:
        if group.rank == 1:
            return None
        with pytest.raises(CollectiveTimeout, match=r"rank 1 \(rank 1 of .*\) of 2 did not come"):
            group.subgroup([0, 1], timeout_seconds=0.5)
        return None

    run_ranks(2, run, backend="gloo")


def test_gloo_refuses_tags_that_it_has_not() -> None:
    def run(group: ProcessGroup) -> None:
        with pytest.raises(ConfigError, match="over Gloo, got"):
            group.send(torch.ones(1), dst=1 - group.rank, tag=2**31)
        group.barrier()

    run_ranks(2, run, backend="gloo")


def test_a_message_that_does_not_fit_is_dropped() -> None:
    def run(group: ProcessGroup) -> list[float] | None:
        if group.rank == 0:
            group.send(torch.ones(3), dst=1)
            group.send(torch.full((2,), 7.0), dst=1)
            return None
        target = torch.zeros(2)
        with pytest.raises(CommError, match=r"expects float32\[2\], rank 0 sent float32\[3\]"):
            group.recv(target, src=0)
        assert target.tolist() == [0.0, 0.0]
        group.recv(target, src=0)
        return target.tolist()

    for backend in BACKENDS:
        assert run_ranks(2, run, backend=backend)[1] == [7.0, 7.0]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_gloo_survives_a_lost_process(number: signal.Signals, tmp_path: Path) -> None:
    """The error names no rank, but comes in time, and a fresh group works."""

    def tell(child: Any, **order: Any) -> None:
        child.process.stdin.write(json.dumps(order).encode() + b"\n")
        child.process.stdin.flush()

    with children(tmp_path) as processes:
        arguments = ("tests.support.rank_process", str(tmp_path / "meet"), "gloo", "3.0")
        ranks = [processes.start(*arguments) for _ in range(SIZE)]
        for rank, child in enumerate(ranks):
            await child.next_event("started")
            tell(child, do="join", name="world", rank=rank, size=SIZE, incarnation=1)
        for child in ranks:
            await child.next_event("joined")
        ranks[2].signal(number)
        time.sleep(0.1)  # noqa: ASYNC251
        for child in ranks[:2]:
            tell(child, do="all_reduce", name="world", numel=2**20)
        for child in ranks[:2]:
            failed = await child.next_event("failed")
            assert failed["error"] in (PeerLost.__name__, CollectiveTimeout.__name__), failed
            assert failed["seconds"] < 5.0
        for rank, child in enumerate(ranks[:2]):
            tell(child, do="join", name="fresh", rank=rank, size=2, incarnation=2)
        for child in ranks[:2]:
            await child.next_event("joined")
            tell(child, do="all_reduce", name="fresh", numel=2**20)
        for child in ranks[:2]:
            assert (await child.next_event("reduced"))["last"] == 2.0
