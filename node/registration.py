"""The node's membership: a heartbeat stream to the coordinator, kept up while the node lives.

It has a channel of its own and runs on the event loop, which never computes, so neither a large
tensor nor a long forward delays a beat.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio

from stagemesh.errors import NotReady, PeerLost, StagemeshError
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.convert import our_version
from stagemesh.rpc.status import from_rpc_error
from stagemesh.rpc.v1 import coordinator_pb2, coordinator_pb2_grpc, node_pb2

logger = logging.getLogger(__name__)

_JOIN_TIMEOUT_SECONDS = 5.0
_FIRST_RETRY_SECONDS = 0.2
_LAST_RETRY_SECONDS = 2.0


class Registration:
    """Keeps a node registered with its coordinator.

    Args:
        coordinator: host:port of the coordinator.
        token: the cluster's token.
        status: the node's current status.
        on_orphaned: awaited when what is loaded here has become nobody's: another coordinator
            process answers than before, or the coordinator must have counted this node as lost.
    """

    def __init__(
        self,
        *,
        coordinator: str,
        token: str | None,
        status: Callable[[], node_pb2.NodeStatus],
        on_orphaned: Callable[[], Awaitable[None]],
    ) -> None:
        self._address = coordinator
        self._token = token
        self._status = status
        self._on_orphaned = on_orphaned
        self._coordinator_id = ""
        self._silence_seconds = math.inf
        self._replied_at = time.monotonic()
        self._channel: grpc.aio.Channel | None = None
        self.joined = asyncio.Event()

    async def run(self) -> None:
        """Register, beat, and register again whenever the stream breaks.

        Raises:
            StagemeshError: the coordinator refuses this node for good (another version, no token,
                its name taken); trying again would change nothing.
        """
        retry_seconds = _FIRST_RETRY_SECONDS
        while True:
            channel = open_channel(self._address, token=self._token, kind="control")
            self._channel = channel
            try:
                await self._session(channel)
            except grpc.aio.AioRpcError as error:
                reason = from_rpc_error(error, operation="register", peer=self._peer)
            except PeerLost as error:
                reason = error
            else:
                reason = PeerLost(f"{self._peer} ended the heartbeat stream")
            finally:
                self._channel = None
                await channel.close()
            was_joined = self.joined.is_set()
            self.joined.clear()
            if not isinstance(reason, PeerLost) and not was_joined:
                raise reason
            if self._is_lost(reason):
                # Stopped, cut off or too slow for longer than the coordinator waits: it has planned
                # without this node and could not reach it to free its memory.
                await self._on_orphaned()
            retry_seconds = (
                _FIRST_RETRY_SECONDS if was_joined else min(2 * retry_seconds, _LAST_RETRY_SECONDS)
            )
            logger.warning("no coordinator: %s; trying again in %.1f s", reason, retry_seconds)
            await asyncio.sleep(retry_seconds)

    def _is_lost(self, reason: StagemeshError) -> bool:
        """Whether the coordinator has counted this node as lost."""
        silence = time.monotonic() - self._replied_at
        return isinstance(reason, NotReady) or silence > self._silence_seconds

    @property
    def _peer(self) -> str:
        return f"the coordinator at {self._address}"

    async def _session(self, channel: grpc.aio.Channel) -> None:
        """One heartbeat stream, from join to its end."""
        stub: coordinator_pb2_grpc.CoordinatorServiceAsyncStub = (
            coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        )
        call = stub.Heartbeat()
        status = self._status()
        join = coordinator_pb2.Join(version=our_version(), node=status.description)
        interval, limit = await self._join(call, coordinator_pb2.Beat(join=join, status=status))
        sequence = 0
        while True:
            sequence += 1
            beat = coordinator_pb2.Beat(status=self._status(), sequence=sequence)
            sent = time.monotonic()
            reply = await self._exchange(call, beat, timeout_seconds=limit)
            if reply is None:
                return
            await asyncio.sleep(max(0.0, interval - (time.monotonic() - sent)))

    async def _join(
        self,
        call: "grpc.aio.StreamStreamCall[coordinator_pb2.Beat, coordinator_pb2.BeatReply]",
        beat: coordinator_pb2.Beat,
    ) -> tuple[float, float]:
        """Join; return the beat interval and the silence limit in seconds."""
        reply = await self._exchange(call, beat, timeout_seconds=_JOIN_TIMEOUT_SECONDS)
        if reply is None:
            raise PeerLost(f"{self._peer} ended the stream before it answered")
        if self._coordinator_id not in ("", reply.coordinator_id):
            logger.warning("another coordinator answers; its predecessor's stages are unloaded")
            await self._on_orphaned()
        self._coordinator_id = reply.coordinator_id
        self._silence_seconds = reply.limit_seconds
        self.joined.set()
        logger.info("registered", extra={"coordinator": self._address})
        return reply.interval_seconds, reply.limit_seconds

    async def _exchange(
        self,
        call: "grpc.aio.StreamStreamCall[coordinator_pb2.Beat, coordinator_pb2.BeatReply]",
        beat: coordinator_pb2.Beat,
        *,
        timeout_seconds: float,
    ) -> coordinator_pb2.BeatReply | None:
        """Send a beat and read its reply; None when the coordinator ended the stream."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await call.write(beat)
                reply = await call.read()
        except TimeoutError as error:
            call.cancel()
            raise PeerLost(f"{self._peer} did not answer for {timeout_seconds:.1f} s") from error
        except asyncio.InvalidStateError as error:
            # The stream ended under the write; its status says why.
            await call.wait_for_connection()
            raise PeerLost(f"{self._peer} ended the stream") from error
        if not isinstance(reply, coordinator_pb2.BeatReply):
            return None
        self._replied_at = time.monotonic()
        return reply

    async def leave(self, node_id: str, start_id: str) -> None:
        """Tell the coordinator that this node stops on purpose; best effort within a second."""
        if self._channel is None or not self.joined.is_set():
            return
        stub: coordinator_pb2_grpc.CoordinatorServiceAsyncStub = (
            coordinator_pb2_grpc.CoordinatorServiceStub(self._channel)
        )
        try:
            await stub.Leave(
                coordinator_pb2.LeaveRequest(node_id=node_id, start_id=start_id), timeout=1.0
            )
        except grpc.aio.AioRpcError as error:
            logger.info("could not say goodbye: %s", error.details())
