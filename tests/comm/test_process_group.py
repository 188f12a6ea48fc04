"""The blocking group on each backend: what it gives, how it fails, and from where it is called."""

import asyncio
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stagemesh.comm.backends import GroupConfig, init_process_group
from stagemesh.comm.comm_loop import CommLoop
from stagemesh.comm.local_hub import LocalHub
from stagemesh.comm.process_group import ProcessGroup
from stagemesh.comm.reduce import ReduceOp
from stagemesh.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    CommError,
    ConfigError,
    GroupAborted,
    NotReady,
    PeerLost,
)
from tests.support.ranks import BACKENDS, run_ranks

SIZE = 3

on_each_backend = pytest.mark.parametrize("backend", BACKENDS)


def part(rank: int, *shape: int) -> torch.Tensor:
    """What a rank brings; exact in any order of summing."""
    return (torch.arange(torch.Size(shape).numel(), dtype=torch.float32) + 100 * rank).view(shape)


def total(*shape: int) -> torch.Tensor:
    return sum((part(rank, *shape) for rank in range(SIZE)), torch.zeros(shape))


def call_all(group: ProcessGroup, *, async_op: bool) -> dict[str, Any]:
    """Each operation once; what it left in its tensors."""
    rank, ends = group.rank, []

    def end(result: Any) -> Any:
        if async_op:
            ends.append(result)
            return None
        return result

    mine = [part(rank, 2) for _ in range(9)]
    out = {name: torch.zeros(2) for name in ("reduce_scatter", "scatter", "rst")}
    wide = {name: torch.zeros(2 * SIZE) for name in ("agt", "a2as")}
    lists = {n: [torch.zeros(2) for _ in range(SIZE)] for n in ("all_gather", "gather", "a2a")}
    is_root = rank == 1
    end(group.all_reduce(mine[0], async_op=async_op))
    end(group.all_reduce(mine[1], op=ReduceOp.MAX, async_op=async_op))
    end(group.broadcast(mine[2], src=1, async_op=async_op))
    end(group.reduce(mine[3], dst=1, async_op=async_op))
    pieces = list(part(rank, SIZE, 2))
    end(group.reduce_scatter(out["reduce_scatter"], pieces, async_op=async_op))
    end(group.reduce_scatter_tensor(out["rst"], part(rank, 2 * SIZE), async_op=async_op))
    end(group.all_gather(lists["all_gather"], mine[4], async_op=async_op))
    end(group.all_gather_tensor(wide["agt"], mine[5], async_op=async_op))
    outputs = lists["gather"] if is_root else None
    end(group.gather(mine[6], dst=1, outputs=outputs, async_op=async_op))
    inputs = list(part(7, SIZE, 2)) if is_root else None
    end(group.scatter(out["scatter"], src=1, inputs=inputs, async_op=async_op))
    end(group.all_to_all(lists["a2a"], pieces, async_op=async_op))
    end(group.all_to_all_single(wide["a2as"], part(rank, 2 * SIZE), async_op=async_op))
    end(group.barrier(async_op=async_op))
    rows = part(rank, rank + 1, 2)
    variable = group.all_gather_variable(rows, async_op=async_op)
    at_root = group.gather_variable(rows, dst=1, async_op=async_op)
    for work in ends:
        work.wait()
        assert work.is_completed()
        assert work.exception() is None
    if async_op:
        variable, at_root = variable.wait(), at_root.wait()
    return {
        **out,
        **wide,
        **{name: torch.stack(tensors) for name, tensors in lists.items()},
        "sum": mine[0],
        "max": mine[1],
        "broadcast": mine[2],
        "reduce": mine[3],
        "variable": torch.cat(variable),
        "at_root": None if at_root is None else torch.cat(at_root),
    }


