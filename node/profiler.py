"""The node's own profile: measured once it is up, kept, and measured anew when someone asks.

A measurement is a row of short slices on the compute thread (`node.measure`); daemons of one host
take turns, and one that has just started waits a moment for others that start. Before each slice it
waits until no step has been computed for a moment, so a node that serves is measured in its pauses;
if there are none before the deadline, the old profile stays.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil
import torch

from node.device import DeviceMemory, read_memory
from node.executor import ComputeThread
from node.free_memory import give_back_freed_memory
from node.host_turn import host_turn
from node.measure import PAUSE_SECONDS, DeviceSpeed, Slice, SpeedMeasurement
from node.other_memory import OtherMemory
from node.quiet_host import until_quiet
from stagemesh.errors import CapacityExceeded, NotReady, UnsupportedModel
from stagemesh.rpc.probe import TakeTurn, Turn

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_SECONDS = 30.0
_IDLE_SECONDS = 0.2
_MEMORY_SHARE = 0.25
_LEAST_WEIGHT_BYTES = 2**20
_MOST_WEIGHT_BYTES = 128 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A node as it was measured."""

    speed: DeviceSpeed
    """Rates and overheads."""
    memory: DeviceMemory
    """Of the device."""
    process_bytes: int
    """What the process takes without a stage."""
    measure_seconds: float
    """How long measuring took, waiting included."""
    measured_at: float
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What runs on the node besides."""

    num_steps: int = 0
    """Steps computed so far."""
    stage_bytes: int = 0
    """Weights and caches held."""


class Profiler:
    """Measures and remembers.

    Args:
        device: what computes.
        compute: its thread.
        load: what stages do, now.
        max_weight_bytes: memory that a measurement may take, at most.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        compute: ComputeThread,
        load: Callable[[], Load],
        max_weight_bytes: int = _MOST_WEIGHT_BYTES,
    ) -> None:
        self.device = device
        self._compute = compute
        self._load = load
        self._max_weight_bytes = max_weight_bytes
        self._lock = asyncio.Lock()
        self._seen_steps = 0
        self.profile: Profile | None = None

    async def measure(
        self, *, max_age_seconds: float = 0.0, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    ) -> Profile:
        """The profile, measured now unless one that is young enough is there.

        Raises:
            NotReady: the node had no pause before the deadline.
            CapacityExceeded: the device could not run the measurement.
        """
        try:
            async with asyncio.timeout(timeout_seconds), self._lock:
                kept = self.profile
                if kept is not None and time.time() - kept.measured_at <= max_age_seconds:
                    return kept
                async with host_turn():
                    await until_quiet()
                    self.profile = await self._measure()
                return self.profile
        except TimeoutError:
            raise NotReady(
                f"the node had no pause to be measured in within {timeout_seconds:g} s; its last "
                "profile stays"
            ) from None
        except (RuntimeError, MemoryError, UnsupportedModel) as error:  # how a full device fails
            raise CapacityExceeded(f"measuring {self.device} failed: {error}") from error

    async def wait_idle(self) -> None:
        """Return once no step was computed for a moment: at once when none was since last time."""
        while (steps := self._load().num_steps) != self._seen_steps:
            self._seen_steps = steps
            await asyncio.sleep(_IDLE_SECONDS)

    @contextlib.contextmanager
    def turns(self) -> Iterator[TakeTurn]:
        """Turns of a stage that has nothing to compute, for probes of links."""
        kept: list[OtherMemory] = []

        def turn() -> Turn:
            begun = time.perf_counter()
            if not kept:
                kept.append(OtherMemory(self.device))
            kept[0].read()
            return Turn(begun=begun, ended=time.perf_counter())

        yield lambda: self._compute.run(turn)
        kept.clear()

    async def _measure(self) -> Profile:
        started = time.monotonic()
        memory = read_memory(self.device)
        share = int(memory.free_bytes * _MEMORY_SHARE)
        speed = SpeedMeasurement(
            self.device,
            weight_bytes=min(max(share, _LEAST_WEIGHT_BYTES), self._max_weight_bytes),
        )
        await self._run(speed.overhead_slices())
        await self._compute.run(give_back_freed_memory)
        # Now the libraries are loaded and a stage has run, but no weights are held yet.
        process_bytes = psutil.Process().memory_info().rss - self._load().stage_bytes
        await self._run(speed.rate_slices())
        await self._compute.run(give_back_freed_memory)
        profile = Profile(
            speed=speed.result(),
            memory=memory,
            process_bytes=max(0, process_bytes),
            measure_seconds=time.monotonic() - started,
            measured_at=time.time(),
        )
        logger.info("measured", extra={"measure_seconds": round(profile.measure_seconds, 2)})
        return profile

    async def _run(self, slices: Iterator[Slice]) -> None:
        for each in slices:
            # The thread falls asleep meanwhile, as it does between the steps of a pipeline.
            await asyncio.sleep(PAUSE_SECONDS)
            await self.wait_idle()
            await self._compute.run(each)
