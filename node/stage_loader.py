"""Loading a stage on the compute thread while progress is reported from the loop."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import partial

import torch

from node.executor import ComputeThread
from node.free_memory import give_back_freed_memory
from node.model_source import ModelSource
from node.model_wanted import ModelWanted
from node.stage_fetch import Parts
from node.stage_group import StageGroup
from node.weight_progress import FetchProgress
from stagemesh.errors import NotReady
from stagemesh.inference.read_plan import plan_reads
from stagemesh.inference.stage_engine import StageEngine
from stagemesh.model_spec import ModelSpec
from stagemesh.models.tensor_group import TensorGroup
from stagemesh.weight_transfer.cache_folder import compiled_code_folder

_PROGRESS_SECONDS = 0.2
_STOP_SECONDS = 5.0
_MEET_SECONDS = 24 * 3600.0
"""Weights of a stage's ranks come at different times; the coordinator sees when none comes."""
_TRIM_BYTES = 64 * 2**20
"""So much read, freed memory is given back: what a load takes at most stays near its weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRequest:
    """What to load."""

    deployment_id: str
    incarnation: int
    model: ModelWanted
    stage: int
    num_stages: int
    dtype: str
    kv_cache_bytes: int
    quantize: str = "none"
    compile: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """Bytes of weights read so far, and fetched where there are no files."""

    loaded_bytes: int
    total_bytes: int
    fetch: FetchProgress


@dataclass(frozen=True, slots=True)
class Loaded:
    """The end of a load."""

    engine: StageEngine
    seconds: float


class StageLoader:
    """Loads stages for one device.

    Args:
        device: where stages run.
        compute: the device's thread.
        models: where weights come from.
    """

    def __init__(
        self, *, device: torch.device, compute: ComputeThread, models: ModelSource
    ) -> None:
        self._models = models
        self._device = device
        self._compute = compute

    async def load(
        self, request: StageRequest, *, group: StageGroup | None = None
    ) -> AsyncGenerator[Progress | Loaded, None]:
        """Yield progress a few times a second, then the loaded stage.

        Closing the generator stops the load at its next tensor.

        Args:
            request: what to load.
            group: the ranks that run the stage together; all load it at the same time.

        Raises:
            ModelNotFound: the model is neither here nor can it be fetched.
            CheckpointError: its files are wrong, or are not those the coordinator planned with.
            CapacityExceeded: what is fetched does not fit on the disk.
            UnsupportedModel: the family or the format cannot be run.
        """
        started = time.monotonic()
        counter = _Counter()
        task = asyncio.create_task(self._find_and_load(request, group, counter), name="load-stage")
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=_PROGRESS_SECONDS)
                yield Progress(counter.loaded_bytes, counter.total_bytes, counter.fetch)
            yield Loaded(task.result(), time.monotonic() - started)
        finally:
            counter.stopped.set()
            task.cancel()
            # A fetch lets go of its files and channels; what computes is not waited for.
            await asyncio.wait({task}, timeout=_STOP_SECONDS)

    async def _find_and_load(
        self, request: StageRequest, group: StageGroup | None, counter: "_Counter"
    ) -> StageEngine:
        plan = None if group is None else partial(_plan_parts, request, group)
        async with self._models.open(request.model, counter.fetch, plan=plan) as spec:
            if group is None:
                return await self._compute.run(
                    lambda: _load(spec, request, self._device, counter, None)
                )
            # The collectives of loading have deadlines that a slow network must not use up.
            await group.tensor_group.process_group.async_group.barrier(timeout=_MEET_SECONDS)
            return await group.compute.run(
                lambda: _load(spec, request, self._device, counter, group.tensor_group)
            )


async def _plan_parts(request: StageRequest, group: StageGroup, spec: ModelSpec) -> Parts:
    """What this rank reads. On the group's thread: it takes a second for a large model."""
    return await group.compute.run(
        lambda: plan_reads(
            spec,
            start_layer=request.model.start_layer,
            end_layer=request.model.end_layer,
            dtype=request.dtype,
            quantize=request.quantize,
            shares=group.tensor_group.shares,
            rank=group.tensor_group.rank,
        )
    )


class _Counter:
    """Shared between the compute thread, which counts, and the loop, which may stop it."""

    def __init__(self) -> None:
        self.loaded_bytes = 0
        self.total_bytes = 0
        self.fetch = FetchProgress()
        self.stopped = threading.Event()
        self._until_trim = _TRIM_BYTES

    def add(self, num_bytes: int) -> None:
        if self.stopped.is_set():
            raise NotReady("the load was stopped, since nobody waits for it any more")
        self.loaded_bytes += num_bytes
        self._until_trim -= num_bytes
        if self._until_trim <= 0:
            self._until_trim = _TRIM_BYTES
            give_back_freed_memory()


def _load(
    spec: ModelSpec,
    request: StageRequest,
    device: torch.device,
    counter: _Counter,
    tensor_group: TensorGroup | None,
) -> StageEngine:
    start_layer, end_layer = request.model.start_layer, request.model.end_layer
    counter.total_bytes = sum(i.held_bytes for i in spec.tensors_for_stage(start_layer, end_layer))
    engine = StageEngine.load(
        spec,
        start_layer=start_layer,
        end_layer=end_layer,
        dtype=request.dtype,
        device=device,
        kv_limit_bytes=request.kv_cache_bytes,
        on_bytes=counter.add,
        tensor_group=tensor_group,
        quantize=request.quantize,
        compile_folder=compiled_code_folder() if request.compile else None,
    )
    give_back_freed_memory()
    return engine