def expected(rank: int) -> dict[str, Any]:
    ranks, is_root = range(SIZE), rank == 1
    ragged = torch.cat([part(r, r + 1, 2) for r in ranks])
    gathered = torch.stack([part(r, 2) for r in ranks])
    swapped = torch.stack([part(r, SIZE, 2)[rank] for r in ranks])
    return {
        "sum": total(2),
        "max": part(SIZE - 1, 2),
        "broadcast": part(1, 2),
        "reduce": total(2) if is_root else part(rank, 2),
        "reduce_scatter": total(SIZE, 2)[rank],
        "rst": total(SIZE, 2)[rank],
        "all_gather": gathered,
        "agt": gathered.flatten(),
        "gather": gathered if is_root else torch.zeros(SIZE, 2),
        "scatter": part(7, SIZE, 2)[rank],
        "a2a": swapped,
        "a2as": swapped.flatten(),
        "variable": ragged,
        "at_root": ragged if is_root else None,
    }


@on_each_backend
@pytest.mark.parametrize("async_op", [False, True], ids=["blocking", "async_op"])
def test_each_operation(backend: str, async_op: bool) -> None:
    results = run_ranks(SIZE, lambda g: call_all(g, async_op=async_op), backend=backend)
    for rank, result in enumerate(results):
        wanted = expected(rank)
        assert result.keys() == wanted.keys()
        for name, value in wanted.items():
            if value is None:
                assert result[name] is None
            else:
                assert torch.equal(result[name], value), (name, rank, result[name], value)


@on_each_backend
def test_send_and_receive(backend: str) -> None:
    def run(group: ProcessGroup) -> Any:
        if group.rank == 0:
            works = [group.isend(part(n, 4), dst=1, tag=n) for n in (1, 2, 3)]
            group.send(part(9, 2, 2), dst=1)
            group.send(part(8, 3), dst=1)
            return [work.wait() for work in works]
        late = torch.zeros(4)
        work = group.irecv(late, src=0, tag=2)
        square = torch.zeros(2, 2)
        group.recv(square, src=0)
        free = group.recv_tensor(src=0)
        work.wait()
        for tag in (1, 3):
            assert torch.equal(group.recv_tensor(src=0, tag=tag), part(tag, 4))
        return late, square, free

    _, (late, square, free) = run_ranks(2, run, backend=backend)
    assert torch.equal(late, part(2, 4))
    assert torch.equal(square, part(9, 2, 2))
    assert torch.equal(free, part(8, 3))


@on_each_backend
def test_a_large_tensor_has_the_same_bits_on_all_ranks_and_backends(backend: str) -> None:
    def run(group: ProcessGroup) -> torch.Tensor:
        generator = torch.Generator().manual_seed(group.rank)
        tensor = torch.randn(300_001, generator=generator).to(torch.bfloat16)
        return group.all_reduce(tensor, op=ReduceOp.AVG)

    results = run_ranks(SIZE, run, backend=backend)
    parts = [
        torch.randn(300_001, generator=torch.Generator().manual_seed(r)).to(torch.bfloat16).float()
        for r in range(SIZE)
    ]
    reference = ((parts[0] + parts[1] + parts[2]) / SIZE).to(torch.bfloat16)
    assert all(torch.equal(result, reference) for result in results)


def error_of(call: Callable[[], Any]) -> BaseException | None:
    try:
        call()
    except Exception as error:
        return error
    return None


@on_each_backend
def test_ranks_that_call_different_things_all_hear_of_it_and_go_on(backend: str) -> None:
    def run(group: ProcessGroup) -> Any:
        shape = 3 if group.rank else 2
        errors = [
            error_of(lambda: group.all_reduce(torch.ones(shape))),
            error_of(lambda: group.barrier() if group.rank else group.broadcast(part(0, 2), src=0)),
            error_of(lambda: group.all_reduce(torch.ones(2, dtype=torch.int64), op=ReduceOp.AVG)),
        ]
        return errors, group.all_reduce(torch.ones(2))

    for errors, after in run_ranks(SIZE, run, backend=backend):
        assert [type(error) for error in errors] == [
            CollectiveMismatch,
            CollectiveMismatch,
            ConfigError,
        ]
        assert "rank 0 called all_reduce(sum) on float32[2], rank 1 called" in str(errors[0])
        assert after.tolist() == [SIZE, SIZE]


