"""Loading a stage on the compute thread while progress is reported from the loop."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

import torch

from node.executor import ComputeThread
from node.free_memory import give_back_freed_memory
from node.stage_group import StageGroup
from stagemesh.errors import CheckpointError, ModelNotFound, NotReady
from stagemesh.inference.stage_engine import StageEngine
from stagemesh.model_spec import ModelSpec, load_model_spec
from stagemesh.models.tensor_parallel import TensorGroup

_PROGRESS_SECONDS = 0.2
_TRIM_BYTES = 64 * 2**20
"""So much read, freed memory is given back: what a load takes at most stays near its weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRequest:
    """What to load."""

    deployment_id: str
    incarnation: int
    model_name: str
    model_path: str
    model_reference: str
    fingerprint: str
    stage: int
    num_stages: int
    start_layer: int
    end_layer: int
    dtype: str
    kv_cache_bytes: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Bytes of weights read so far."""

    loaded_bytes: int
    total_bytes: int


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
    """

    def __init__(self, *, device: torch.device, compute: ComputeThread) -> None:
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
            ModelNotFound: the model is neither at the path nor known by its reference here.
            CheckpointError: its files are wrong, or are not those the coordinator planned with.
            UnsupportedModel: the family or the format cannot be run.
        """
        started = time.monotonic()
        counter = _Counter()
        compute = self._compute if group is None else group.compute
        tensor_group = None if group is None else group.tensor_group
        task = asyncio.create_task(
            compute.run(lambda: _load(request, self._device, counter, tensor_group)),
            name="load-stage",
        )
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=_PROGRESS_SECONDS)
                yield Progress(counter.loaded_bytes, counter.total_bytes)
            yield Loaded(task.result(), time.monotonic() - started)
        finally:
            counter.stopped.set()
            task.cancel()


class _Counter:
    """Shared between the compute thread, which counts, and the loop, which may stop it."""

    def __init__(self) -> None:
        self.loaded_bytes = 0
        self.total_bytes = 0
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
    request: StageRequest,
    device: torch.device,
    counter: _Counter,
    tensor_group: TensorGroup | None,
) -> StageEngine:
    spec = find_model(request)
    counter.total_bytes = sum(
        info.num_bytes for info in spec.tensors_for_stage(request.start_layer, request.end_layer)
    )
    engine = StageEngine.load(
        spec,
        start_layer=request.start_layer,
        end_layer=request.end_layer,
        dtype=request.dtype,
        device=device,
        kv_limit_bytes=request.kv_cache_bytes,
        on_bytes=counter.add,
        tensor_group=tensor_group,
    )
    give_back_freed_memory()
    return engine


def find_model(request: StageRequest) -> ModelSpec:
    """Find the model at the coordinator's path or by its reference, and check that it is the same.

    Raises:
        ModelNotFound: neither leads to a model here.
        CheckpointError: the files differ from those that the coordinator planned with.
    """
    tried = []
    for place in dict.fromkeys((request.model_path, request.model_reference)):
        if not place:
            continue
        is_path = place == request.model_path
        if is_path and not Path(place).exists():
            tried.append(place)
            continue
        try:
            spec = load_model_spec(place, name=request.model_name)
        except ModelNotFound:
            tried.append(place)
            continue
        if spec.fingerprint != request.fingerprint:
            raise CheckpointError(
                f"the files of {request.model_name} at {spec.path} are not those that the "
                f"coordinator planned with (fingerprint {spec.fingerprint[:12]}, expected "
                f"{request.fingerprint[:12]}); give all hosts the same files"
            )
        return spec
    raise ModelNotFound(
        f"this node has no files of {request.model_name}; tried {', '.join(tried)}. Put the "
        "model at the same path on each host, or on a shared folder"
    )
