"""One node as the coordinator calls it: load, link, unload, steps, results."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence

import grpc
import grpc.aio

from coordinator.load_order import (
    LoadClock,
    LoadOrder,
    LoadProgress,
    fetch_state,
    load_request,
)
from coordinator.membership import NodeInfo
from stagemesh.errors import PeerLost, ProtocolError, StagemeshError
from stagemesh.layout import StageAssignment
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.convert import our_version, step_header_to_proto, step_result_from_proto
from stagemesh.rpc.handshake import STREAM_ERRORS, named, shake_hands, why_ended
from stagemesh.rpc.status import from_rpc_error
from stagemesh.rpc.v1 import node_pb2, node_pb2_grpc
from stagemesh.steps import Step, StepResult

logger = logging.getLogger(__name__)

_CONTROL_TIMEOUT_SECONDS = 10.0
_SEND_TIMEOUT_SECONDS = 10.0

StepCall = grpc.aio.StreamStreamCall[node_pb2.StepFrame, node_pb2.StepAck]


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
        call = self._control_stub.LoadStage(load_request(order, assignment, rank, members))
        where = f"load stage {assignment.stage} on {self}"
        loaded, fetched = -1, None
        try:
            while True:
                async with asyncio.timeout(clock.left(stall_seconds)):
                    message = await call.read()
                if message is grpc.aio.EOF:
                    raise ProtocolError(f"{where}: the node ended the load without a result")
                assert isinstance(message, node_pb2.LoadStageProgress)
                fetch = fetch_state(message)
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
