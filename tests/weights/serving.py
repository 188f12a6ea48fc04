"""A weight service as a coordinator has it, and node-side sources that know no local files."""

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from coordinator.weight_server import DeployedWeights
from node.model_source import ModelSource
from node.model_wanted import ModelWanted, SourceConfig
from node.stage_fetch import Parts
from node.weight_cache import WeightCache
from node.weight_fetch import FetchLimits
from node.weight_progress import FetchProgress
from stagemesh.model_spec import ModelSpec, load_model_spec
from stagemesh.rpc.server import RpcServer, Service
from stagemesh.rpc.v1 import weights_pb2_grpc
from stagemesh.weight_transfer.blobs import BlobStore
from stagemesh.weight_transfer.content_hash import HashBook
from stagemesh.weight_transfer.disk_threads import DiskThreads
from stagemesh.weight_transfer.service import (
    WEIGHT_SERVICE_NAME,
    ModelBook,
    TransferLimits,
    WeightServicer,
)

FAST = FetchLimits(
    silence_seconds=2.0, stall_seconds=3.0, first_retry_seconds=0.02, last_retry_seconds=0.1
)
SMALL_CHUNKS = TransferLimits(chunk_bytes=1000)


@dataclass(slots=True)
class Served:
    """A running weight service."""

    address: str
    servicer: WeightServicer
    server: RpcServer
    spec: ModelSpec | None = None

    @property
    def sent_bytes(self) -> int:
        return self.servicer.sent_bytes.total()

    def stage_bytes(self, start: int, end: int) -> int:
        """Of the files, each content once."""
        assert self.spec is not None
        return sum(info.num_bytes for info in self.spec.tensors_for_stage(start, end))


@contextlib.asynccontextmanager
async def serve_store(
    store: BlobStore,
    *,
    models: ModelBook | None = None,
    limits: TransferLimits = SMALL_CHUNKS,
    spec: ModelSpec | None = None,
) -> AsyncGenerator[Served, None]:
    disk = DiskThreads("test-server")
    servicer = WeightServicer(store, disk=disk, models=models, limits=limits)
    service = Service(
        name=WEIGHT_SERVICE_NAME,
        servicer=servicer,
        add=weights_pb2_grpc.add_WeightServiceServicer_to_server,
    )
    server = RpcServer("127.0.0.1:0", services=[service])
    await server.start()
    try:
        yield Served(server.address, servicer, server, spec)
    finally:
        await server.stop(0)
        disk.close()


@contextlib.asynccontextmanager
async def serve_model(
    model: Path, *, book: HashBook | None = None, limits: TransferLimits = SMALL_CHUNKS
) -> AsyncGenerator[Served, None]:
    """Serve a model's weights from its files."""
    spec = load_model_spec(model)
    disk = DiskThreads("test-hashes")
    weights = DeployedWeights(lambda: [spec], disk=disk, book=book or HashBook(None))
    try:
        async with serve_store(weights, models=weights, limits=limits, spec=spec) as served:
            yield served
    finally:
        await weights.close()
        disk.close()


@dataclass(slots=True)
class FetchingNode:
    """What a daemon has for finding models."""

    source: ModelSource
    cache: WeightCache
    progress: FetchProgress

    async def load(self, wanted: ModelWanted, parts: Parts | None = None) -> ModelSpec:
        """Fetch a stage's weights, as a load does, and return where they are."""
        self.progress = FetchProgress()

        async def plan(_: ModelSpec) -> Parts:
            assert parts is not None
            return parts

        plan_parts = None if parts is None else plan
        async with self.source.open(wanted, self.progress, plan=plan_parts) as spec:
            return spec


@contextlib.contextmanager
def fetching_node(
    folder: Path,
    *,
    coordinator: str,
    node_id: str = "a",
    limits: FetchLimits = FAST,
    limit_bytes: int | None = None,
    free_bytes: Callable[[Path], int] | None = None,
    has_local_files: bool = False,
) -> Iterator[FetchingNode]:
    disk = DiskThreads("test-node")
    cache = WeightCache(folder, limit_bytes=limit_bytes, free_bytes=free_bytes)
    config = SourceConfig(
        node_id=node_id,
        coordinator=coordinator,
        token=None,
        has_local_files=has_local_files,
        limits=limits,
    )
    try:
        yield FetchingNode(ModelSource(config, cache=cache, disk=disk), cache, FetchProgress())
    finally:
        disk.close()


def stage_of(
    served: Served,
    start: int,
    end: int,
    *,
    peers: tuple[tuple[str, str], ...] = (),
    path: str = "/nowhere",
    ranks: tuple[str, ...] = (),
) -> ModelWanted:
    assert served.spec is not None
    return ModelWanted(
        name="model",
        path=path,
        reference="/nowhere",
        fingerprint=served.spec.fingerprint,
        start_layer=start,
        end_layer=end,
        peers=peers,
        ranks=ranks,
    )
