"""WeightService: sends tensors by the hash of their content, from a coordinator or a node."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import grpc.aio

from stagemesh.checkpoint.weight_part import WeightPart
from stagemesh.errors import CapacityExceeded, NotReady, PeerLost, ProtocolError
from stagemesh.model_spec import ModelSpec, TensorInfo
from stagemesh.rpc.convert import check_version
from stagemesh.rpc.v1 import weights_pb2, weights_pb2_grpc
from stagemesh.weight_transfer.blobs import Blob, BlobStore, read_blob
from stagemesh.weight_transfer.content_hash import HASH_BYTES, HashedTensor
from stagemesh.weight_transfer.disk_threads import DiskThreads
from stagemesh.weight_transfer.manifest import model_parts
from stagemesh.weight_transfer.part_messages import part_from_proto

WEIGHT_SERVICE_NAME = "stagemesh.rpc.v1.WeightService"

MAX_TENSORS_PER_CALL = 1024
"""Most tensors of one FetchTensors call."""
MAX_HASHES_PER_CALL = 10_000
"""Most hashes of one HashTensors or HaveTensors call."""

_SIGN_SECONDS = 1.0
_HASHES_PER_PART = 1000
_MAX_NAMES = 10_000
_OTHERS = "others"

Context = grpc.aio.ServicerContext[Any, Any]


class ModelBook(Protocol):
    """The models that a process can describe."""

    def model(self, fingerprint: str) -> ModelSpec | None:
        """The model with this fingerprint, where it is served here."""
        ...

    async def hash_of(self, info: TensorInfo, part: WeightPart | None = None) -> HashedTensor:
        """The hash of a tensor's data, or of a part of it."""
        ...

    @property
    def hashed_bytes(self) -> int:
        """Bytes that were read to hash them since the start."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferLimits:
    """Bounds of what is sent at once."""

    chunk_bytes: int = 2**20
    """Bytes of one message."""
    max_transfers: int = 128
    """Streams at once; further callers are refused and come again."""
    max_transfers_per_node: int = 8
    """Of one node."""
    max_reads: int = 4
    """Chunks that are read from disk at once; streams take turns, so all of them go on."""
    write_seconds: float = 60.0
    """A caller that takes no chunk for so long has lost its stream."""


class WeightServicer(weights_pb2_grpc.WeightServiceServicer):
    """Sends what a store holds. Holds one chunk in memory for each stream.

    Args:
        store: what there is.
        disk: threads for reading.
        models: what can be described; None for a process that has only blobs.
        limits: bounds.
    """

    def __init__(
        self,
        store: BlobStore,
        *,
        disk: DiskThreads,
        models: ModelBook | None = None,
        limits: TransferLimits | None = None,
    ) -> None:
        self.sent_bytes: Counter[str] = Counter()
        """Bytes of weights sent so far, by the node that asked."""
        self._store = store
        self._disk = disk
        self._models = models
        self._limits = limits or TransferLimits()
        self._reads = asyncio.Semaphore(self._limits.max_reads)
        self._transfers: Counter[str] = Counter()

    @property
    def num_transfers(self) -> int:
        """Streams that are open."""
        return self._transfers.total()

    async def DescribeModel(  # noqa: N802
        self, request: weights_pb2.DescribeModelRequest, context: Context
    ) -> AsyncGenerator[weights_pb2.ModelPart, None]:
        """Describe a model."""
        check_version(request.version, peer="the caller")
        _, spec = self._model(request.fingerprint)
        for part in model_parts(spec):
            yield part

    async def HashTensors(  # noqa: N802
        self, request: weights_pb2.HashTensorsRequest, context: Context
    ) -> AsyncGenerator[weights_pb2.TensorHashes, None]:
        """Tell the hashes of tensors, or of parts of them."""
        check_version(request.version, peer="the caller")
        models, spec = self._model(request.fingerprint)
        _check_count(len(request.tensors))
        wanted = [_wanted(spec, item) for item in request.tensors]
        async with contextlib.aclosing(_hashes(models, wanted)) as found:
            async for hashes in found:
                yield hashes

    def _model(self, fingerprint: str) -> tuple[ModelBook, ModelSpec]:
        spec = None if self._models is None else self._models.model(fingerprint)
        if spec is None or self._models is None:
            raise NotReady(
                f"no model with fingerprint {fingerprint[:12]!r} is served here; "
                "load it with the coordinator that serves it"
            )
        return self._models, spec

    # A coroutine that writes, which the generated types do not know: so a write has a deadline.
    async def FetchTensors(  # type: ignore[override]  # noqa: N802
        self, request: weights_pb2.FetchTensorsRequest, context: Context
    ) -> None:
        """Send the data of tensors, each from the offset asked for."""
        check_version(request.version, peer=f"node {request.node_id!r:.100}")
        wanted = [(item.content_hash, item.offset) for item in request.tensors]
        with self._slot(request.node_id):
            blobs = await self._disk.run(partial(self._find_all, wanted))
            for index, (blob, (_, offset)) in enumerate(zip(blobs, wanted, strict=True)):
                for start in range(offset, blob.num_bytes, self._limits.chunk_bytes):
                    data = await self._read(blob, start)
                    chunk = weights_pb2.TensorChunk(index=index, offset=start, data=data)
                    await self._write(context, chunk, node_id=request.node_id)

    async def HaveTensors(  # noqa: N802
        self, request: weights_pb2.HaveTensorsRequest, context: Context
    ) -> weights_pb2.HaveTensorsReply:
        """Tell which of some hashes are here."""
        check_version(request.version, peer="the caller")
        hashes = list(request.content_hashes)
        _check_count(len(hashes))
        for content_hash in hashes:
            _check_hash(content_hash)
        present = await self._disk.run(
            lambda: [self._store.find(content_hash) is not None for content_hash in hashes]
        )
        return weights_pb2.HaveTensorsReply(is_present=present)

    @contextlib.contextmanager
    def _slot(self, node_id: str) -> Iterator[None]:
        limits = self._limits
        if (
            self._transfers.total() >= limits.max_transfers
            or self._transfers[node_id] >= limits.max_transfers_per_node
        ):
            raise CapacityExceeded(
                f"{self._transfers.total()} transfers of weights are under way, "
                f"{self._transfers[node_id]} of them to node {node_id!r:.100}; at most "
                f"{limits.max_transfers} and {limits.max_transfers_per_node} are. Try again later"
            )
        self._transfers[node_id] += 1
        try:
            yield
        finally:
            self._transfers[node_id] -= 1
            if not self._transfers[node_id]:
                del self._transfers[node_id]

    def _find_all(self, wanted: Sequence[tuple[bytes, int]]) -> list[Blob]:
        if not 0 < len(wanted) <= MAX_TENSORS_PER_CALL:
            raise ProtocolError(
                f"from 1 to {MAX_TENSORS_PER_CALL} tensors a call, got {len(wanted)}"
            )
        blobs = []
        for content_hash, offset in wanted:
            _check_hash(content_hash)
            blob = self._store.find(content_hash)
            if blob is None:
                raise NotReady(
                    f"no tensor with hash {content_hash.hex()[:12]} is here (any more); "
                    "describe the model again, or ask somebody else"
                )
            if offset > blob.num_bytes:
                raise ProtocolError(
                    f"tensor {content_hash.hex()[:12]} has {blob.num_bytes} bytes, "
                    f"none at offset {offset}"
                )
            blobs.append(blob)
        return blobs

    async def _read(self, blob: Blob, start: int) -> bytes:
        num_bytes = min(self._limits.chunk_bytes, blob.num_bytes - start)
        # First come, first served: each stream reads a chunk in turn.
        async with self._reads:
            return await self._disk.run(partial(read_blob, blob, offset=start, num_bytes=num_bytes))

    async def _write(
        self, context: Context, chunk: weights_pb2.TensorChunk, *, node_id: str
    ) -> None:
        try:
            async with asyncio.timeout(self._limits.write_seconds):
                await context.write(chunk)
        except TimeoutError as error:
            raise PeerLost(
                f"node {node_id!r:.100} took no chunk for {self._limits.write_seconds:.0f} s",
                node_id=node_id,
            ) from error
        known = node_id in self.sent_bytes or len(self.sent_bytes) < _MAX_NAMES
        self.sent_bytes[node_id if known else _OTHERS] += len(chunk.data)


def _check_hash(content_hash: bytes) -> None:
    if len(content_hash) != HASH_BYTES:
        raise ProtocolError(f"a hash has {HASH_BYTES} bytes, got {len(content_hash)}")


def _check_count(count: int) -> None:
    if count > MAX_HASHES_PER_CALL:
        raise ProtocolError(f"at most {MAX_HASHES_PER_CALL} hashes a call, got {count}")


def _wanted(
    spec: ModelSpec, item: weights_pb2.WantedTensor
) -> tuple[TensorInfo, WeightPart | None]:
    info = spec.tensors.get(item.name)
    if info is None:
        raise ProtocolError(f"{spec.name} has no tensor {item.name!r:.100}")
    return info, part_from_proto(item.part, info=info) if item.HasField("part") else None


async def _hashes(
    models: ModelBook, wanted: Sequence[tuple[TensorInfo, WeightPart | None]]
) -> AsyncGenerator[weights_pb2.TensorHashes, None]:
    """Hashes as they become known, with a sign of life each second while there is none."""
    hashes: list[weights_pb2.TensorHash] = []
    sent_at = time.monotonic()
    for info, part in wanted:
        task = asyncio.ensure_future(models.hash_of(info, part))
        try:
            while True:
                await asyncio.wait({task}, timeout=_SIGN_SECONDS)
                now = time.monotonic()
                if now - sent_at >= _SIGN_SECONDS or len(hashes) >= _HASHES_PER_PART:
                    yield weights_pb2.TensorHashes(hashes=hashes, hashed_bytes=models.hashed_bytes)
                    hashes, sent_at = [], now
                if task.done():
                    break
        finally:
            task.cancel()
        found = task.result()
        whole_hash = b"" if part is None else found.whole_hash or b""
        hashes.append(
            weights_pb2.TensorHash(content_hash=found.content_hash, whole_hash=whole_hash)
        )
    yield weights_pb2.TensorHashes(hashes=hashes, hashed_bytes=models.hashed_bytes)
