"""Groups of the backend made by hand, two ranks in this process: errors, deadlines, their ends."""

import concurrent.futures
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from stagemesh.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    ConfigError,
    GroupAborted,
    NotReady,
    PeerLost,
)
from stagemesh.rpc.unix_socket import host_id
from stagemesh.torch_backend import MeshBackend, MeshOptions, MeshProcessGroup

RANKS = (0, 1)


def request(
    store: dist.Store, rank: int, *, seconds: float = 10.0, world_ranks: Sequence[int] = ()
) -> Any:
    """What torch hands to the backend."""
    return SimpleNamespace(
        store=store,
        group_rank=rank,
        group_size=len(RANKS),
        timeout=timedelta(seconds=seconds),
        group_id="0",
        global_ranks_in_group=world_ranks,
    )


def together(run: Callable[[int], Any]) -> list[Any]:
    """What `run` gives for each rank, on a thread per rank; or what it raised."""
    with concurrent.futures.ThreadPoolExecutor(len(RANKS)) as pool:
        futures = [pool.submit(run, rank) for rank in RANKS]
        return [future.exception(30) or future.result() for future in futures]


def open_pair(store: dist.Store, **options: Any) -> list[MeshProcessGroup]:
    return together(lambda rank: MeshBackend().create(request(store, rank), MeshOptions(**options)))


@pytest.fixture
def pair() -> Iterator[list[MeshProcessGroup]]:
    groups = open_pair(dist.HashStore())
    yield groups
    together(lambda rank: groups[rank].shutdown())


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def test_ranks_reduce_and_a_work_tells_its_state(pair):
    def run(rank: int) -> tuple[Any, ...]:
        tensor = ones(4) * (rank + 1)
        work = pair[rank].allreduce([tensor])
        return work.wait(), work.is_completed(), work.is_success(), work.exception(), work.result()

    for waited, completed, success, error, result in together(run):
        assert (waited, completed, success, error) == (True, True, True, None)
        assert torch.equal(result[0], ones(4) * 3)


def test_ranks_that_call_different_things_get_an_error_and_go_on(pair):
    def disagree(rank: int) -> None:
        pair[rank].allreduce([ones(4 + rank)]).wait()

    def agree(rank: int) -> torch.Tensor:
        return pair[rank].allreduce([ones(4)]).get_future().wait()[0]

    for error in together(disagree):
        assert isinstance(error, CollectiveMismatch)
        assert "float32[4]" in str(error)
    for result in together(agree):
        assert torch.equal(result, ones(4) * 2)


def test_a_future_carries_the_error(pair):
    futures = together(lambda rank: pair[rank].allreduce([ones(1 + rank)]).get_future())
    for future in futures:
        with pytest.raises(CollectiveMismatch, match="ranks disagree"):
            future.wait()


def test_a_wait_that_is_too_short_leaves_the_operation_alone(pair):
    received = torch.zeros(3)
    work = pair[0].recv([received], 1, 0)
    with pytest.raises(CollectiveTimeout, match=r"recv did not end in the 0\.05 s"):
        work.wait(timedelta(seconds=0.05))
    assert not work.is_completed()
    pair[1].send([ones(3)], 0, 0).wait()
    assert work.wait(timedelta(seconds=10))
    assert torch.equal(received, ones(3))


def test_an_operation_ends_at_the_deadline_of_its_call(pair):
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=0.2)
    with pytest.raises(CollectiveTimeout, match="waiting for rank 1"):
        pair[0].allreduce([ones(2)], options).wait()


def test_a_rank_that_leaves_is_lost_to_the_others(pair):
    work = pair[0].recv([torch.zeros(3)], 1, 0)
    # The connection through which the loss shows.
    pair[1].send([ones(1)], 0, 9).wait()
    pair[1].shutdown()
    with pytest.raises(PeerLost) as caught:
        work.wait(timedelta(seconds=10))
    assert caught.value.rank == 1


def test_an_abort_ends_what_waits_on_all_ranks(pair):
    works = [pair[rank].recv([torch.zeros(3)], 1 - rank, 0) for rank in RANKS]
    pair[0].abort()
    for work in works:
        with pytest.raises(GroupAborted, match="torch aborted the process group"):
            work.wait(timedelta(seconds=10))


def test_callbacks_may_start_collectives_and_wait_for_them(pair):
    # On all at once, as the buckets of DDP with a hook do.
    waiting = {rank: threading.Barrier(40) for rank in RANKS}

    def run(rank: int) -> list[torch.Tensor]:
        def again(future: "torch.futures.Future[list[torch.Tensor]]") -> torch.Tensor:
            waiting[rank].wait(timeout=10)
            return pair[rank].allreduce(future.value()).get_future().wait()[0]

        works = [pair[rank].allreduce([ones(2)]) for _ in range(40)]
        chained = [work.get_future().then(again) for work in works]
        return [future.wait() for future in chained]

    for results in together(run):
        assert len(results) == 40
        assert all(torch.equal(result, ones(2) * 4) for result in results)