@on_each_backend
def test_a_rank_that_does_not_come_ends_the_call_at_its_deadline(backend: str) -> None:
    over = threading.Event()

    def run(group: ProcessGroup) -> Any:
        if group.rank == 1:
            assert over.wait(20)
            return None
        start = time.monotonic()
        error = error_of(lambda: group.all_reduce(torch.ones(2), timeout=0.5))
        seconds = time.monotonic() - start
        later = error_of(lambda: group.all_reduce(torch.ones(2)))
        over.set()
        return error, seconds, later

    error, seconds, later = run_ranks(2, run, backend=backend)[0]
    assert isinstance(error, CollectiveTimeout)
    assert 0.4 < seconds < 2.5
    assert isinstance(later, GroupAborted)
    assert "waiting for rank 1" in str(error)


@on_each_backend
def test_abort_wakes_all_ranks_with_its_cause(backend: str) -> None:
    def work(group: ProcessGroup) -> None:
        # Rank 2 may be through the barrier, and abort, while another rank is still in it.
        group.barrier()
        if group.rank == 2:
            group.abort("the weights are gone")
        group.all_reduce(torch.ones(2))

    def run(group: ProcessGroup) -> Any:
        return error_of(lambda: work(group))

    start = time.monotonic()
    results = run_ranks(SIZE, run, backend=backend)
    assert time.monotonic() - start < 6
    for error in results:
        assert isinstance(error, GroupAborted), error
        assert "the weights are gone" in str(error)


@on_each_backend
def test_a_rank_that_leaves_is_lost_to_the_others(backend: str) -> None:
    def run(group: ProcessGroup) -> Any:
        if group.rank == 1:
            group.barrier()
            group.close()
            group.close()
            return error_of(lambda: group.barrier())
        start = time.monotonic()
        # The other may have left while this rank is still in the barrier.
        error = error_of(lambda: group.barrier()) or error_of(
            lambda: group.all_reduce(torch.ones(2), timeout=8.0)
        )
        assert time.monotonic() - start < 5
        return error

    other, left = run_ranks(2, run, backend=backend)
    assert isinstance(left, GroupAborted | NotReady)
    assert isinstance(other, CommError if backend == "local" else PeerLost)
    assert backend == "gloo" or "rank 1" in str(other)


