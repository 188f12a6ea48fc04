"""A node's profile: its figures, its age, its turn, and that it neither blocks nor disturbs."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from node.device import read_memory
from node.executor import ComputeThread
from node.host_turn import host_turn
from node.measure import SpeedMeasurement
from node.profiler import Load, Profiler
from stagemesh.errors import CapacityExceeded, NotReady

CPU = torch.device("cpu")
SMALL_BYTES = 8 * 2**20


@pytest.fixture
def compute() -> Iterator[ComputeThread]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    thread = ComputeThread("compute-test")
    yield thread
    thread.close()
    torch.set_num_threads(threads)


def profiler(compute: ComputeThread, load=Load, device: torch.device = CPU) -> Profiler:
    return Profiler(device, compute=compute, load=load, max_weight_bytes=SMALL_BYTES)


async def test_a_profile_has_figures_for_all_dtypes(compute: ComputeThread) -> None:
    profile = await profiler(compute).measure()
    assert set(profile.speed.rates) == {"float32", "bfloat16", "float16"}
    for rates in profile.speed.rates.values():
        assert 1e7 < rates.stream_bytes_per_second < 1e13
        assert 1e7 < rates.flops_per_second < 1e16
    speed = profile.speed
    assert 1e-6 < speed.layer_overhead_seconds + speed.step_overhead_seconds < 1
    assert profile.process_bytes > 50 * 2**20
    memory = profile.memory
    assert 0 < memory.free_bytes <= memory.total_bytes == read_memory(CPU).total_bytes
    assert time.time() - profile.measured_at < 60


async def test_a_young_profile_is_kept_and_an_old_one_is_not(compute: ComputeThread) -> None:
    measurer = profiler(compute)
    first = await measurer.measure()
    assert await measurer.measure(max_age_seconds=60) is first
    assert await measurer.measure() is not first


async def test_the_loop_stays_free_while_it_is_measured(compute: ComputeThread) -> None:
    gaps: list[float] = []

    async def tick() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.01)
            gaps.append(time.perf_counter() - before)

    ticking = asyncio.create_task(tick())
    await profiler(compute).measure()
    # Negative control: on the loop itself each slice would hold it up.
    during = len(gaps)
    for each in SpeedMeasurement(CPU, weight_bytes=SMALL_BYTES).overhead_slices():
        each()
    ticking.cancel()
    assert during > 10
    assert len(gaps) == during


async def test_a_node_that_computes_is_left_alone(compute: ComputeThread) -> None:
    steps = iter(range(1, 10**6))
    measurer = profiler(compute, load=lambda: Load(num_steps=next(steps)))
    with pytest.raises(NotReady, match=r"no pause .* within 0\.5 s"):
        await measurer.measure(timeout_seconds=0.5)
    assert measurer.profile is None


async def test_a_pause_is_long_enough(compute: ComputeThread) -> None:
    started = time.monotonic()
    measurer = profiler(
        compute,
        load=lambda: Load(num_steps=int(10 * min(time.monotonic() - started, 0.5)), stage_bytes=7),
    )
    await measurer.measure()
    assert measurer.profile is not None
    assert time.monotonic() - started > 0.5


async def test_what_a_stage_holds_is_not_the_process(compute: ComputeThread) -> None:
    held = 200 * 2**20  # well above what the process itself gains or frees between the two
    alone = await profiler(compute).measure()
    beside = await profiler(compute, load=lambda: Load(stage_bytes=held)).measure()
    assert alone.process_bytes - beside.process_bytes > held / 2


async def test_a_device_that_cannot_is_an_error_of_ours(compute: ComputeThread) -> None:
    with pytest.raises(CapacityExceeded, match="measuring meta failed"):
        await profiler(compute, device=torch.device("meta")).measure()


async def test_daemons_of_a_host_take_turns(tmp_path: Path) -> None:
    path, order = tmp_path / "turn", []

    async def measured(name: str) -> None:
        async with host_turn(path):
            order.append(f"{name} begins")
            await asyncio.sleep(0.02)
            order.append(f"{name} ends")

    await asyncio.gather(*(measured(name) for name in "abc"))
    assert [line[0] for line in order[::2]] == [line[0] for line in order[1::2]]
    # Without a place for the lock nobody waits, and a link in its place is not followed.
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for place in (tmp_path / "no" / "folder", tmp_path / "link"):
        async with host_turn(place), host_turn(place):
            pass
    assert not (tmp_path / "elsewhere").exists()


async def test_a_turn_ends_with_its_owner(tmp_path: Path) -> None:
    async with host_turn(tmp_path / "turn"):
        waiting = asyncio.create_task(_take(tmp_path / "turn"))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
    await asyncio.wait_for(_take(tmp_path / "turn"), 1)


async def _take(path: Path) -> None:
    async with host_turn(path):
        pass