def test_collectives_under_way_together_keep_their_order(pair):
    def run(rank: int) -> list[torch.Tensor]:
        tensors = [ones(400_000 if index % 2 else 1) * index for index in range(8)]
        works = [pair[rank].allreduce([tensor]) for tensor in tensors]
        for work in reversed(works):
            work.wait()
        return tensors

    for tensors in together(run):
        for index, tensor in enumerate(tensors):
            assert torch.equal(tensor, torch.full_like(tensor, 2 * index))


@pytest.mark.parametrize(
    ("op", "dtype", "message"),
    [
        (dist.ReduceOp.BXOR, torch.int32, "no reduction BXOR; use one of SUM"),
        (dist.ReduceOp.AVG, torch.int32, "avg of int32"),
        (dist.ReduceOp.MAX, torch.complex64, "no order"),
    ],
)
def test_reductions_without_meaning_are_refused_at_the_call(pair, op, dtype, message):
    options = dist.AllreduceOptions()
    options.reduceOp = op
    with pytest.raises(ConfigError, match=message):
        pair[0].allreduce([torch.zeros(2, dtype=dtype)], options)


def test_a_receive_from_any_rank_tells_which(pair):
    received = torch.zeros(1)
    work = pair[0].recv_anysource([received], 4)
    with pytest.raises(NotReady, match="has not ended"):
        work.source_rank()
    sent = pair[1].send([ones(1)], 0, 4)
    assert work.wait(timedelta(seconds=10))
    assert (work._source_rank(), received.item()) == (1, 1.0)
    assert sent.wait(timedelta(seconds=10))
    with pytest.raises(NotReady, match="no receive"):
        sent.source_rank()


def test_errors_of_a_torch_subgroup_name_the_ranks_of_the_world():
    store, backends = dist.HashStore(), [MeshBackend() for _ in RANKS]
    groups = together(
        lambda rank: backends[rank].create(request(store, rank, world_ranks=[5, 2]), MeshOptions())
    )
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=0.2)
    with pytest.raises(CollectiveTimeout, match=r"waiting for rank 1 \(rank 2 of the world, node"):
        groups[0].allreduce([ones(2)], options).wait()
    together(lambda rank: groups[rank].shutdown())


def test_a_rank_that_never_comes_is_named():
    with pytest.raises(CollectiveTimeout, match=r"rank 1 of group 0 gave no address in 0\.3 s"):
        MeshBackend().create(request(dist.HashStore(), 0, seconds=0.3), MeshOptions())


def test_a_rank_of_another_host_that_listens_on_loopback_is_refused():
    store = dist.HashStore()
    record = {"address": "127.0.0.1:7", "node_id": "b-1", "host": "another-host", "nonce": "0"}
    store.set("1/1", json.dumps(record))
    with pytest.raises(ConfigError, match=r"rank 1 is on host another-host.*STAGEMESH_BIND"):
        MeshBackend().create(request(store, 0), MeshOptions())


@pytest.mark.skipif(not host_id(), reason="this system tells no boot id")
@pytest.mark.parametrize("use", [True, False])
def test_ranks_of_one_host_use_unix_sockets_where_they_are_told_to(use: bool):
    def connections() -> int:
        return len(psutil.Process().net_connections(kind="tcp"))

    before = connections()
    groups = open_pair(dist.HashStore(), unix_socket=use)
    # Two that listen; and both ends of a connection per direction.
    listening = connections()
    results = together(lambda rank: groups[rank].allreduce([ones(4)]).get_future().wait()[0])
    assert all(torch.equal(result, ones(4) * 2) for result in results)
    assert (listening - before, connections() - listening) == (2, 0 if use else 4)
    together(lambda rank: groups[rank].shutdown())


def test_the_environment_says_whether_unix_sockets_are_used():
    for text, expected in (("1", True), ("0", False)):
        options = MeshOptions.from_environment({"STAGEMESH_UNIX_SOCKET": text})
        assert options.unix_socket is expected
    assert MeshOptions.from_environment({}) == MeshOptions()
    with pytest.raises(ConfigError, match="must be 1 or 0, got 'yes'"):
        MeshOptions.from_environment({"STAGEMESH_UNIX_SOCKET": "yes"})


def test_a_public_bind_needs_a_token():
    options = MeshOptions.from_environment(
        {"STAGEMESH_BIND": "0.0.0.0:0", "STAGEMESH_ADVERTISE": "10.0.0.1"}
    )
    with pytest.raises(ConfigError, match="token"):
        MeshBackend().create(request(dist.HashStore(), 0), options)


def test_a_group_may_be_made_again_under_its_name_in_the_same_store():
    store = dist.HashStore()
    for value in (1.0, 2.0):
        groups = open_pair(store)

        def run(rank: int, groups: Any = groups, value: float = value) -> torch.Tensor:
            tensor = torch.tensor([value])
            groups[rank].allreduce([tensor]).wait()
            return tensor

        assert [tensor.item() for tensor in together(run)] == [2 * value] * 2
        together(lambda rank, groups=groups: groups[rank].shutdown())


def test_the_last_group_takes_the_thread_and_server_with_it():
    def threads() -> int:
        return sum(thread.name.startswith("stagemesh-") for thread in threading.enumerate())

    before = threads()
    groups = open_pair(dist.HashStore())
    assert threads() > before
    together(lambda rank: groups[rank].shutdown())
    groups[0].shutdown()
    deadline = time.monotonic() + 5
    while threads() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads() == before
