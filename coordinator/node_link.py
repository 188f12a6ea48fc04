"""One node as the coordinator calls it: load, link, unload, steps, results.

The only module of the coordinator, besides its gRPC service, that names wire messages of nodes.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass

import grpc
import grpc.aio

from coordinator.membership import NodeInfo
from stagemesh.errors import PeerLost, ProtocolError, StagemeshError
from stagemesh.layout import StageAssignment
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.convert import (
    our_version,
    step_header_to_proto,
    step_result_from_proto,
    tensor_shares_to_proto,
)
from stagemesh.rpc.handshake import STREAM_ERRORS, named, shake_hands, why_ended
from stagemesh.rpc.status import from_rpc_error
from stagemesh.rpc.v1 import comm_pb2, node_pb2, node_pb2_grpc, weights_pb2
from stagemesh.steps import Step, StepResult

logger = logging.getLogger(__name__)

_CONTROL_TIMEOUT_SECONDS = 10.0
_SEND_TIMEOUT_SECONDS = 10.0

StepCall = grpc.aio.StreamStreamCall[node_pb2.StepFrame, node_pb2.StepAck]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOrder:
    """What a node shall load."""

    deployment_id: str
    incarnation: int
    model_name: str
    model_path: str
    model_reference: str
    fingerprint: str
    num_stages: int
    dtype: str
    max_context_tokens: int
    tensor_backend: str = "grpc"
    """What carries the tensors of ranks that share a stage."""
    group_seconds: float = 60.0
    """How long such a rank waits for the others within a step."""
    quantize: str = "none"
    compile: bool = False
    weight_peers: tuple[tuple[str, str], ...] = ()
    """(id, address) of nodes that may have weights in their caches, the likeliest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchState:
    """How far a node without files is with fetching the weights of its stage, in bytes."""

    total_bytes: int
    """Of the stage; 0 while its tensors are still hashed."""
    present_bytes: int
    """In the node's cache."""
    hashed_bytes: int
    """Hashed by this coordinator since its start."""
    received: Mapping[str, int]
    """What came over the network, by who sent it."""

    @property
    def text(self) -> str:
        """Where the weights come from, for a person."""
        if not self.total_bytes:
            return "hashing weights"
        return f"weights from {', '.join(self.received) or 'its cache'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress:
    """How far a node is."""

    loaded_bytes: int
    total_bytes: int
    is_ready: bool = False
    load_seconds: float = 0.0
    weight_bytes: int = 0
    fetch: FetchState | None = None
    """Where the node has no files of the model."""

    @property
    def is_fetching(self) -> bool:
        """Whether weights are still on their way to the node's disk."""
        fetch = self.fetch
        return fetch is not None and not self.loaded_bytes


class LoadClock:
    """When a stage's load last moved on, on any of its ranks: who is through waits for the rest."""

    def __init__(self) -> None:
        self._moved_at = time.monotonic()

    def move(self) -> None:
        """A byte was loaded."""
        self._moved_at = time.monotonic()

    def left(self, stall_seconds: float) -> float:
        """Seconds until the load has stood still for so long; 0 when it has."""
        return max(0.0, stall_seconds - (time.monotonic() - self._moved_at))