@on_each_backend
def test_subgroups_have_calls_of_their_own(backend: str) -> None:
    def run(group: ProcessGroup) -> Any:
        low = group.subgroup([0, 1])
        high = group.subgroup([3, 2])
        mine = low or high
        assert mine is not None
        assert (low is None) == (group.rank > 1)
        # The sub-groups are out of step with each other and with the whole.
        for _ in range(group.rank // 2):
            mine.barrier()
        tensor = mine.all_reduce(torch.tensor([float(group.rank)]))
        first = mine.broadcast(torch.tensor([group.rank]), src=0)
        inner = mine.subgroup([mine.rank])
        assert inner is not None
        alone = inner.all_reduce(torch.tensor([group.rank]))
        whole = group.all_reduce(torch.ones(1))
        if mine.rank == 0:
            mine.close()
        return mine.rank, tensor.item(), first.item(), alone.item(), whole.item(), mine.group_id

    results = run_ranks(4, run, backend=backend)
    assert [result[:5] for result in results] == [
        (0, 1.0, 0, 0, 4.0),
        (1, 1.0, 0, 1, 4.0),
        (1, 5.0, 3, 2, 4.0),
        (0, 5.0, 3, 3, 4.0),
    ]
    assert len({result[5] for result in results}) == 2


@pytest.mark.parametrize("ranks", [[], [0, 0], [0, 4], [-1]])
def test_wrong_ranks_of_a_subgroup_are_refused(ranks: list[int]) -> None:
    def run(group: ProcessGroup) -> None:
        with pytest.raises(ConfigError, match="ranks of a sub-group"):
            group.subgroup(ranks)

    run_ranks(2, run)


def test_a_broken_subgroup_leaves_the_whole_alone() -> None:
    def run(group: ProcessGroup) -> float:
        pair = group.subgroup([0, 1], timeout_seconds=0.3)
        if pair is not None and pair.rank == 0:
            with pytest.raises(CollectiveTimeout, match="rank 1"):
                pair.barrier()
            with pytest.raises(GroupAborted):
                pair.barrier()
        return group.all_reduce(torch.ones(1)).item()

    assert run_ranks(SIZE, run) == [SIZE] * SIZE


@pytest.mark.parametrize("seed", range(3))
def test_works_that_overlap_keep_to_their_tensors(seed: int) -> None:
    def run(group: ProcessGroup) -> list[float]:
        works = [group.all_reduce(torch.full((5,), float(n)), async_op=True) for n in range(20)]
        return [work.wait()[0].item() for work in works]

    results = run_ranks(SIZE, run, order=random.Random(seed))
    assert results == [[3.0 * n for n in range(20)]] * SIZE


def test_threads_of_a_rank_may_call_in_an_agreed_order() -> None:
    def run(group: ProcessGroup) -> list[float]:
        results = [0.0, 0.0]
        turn = threading.Event()

        def second() -> None:
            assert turn.wait(10)
            results[1] = group.all_reduce(torch.full((1,), 10.0)).item()

        thread = threading.Thread(target=second)
        thread.start()
        work = group.all_reduce(torch.ones(1), async_op=True)
        turn.set()
        results[0] = work.wait().item()
        thread.join(10)
        return results

    assert run_ranks(SIZE, run) == [[3.0, 30.0]] * SIZE


class Doubled(torch.autograd.Function):
    """Sums over the group in the forward, and in the backward too."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return group.all_reduce(tensor.clone())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.group.all_reduce(grads[0].clone()), None


@on_each_backend
def test_a_collective_within_autograd(backend: str) -> None:
    def run(group: ProcessGroup) -> tuple[float, float]:
        leaf = torch.tensor([group.rank + 1.0], requires_grad=True)
        out = Doubled.apply(leaf, group)
        (out * (group.rank + 1)).sum().backward()
        return out.item(), leaf.grad.item()

    assert run_ranks(SIZE, run, backend=backend) == [(6.0, 6.0)] * SIZE


def test_tensors_of_inference_mode_can_be_results() -> None:
    def run(group: ProcessGroup) -> tuple[float, float]:
        with torch.inference_mode():
            tensor = group.all_reduce(torch.ones(2))
            strided = group.all_reduce(torch.ones(4, 2).t())
            return tensor.sum().item(), strided.sum().item()

    assert run_ranks(SIZE, run) == [(6.0, 24.0)] * SIZE


def test_a_work_can_be_waited_for_in_pieces() -> None:
    go = threading.Event()

    def run(group: ProcessGroup) -> None:
        if group.rank == 1:
            assert go.wait(20)
            group.barrier()
            return
        work = group.barrier(async_op=True)
        with pytest.raises(CollectiveTimeout, match="it goes on"):
            work.wait(0.05)
        with pytest.raises(NotReady, match="still runs"):
            work.result()
        assert not work.is_completed()
        assert work.exception() is None
        go.set()
        work.wait()
        assert work.is_completed()
        assert work.result() is None

    run_ranks(2, run)


def test_a_work_that_fails_says_so_as_often_as_it_is_asked() -> None:
    def run(group: ProcessGroup) -> None:
        if group.rank == 1:
            return
        work = group.all_reduce(torch.ones(1), timeout=0.2, async_op=True)
        for _ in range(2):
            with pytest.raises(CollectiveTimeout):
                work.wait()
        assert isinstance(work.exception(), CollectiveTimeout)
        with pytest.raises(CollectiveTimeout):
            work.result()

    run_ranks(2, run)


def test_on_the_loops_own_thread_a_blocking_call_raises_at_once() -> None:
    def run(group: ProcessGroup) -> None:
        async def call() -> None:
            for method in (group.barrier, lambda: group.isend(torch.ones(1), dst=1), group.close):
                with pytest.raises(ConfigError, match="own thread"):
                    method()

        group._loop.run(call(), timeout=5)
        assert group.all_reduce(torch.ones(1)).item() == 2.0

    run_ranks(2, run)


def test_a_group_whose_loop_is_closed_can_still_be_closed() -> None:
    hub = LocalHub()
    group = init_process_group(GroupConfig(backend="local", rendezvous=hub, rank=0, world_size=1))
    hub.close()
    with pytest.raises(NotReady):
        group.barrier()
    group.close()


@pytest.mark.parametrize("is_interrupted", [False, True], ids=["ends", "Ctrl-C"])
def test_a_script_that_closes_nothing_ends(is_interrupted: bool, tmp_path: Path) -> None:
    script = f"""
import torch
from pathlib import Path
from stagemesh.comm.backends import GroupConfig, init_process_group
from stagemesh.comm.rendezvous import AddressList

meeting = AddressList(addresses=["127.0.0.1:0", "127.0.0.1:1"])
group = init_process_group(GroupConfig(rendezvous=meeting, rank=0, timeout_seconds=60))
print("ready", flush=True)
if {is_interrupted}:
    group.all_reduce(torch.ones(1))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "ready\n"
        if is_interrupted:
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    if is_interrupted:
        assert errors.rstrip().endswith("KeyboardInterrupt"), errors
    else:
        assert (process.returncode, errors) == (0, "")


def test_the_harness_raises_the_first_failure_with_all_tracebacks() -> None:
    def run(group: ProcessGroup) -> None:
        if group.rank == 1:
            raise ZeroDivisionError("the first")
        group.barrier()

    with pytest.raises(ZeroDivisionError, match="the first") as caught:
        run_ranks(SIZE, run)
    notes = "".join(caught.value.__notes__)
    assert "rank 0: " in notes
    assert "GroupAborted" in notes


async def answer(value: int, *, after: float = 0.0) -> int:
    await asyncio.sleep(after)
    return value


def test_the_loop_runs_and_ends() -> None:
    before = threading.active_count()
    with CommLoop() as loop:
        assert loop.run(answer(3), timeout=5) == 3
        running = loop.submit(answer(4, after=60))
        with pytest.raises(CollectiveTimeout, match=r"0\.1 s"):
            loop.run(answer(5, after=60), timeout=0.1)
        assert not running.done()
    assert isinstance(running.exception(0), NotReady)
    assert threading.active_count() == before
    loop.close()
    with pytest.raises(NotReady, match="closed"):
        loop.submit(answer(6))


def test_what_a_timeout_cancels_has_ended_when_it_raises() -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.1)
            ended.append(True)

    with CommLoop() as loop:
        with pytest.raises(CollectiveTimeout):
            loop.run(work(), timeout=0.1)
        assert ended == [True]


def test_ctrl_c_ends_the_wait_and_the_operation() -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    with CommLoop() as loop:
        main = threading.main_thread().ident
        timer = threading.Timer(0.3, signal.pthread_kill, [main, signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            loop.run(work(), timeout=20)
        timer.join()
        assert ended == [True]
        assert loop.run(answer(1), timeout=5) == 1


async def test_a_loop_that_somebody_else_runs_stays_open() -> None:
    running = asyncio.get_running_loop()
    loop = CommLoop(loop=running)
    assert await asyncio.to_thread(lambda: loop.run(answer(7), timeout=5)) == 7
    with pytest.raises(ConfigError, match="own thread"):
        loop.submit(answer(8))
    await asyncio.to_thread(loop.close)
    assert running.is_running()
    with pytest.raises(NotReady):
        await asyncio.to_thread(lambda: loop.submit(answer(9)))


def test_calls_start_in_the_order_of_their_submission() -> None:
    begun: list[int] = []

    async def work(number: int) -> None:
        begun.append(number)
        await asyncio.sleep(0)

    with CommLoop() as loop:
        futures = [loop.submit(work(number)) for number in range(200)]
        for future in futures:
            future.result(5)
    assert begun == list(range(200))
