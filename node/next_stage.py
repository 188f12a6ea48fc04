"""The long-lived stream to a rank of the next stage of a pipeline."""

import asyncio
import time
from collections.abc import Sequence

import grpc.aio
import torch

from stagemesh.errors import PeerLost
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.codec import encode_parts
from stagemesh.rpc.convert import our_version, step_header_to_proto
from stagemesh.rpc.handshake import STREAM_ERRORS, PeerStatus, shake_hands, why_ended
from stagemesh.rpc.v1 import node_pb2, node_pb2_grpc
from stagemesh.steps import StageTiming, Step

_SEND_TIMEOUT_SECONDS = 30.0


class NextStage:
    """Sends steps to one rank of the stage after this one.

    A stream that broke stays broken: what the peer has got of it is not known, so nothing is sent
    again, and the coordinator links anew.

    Args:
        node_id: the peer.
        address: its host:port.
        deployment_id: the deployment that both serve.
        incarnation: its incarnation.
        stage: index of the peer's stage.
        tensor_rank: which of the stage's ranks the peer is.
        token: the cluster's token.
    """

    def __init__(
        self,
        *,
        node_id: str,
        address: str,
        deployment_id: str,
        incarnation: int,
        stage: int,
        tensor_rank: int,
        token: str | None,
    ) -> None:
        self.node_id = node_id
        self.address = address
        self._hello = node_pb2.StepHello(
            version=our_version(),
            deployment_id=deployment_id,
            incarnation=incarnation,
            stage=stage,
            tensor_rank=tensor_rank,
        )
        self._stage = stage
        self._channel = open_channel(address, token=token, kind="data")
        self._call: grpc.aio.StreamStreamCall[node_pb2.StepFrame, node_pb2.StepAck] | None = None
        self._status: PeerStatus | None = None

    async def connect(self, timeout_seconds: float) -> float:
        """Open the stream and wait for the peer's acceptance; return the seconds it took.

        Raises:
            PeerLost: the peer was not reached in time; the text names it.
            StagemeshError: the peer refused (another version, deployment or stage).
        """
        started = time.monotonic()
        # Not called "async": protobuf's stub is typed for both, the channel decides.
        stub: node_pb2_grpc.NodeServiceAsyncStub = node_pb2_grpc.NodeServiceStub(self._channel)
        call = stub.RunSteps()
        self._status = PeerStatus(call)
        await shake_hands(
            call,
            node_pb2.StepFrame(hello=self._hello),
            operation="link",
            peer=self._peer,
            node_id=self.node_id,
            timeout_seconds=timeout_seconds,
        )
        self._call = call
        return time.monotonic() - started

    async def send(
        self, step: Step, activation: torch.Tensor | None, *, timings: Sequence[StageTiming]
    ) -> None:
        """Send a step on.

        Shapes:
            activation: [T, D]; None for a step that only releases sessions.

        Raises:
            PeerLost: the stream is broken, or took no data for 30 s.
        """
        call = self._call
        if call is None:
            raise PeerLost(f"the stream to {self._peer} is closed", node_id=self.node_id)
        header = step_header_to_proto(step, timings)
        try:
            async with asyncio.timeout(_SEND_TIMEOUT_SECONDS):
                if activation is None:
                    await call.write(node_pb2.StepFrame(header=header))
                    return
                for index, part in enumerate(encode_parts(activation)):
                    frame = node_pb2.StepFrame(activation=part)
                    if index == 0:
                        frame.header.CopyFrom(header)
                    await call.write(frame)
        except TimeoutError as error:
            self._break(call)
            raise PeerLost(
                f"{self._peer} took no data for {_SEND_TIMEOUT_SECONDS:.0f} s "
                f"(step {step.step_id})",
                node_id=self.node_id,
            ) from error
        except STREAM_ERRORS as error:
            # First: a call that is cancelled here forgets what its peer said.
            why = await why_ended(
                call,
                error,
                operation=f"send step {step.step_id}",
                peer=self._peer,
                node_id=self.node_id,
                status=self._status,
            )
            self._break(call)
            raise why from error

    @property
    def _peer(self) -> str:
        return f"stage {self._stage} on node {self.node_id} ({self.address})"

    def _break(
        self, call: "grpc.aio.StreamStreamCall[node_pb2.StepFrame, node_pb2.StepAck]"
    ) -> None:
        call.cancel()
        self._call = None

    async def close(self) -> None:
        """End the stream and close the channel; idempotent."""
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
        await self._channel.close()