class NodeLink:
    """Calls to one node. Channels connect on first use.

    Args:
        node: who it is.
        token: the cluster's token.
    """

    def __init__(self, node: NodeInfo, *, token: str | None) -> None:
        self.node = node
        self._control = open_channel(node.address, token=token, kind="control")
        # Steps and results of one deployment share this channel: both are small at this end.
        self._data = open_channel(node.address, token=token, kind="data")
        self._control_stub: node_pb2_grpc.NodeServiceAsyncStub = node_pb2_grpc.NodeServiceStub(
            self._control
        )
        self._data_stub: node_pb2_grpc.NodeServiceAsyncStub = node_pb2_grpc.NodeServiceStub(
            self._data
        )

    def __str__(self) -> str:
        return f"node {self.node.node_id} ({self.node.address})"

    async def load_stage(
        self,
        order: LoadOrder,
        assignment: StageAssignment,
        *,
        rank: int,
        members: Sequence[NodeInfo],
        clock: LoadClock,
        stall_seconds: float,
    ) -> AsyncGenerator[LoadProgress, None]:
        """Load a rank's part of a stage; yields progress, the last with `is_ready`.

        There is no limit on the whole load, whose size is not known here, but on standing still.

        Args:
            order: what all stages load.
            assignment: the stage.
            rank: which of its ranks this node is.
            members: the nodes of its ranks.
            clock: of the stage.
            stall_seconds: how long no rank of the stage may have loaded a byte.

        Raises:
            PeerLost: the node is gone, or loaded no byte for `stall_seconds`.
            ModelError: the node cannot load the files.
        """
        call = self._control_stub.LoadStage(_load_request(order, assignment, rank, members))
        where = f"load stage {assignment.stage} on {self}"
        loaded, fetched = -1, None
        try:
            while True:
                async with asyncio.timeout(clock.left(stall_seconds)):
                    message = await call.read()
                if message is grpc.aio.EOF:
                    raise ProtocolError(f"{where}: the node ended the load without a result")
                assert isinstance(message, node_pb2.LoadStageProgress)
                fetch = _fetch_state(message)
                if (message.loaded_bytes, fetch) != (loaded, fetched):
                    loaded, fetched = message.loaded_bytes, fetch
                    clock.move()
                yield LoadProgress(
                    loaded_bytes=message.loaded_bytes,
                    total_bytes=message.total_bytes,
                    is_ready=message.HasField("ready"),
                    load_seconds=message.ready.load_seconds,
                    weight_bytes=message.ready.weight_bytes,
                    fetch=fetch,
                )
                if message.HasField("ready"):
                    return
        except TimeoutError as error:
            raise PeerLost(
                f"{where}: no byte for {stall_seconds:.0f} s, at {max(loaded, 0)} bytes",
                node_id=self.node.node_id,
            ) from error
        except grpc.aio.AioRpcError as error:
            raise self._mapped(error, where) from error
        finally:
            call.cancel()

    async def link_stage(
        self,
        deployment_id: str,
        next_node: NodeInfo,
        *,
        next_tensor_rank: int,
        timeout_seconds: float,
    ) -> float:
        """Let the node open its stream to a rank of the next stage; return the seconds it took.

        Raises:
            PeerLost: one of the two is gone or does not answer in time.
        """
        request = node_pb2.LinkStageRequest(
            deployment_id=deployment_id,
            next_node_id=next_node.node_id,
            next_address=next_node.address,
            next_tensor_rank=next_tensor_rank,
            timeout_seconds=timeout_seconds,
        )
        where = f"link to node {next_node.node_id} ({next_node.address}) on {self}"
        try:
            # The node's own limit is the shorter one, since its error says more.
            reply = await self._control_stub.LinkStage(request, timeout=timeout_seconds + 2.0)
        except grpc.aio.AioRpcError as error:
            raise self._mapped(error, where) from error
        return reply.connect_seconds

    async def unload_stage(self, deployment_id: str) -> None:
        """Free a stage.

        Raises:
            StagemeshError: the node did not answer.
        """
        request = node_pb2.UnloadStageRequest(deployment_id=deployment_id)
        try:
            await self._control_stub.UnloadStage(request, timeout=_CONTROL_TIMEOUT_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise self._mapped(error, f"unload {deployment_id} on {self}") from error

    async def open_steps(self, order: LoadOrder, *, tensor_rank: int) -> "StepStream":
        """Open the stream of steps to a rank of the first stage.

        Raises:
            StagemeshError: the node does not accept it in time.
        """
        call = self._data_stub.RunSteps()
        hello = node_pb2.StepHello(
            version=our_version(),
            deployment_id=order.deployment_id,
            incarnation=order.incarnation,
            stage=0,
            tensor_rank=tensor_rank,
        )
        await shake_hands(
            call,
            node_pb2.StepFrame(hello=hello),
            operation="open steps",
            peer=str(self),
            node_id=self.node.node_id,
            timeout_seconds=_CONTROL_TIMEOUT_SECONDS,
        )
        return StepStream(self, call)

    async def watch_results(self, order: LoadOrder) -> AsyncGenerator[StepResult | None, None]:
        """Yield None once the node accepts the watcher, then results and failures of its stage.

        Raises:
            StagemeshError: the stream ended for any reason but its closing here.
        """
        request = node_pb2.WatchResultsRequest(
            deployment_id=order.deployment_id, incarnation=order.incarnation
        )
        call = self._data_stub.WatchResults(request)
        where = f"watch results on {self}"
        try:
            async with asyncio.timeout(_CONTROL_TIMEOUT_SECONDS):
                first = await call.read()
            if not isinstance(first, node_pb2.StepResult) or not first.accepted:
                raise ProtocolError(f"{where}: the node did not accept the watcher")
            yield None
            # No deadline here: results come when steps go in, whose own deadline watches over them.
            while isinstance(message := await call.read(), node_pb2.StepResult):
                yield step_result_from_proto(message)
            raise PeerLost(f"{where}: the node ended the stream", node_id=self.node.node_id)
        except TimeoutError as error:
            raise self._silent(where, _CONTROL_TIMEOUT_SECONDS) from error
        except grpc.aio.AioRpcError as error:
            raise self._mapped(error, where) from error
        finally:
            call.cancel()

    async def close(self) -> None:
        """Close both channels."""
        await self._control.close()
        await self._data.close()

    def _mapped(self, error: grpc.aio.AioRpcError, where: str) -> StagemeshError:
        # The peer is named once, by the mapping.
        operation = where.removesuffix(f" on {self}")
        mapped = from_rpc_error(error, operation=operation, peer=str(self))
        return named(mapped, operation=operation, peer=str(self), node_id=self.node.node_id)

    def _silent(self, where: str, seconds: float) -> PeerLost:
        return PeerLost(f"{where}: no answer within {seconds:.0f} s", node_id=self.node.node_id)


class StepStream:
    """The open stream of steps to a rank of the first stage."""

    def __init__(self, link: NodeLink, call: StepCall) -> None:
        self._link = link
        self._call = call

    async def send(self, step: Step) -> None:
        """Send a step.

        Raises:
            PeerLost: the stream is broken, or takes nothing for 10 s.
        """
        operation, node_id = f"send step {step.step_id}", self._link.node.node_id
        try:
            async with asyncio.timeout(_SEND_TIMEOUT_SECONDS):
                await self._call.write(node_pb2.StepFrame(header=step_header_to_proto(step)))
        except TimeoutError as error:
            self._call.cancel()
            raise PeerLost(
                f"{operation}: {self._link} took nothing for {_SEND_TIMEOUT_SECONDS:.0f} s",
                node_id=node_id,
            ) from error
        except STREAM_ERRORS as error:
            raise await why_ended(
                self._call, error, operation=operation, peer=str(self._link), node_id=node_id
            ) from error

    def close(self) -> None:
        """End the stream."""
        self._call.cancel()


def _fetch_state(message: node_pb2.LoadStageProgress) -> FetchState | None:
    if not message.HasField("fetch"):
        return None
    fetch = message.fetch
    return FetchState(
        total_bytes=fetch.total_bytes,
        present_bytes=fetch.present_bytes,
        hashed_bytes=fetch.hashed_bytes,
        received={origin.source: origin.num_bytes for origin in fetch.origins},
    )


def _load_request(
    order: LoadOrder, assignment: StageAssignment, rank: int, members: Sequence[NodeInfo]
) -> node_pb2.LoadStageRequest:
    request = node_pb2.LoadStageRequest(
        version=our_version(),
        deployment_id=order.deployment_id,
        incarnation=order.incarnation,
        model=node_pb2.ModelSource(
            name=order.model_name,
            path=order.model_path,
            reference=order.model_reference,
            fingerprint=order.fingerprint,
            weight_peers=[
                weights_pb2.WeightPeer(node_id=node_id, address=address)
                for node_id, address in order.weight_peers
            ],
        ),
        stage=assignment.stage,
        num_stages=order.num_stages,
        start_layer=assignment.start_layer,
        end_layer=assignment.end_layer,
        dtype=order.dtype,
        kv_cache_bytes=assignment.ranks[rank].kv_cache_bytes,
        max_context_tokens=order.max_context_tokens,
        quantize=order.quantize,
        compile=order.compile,
    )
    if assignment.shares is not None:
        request.tensor_rank = rank
        request.tensor_backend = order.tensor_backend
        request.tensor_shares.CopyFrom(tensor_shares_to_proto(assignment.shares))
        request.tensor_group.CopyFrom(
            node_pb2.TensorGroup(
                group_id=f"{order.deployment_id}/stage-{assignment.stage}",
                incarnation=order.incarnation,
                members=[_group_member(node) for node in members],
                timeout_seconds=order.group_seconds,
            )
        )
    return request


def _group_member(node: NodeInfo) -> comm_pb2.GroupMember:
    return comm_pb2.GroupMember(
        node_id=node.node_id,
        address=node.address,
        unix_path=node.unix_path,
        host_id=node.host_id,
    )
