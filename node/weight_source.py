"""Who sends weights to this node: the coordinator, or another node that has them in its cache."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio

from stagemesh.checkpoint.weight_part import WeightPart
from stagemesh.errors import PeerLost, ProtocolError, StagemeshError
from stagemesh.model_spec import ModelSpec
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.convert import our_version
from stagemesh.rpc.status import from_rpc_error
from stagemesh.rpc.v1 import weights_pb2, weights_pb2_grpc
from stagemesh.weight_transfer.content_hash import HASH_BYTES
from stagemesh.weight_transfer.manifest import ModelAssembler
from stagemesh.weight_transfer.part_messages import part_to_proto
from stagemesh.weight_transfer.service import MAX_HASHES_PER_CALL

_HAVE_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a tensor that was asked for."""

    index: int
    """Which of them."""
    offset: int
    """Of its first byte."""
    data: bytes


@dataclass(frozen=True, slots=True)
class KnownHash:
    """What a server says of a tensor's content."""

    content_hash: bytes
    """Of what was asked for."""
    whole_hash: bytes | None
    """Of all of the tensor, where a part was asked for and the server knows it."""


@dataclass(frozen=True, slots=True)
class Hashing:
    """How far a server is with hashing what was asked for."""

    hashes: Sequence[KnownHash]
    """Of the first tensors asked for; more of them each time."""
    hashed_bytes: int
    """What the server has hashed, for whomever: it changes while it works."""


class WeightSource:
    """Calls to one weight service. The channel connects on first use.

    Args:
        name: a node's id, or "coordinator".
        address: host:port.
        token: the cluster's token.
        node_id: this node, as the server counts it.
        stall_seconds: a server that sends nothing for so long is lost.
    """

    def __init__(
        self, name: str, address: str, *, token: str | None, node_id: str, stall_seconds: float
    ) -> None:
        self.name = name
        self.address = address
        self._node_id = node_id
        self._stall_seconds = stall_seconds
        self._channel = open_channel(address, token=token, kind="data")
        self._stub: weights_pb2_grpc.WeightServiceAsyncStub = weights_pb2_grpc.WeightServiceStub(
            self._channel
        )

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"

    async def describe(self, fingerprint: str, *, where: Path) -> ModelSpec:
        """A model without its data.

        Args:
            fingerprint: the model's.
            where: stands for the model's files, and in errors.

        Raises:
            StagemeshError: the server does not serve the model, or sends nothing for too long.
        """
        assembler = ModelAssembler(where=where)
        request = weights_pb2.DescribeModelRequest(version=our_version(), fingerprint=fingerprint)
        call = self._stub.DescribeModel(request)
        async with self._reading(call, "describe the model"):
            while isinstance(part := await self._next(call), weights_pb2.ModelPart):
                assembler.add(part)
        spec = assembler.spec()
        if spec.fingerprint != fingerprint:
            raise ProtocolError(f"{self} described another model than {fingerprint[:12]}")
        return spec

    async def hashes(
        self, fingerprint: str, wanted: Sequence[tuple[str, WeightPart | None]]
    ) -> AsyncGenerator[Hashing, None]:
        """Yield the hashes of tensors as the server computes them, all of them at last.

        Args:
            fingerprint: the model's.
            wanted: (name, part) of each; None for all of it.

        Raises:
            StagemeshError: the server does not have them, or sends nothing for too long.
        """
        known: list[KnownHash] = []
        for start in range(0, len(wanted), MAX_HASHES_PER_CALL):
            asked = wanted[start : start + MAX_HASHES_PER_CALL]
            request = weights_pb2.HashTensorsRequest(
                version=our_version(),
                fingerprint=fingerprint,
                tensors=[
                    weights_pb2.WantedTensor(
                        name=name, part=None if part is None else part_to_proto(part)
                    )
                    for name, part in asked
                ],
            )
            call = self._stub.HashTensors(request)
            async with self._reading(call, "hash weights"):
                while isinstance(found := await self._next(call), weights_pb2.TensorHashes):
                    known.extend(self._known(entry) for entry in found.hashes)
                    yield Hashing(known, found.hashed_bytes)
            if len(known) != start + len(asked):
                raise ProtocolError(f"{self}: {len(known) - start} hashes of {len(asked)} tensors")

    def _known(self, entry: weights_pb2.TensorHash) -> KnownHash:
        for content_hash in (entry.content_hash, entry.whole_hash or entry.content_hash):
            if len(content_hash) != HASH_BYTES:
                raise ProtocolError(f"{self}: a hash of {len(content_hash)} bytes")
        return KnownHash(entry.content_hash, entry.whole_hash or None)

    async def have(self, hashes: Sequence[bytes]) -> frozenset[bytes]:
        """Which of these tensors the server could send.

        Raises:
            StagemeshError: it does not say so within 3 s.
        """
        found: set[bytes] = set()
        for start in range(0, len(hashes), MAX_HASHES_PER_CALL):
            asked = hashes[start : start + MAX_HASHES_PER_CALL]
            request = weights_pb2.HaveTensorsRequest(version=our_version(), content_hashes=asked)
            try:
                reply = await self._stub.HaveTensors(request, timeout=_HAVE_SECONDS)
            except grpc.aio.AioRpcError as error:
                raise self._mapped(error, "ask for weights") from error
            if len(reply.is_present) != len(asked):
                raise ProtocolError(f"{self}: {len(reply.is_present)} answers to {len(asked)}")
            found |= {h for h, here in zip(asked, reply.is_present, strict=True) if here}
        return frozenset(found)

    async def chunks(self, wanted: Sequence[tuple[bytes, int]]) -> AsyncGenerator[Chunk, None]:
        """The data of tensors, each from an offset.

        Args:
            wanted: (hash, offset) of each.

        Raises:
            StagemeshError: the stream broke, or stood still for too long.
        """
        request = weights_pb2.FetchTensorsRequest(
            version=our_version(),
            node_id=self._node_id,
            tensors=[
                weights_pb2.TensorRange(content_hash=content_hash, offset=offset)
                for content_hash, offset in wanted
            ],
        )
        call = self._stub.FetchTensors(request)
        async with self._reading(call, "fetch weights"):
            while isinstance(chunk := await self._next(call), weights_pb2.TensorChunk):
                yield Chunk(chunk.index, chunk.offset, chunk.data)

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    @asynccontextmanager
    async def _reading(
        self, call: "grpc.aio.UnaryStreamCall[Any, Any]", operation: str
    ) -> AsyncGenerator[None, None]:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise self._mapped(error, operation) from error
        finally:
            call.cancel()

    async def _next(self, call: "grpc.aio.UnaryStreamCall[Any, Any]") -> object:
        try:
            async with asyncio.timeout(self._stall_seconds):
                return await call.read()
        except TimeoutError as error:
            raise PeerLost(
                f"{self} sent nothing for {self._stall_seconds:.0f} s", node_id=self.name
            ) from error

    def _mapped(self, error: grpc.aio.AioRpcError, operation: str) -> StagemeshError:
        return from_rpc_error(error, operation=operation, peer=str(self))
