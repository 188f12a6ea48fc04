"""ProfileService: the node's profile, probes of its peers, and the other end of their probes."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc.aio

from node.profiler import DEFAULT_TIMEOUT_SECONDS, Profile, Profiler
from node.sum_probe import probe_sums
from stagemesh.comm.member_record import member_from_proto
from stagemesh.comm.service import CommServicer
from stagemesh.errors import CapacityExceeded, ConfigError, NotReady, ProtocolError, StagemeshError
from stagemesh.rpc.codec import TensorAssembler
from stagemesh.rpc.convert import check_version
from stagemesh.rpc.probe import DEFAULT_PROBE_BYTES, MAX_PROBE_BYTES, probe_link
from stagemesh.rpc.v1 import profile_pb2, profile_pb2_grpc

logger = logging.getLogger(__name__)

PROFILE_SERVICE_NAME = profile_pb2.DESCRIPTOR.services_by_name["ProfileService"].full_name

_MAX_SECONDS = 120.0
_MAX_PEERS = 64
_FRAME_SECONDS = 10.0
_MAX_STREAM_BYTES = 4 * MAX_PROBE_BYTES

Context = grpc.aio.ServicerContext[Any, Any]


class ProfileServicer(profile_pb2_grpc.ProfileServiceServicer):
    """Measures this node and its links.

    Args:
        node_id: this node.
        profiler: measures and keeps the node's profile.
        comm: opens this node's groups.
        token: shown to peers.
    """

    def __init__(
        self, *, node_id: str, profiler: Profiler, comm: CommServicer, token: str | None
    ) -> None:
        self._node_id = node_id
        self._profiler = profiler
        self._comm = comm
        self._token = token
        self._links: dict[tuple[str, str], profile_pb2.LinkProfile] = {}
        self._probing = asyncio.Lock()

    async def Measure(  # noqa: N802
        self, request: profile_pb2.MeasureRequest, context: Context
    ) -> profile_pb2.NodeProfile:
        """The profile, measured anew if the kept one is too old."""
        check_version(request.version, peer="the caller")
        profile = await self._profiler.measure(
            max_age_seconds=request.max_age_seconds,
            timeout_seconds=_checked_seconds(request.timeout_seconds or DEFAULT_TIMEOUT_SECONDS),
        )
        return profile_to_proto(profile)

    async def ProbePeers(  # noqa: N802
        self, request: profile_pb2.ProbePeersRequest, context: Context
    ) -> profile_pb2.ProbePeersReply:
        """The links to peers, one after the other; a peer that cannot be reached says why."""
        check_version(request.version, peer="the caller")
        seconds = _checked_seconds(request.timeout_seconds)
        if len(request.peers) > _MAX_PEERS:
            raise ConfigError(f"at most {_MAX_PEERS} peers at once, got {len(request.peers)}")
        max_bytes = request.max_bytes or DEFAULT_PROBE_BYTES
        reply = profile_pb2.ProbePeersReply()
        # One at a time, or they would share what each is to have alone.
        async with self._probing:
            for peer in request.peers:
                kept = self._links.get((peer.node_id, peer.address))
                if kept is None or time.time() - kept.measured_at > request.max_age_seconds:
                    kept = await self._probe(peer, seconds=seconds, max_bytes=max_bytes)
                reply.links.append(kept)
        return reply

    async def _probe(
        self, peer: profile_pb2.ProbePeer, *, seconds: float, max_bytes: int
    ) -> profile_pb2.LinkProfile:
        try:
            with self._profiler.turns() as take_turn:
                link = await probe_link(
                    peer.address,
                    node_id=peer.node_id,
                    token=self._token,
                    timeout_seconds=seconds,
                    max_bytes=max_bytes,
                    take_turn=take_turn,
                )
        except ConfigError:
            raise
        except StagemeshError as error:
            logger.info("probe failed: %s", error, extra={"peer": peer.node_id})
            return profile_pb2.LinkProfile(node_id=peer.node_id, error=str(error))
        found = profile_pb2.LinkProfile(
            node_id=peer.node_id,
            latency_seconds=link.latency_seconds,
            bytes_per_second=link.bytes_per_second,
            measured_at=time.time(),
        )
        if len(self._links) >= _MAX_PEERS * _MAX_PEERS:
            self._links.clear()
        self._links[peer.node_id, peer.address] = found
        return found

    async def ProbeSums(  # noqa: N802
        self, request: profile_pb2.ProbeSumsRequest, context: Context
    ) -> profile_pb2.ProbeSumsReply:
        """Share a stage for a moment with a peer that is asked for the same."""
        check_version(request.version, peer="the caller")
        seconds = _checked_seconds(request.timeout_seconds)
        try:
            async with asyncio.timeout(seconds):
                await self._profiler.wait_idle()
                times = await probe_sums(
                    self._comm,
                    device=self._profiler.device,
                    # A name that no stage's group has.
                    group_id=f"probe/{request.group_id}",
                    rank=request.rank,
                    members=[member_from_proto(m, rank=r) for r, m in enumerate(request.members)],
                    timeout_seconds=seconds,
                )
        except TimeoutError:
            raise NotReady(
                f"node {self._node_id} could not add up with its peer within {seconds:g} s"
            ) from None
        except (RuntimeError, MemoryError) as error:  # how a full device fails
            raise CapacityExceeded(
                f"node {self._node_id} could not run a trial stage on {self._profiler.device}: "
                f"{error}"
            ) from error
        return profile_pb2.ProbeSumsReply(
            sum_seconds=times.sum_seconds,
            bytes_per_second=times.bytes_per_second,
            slowdown=times.slowdown,
        )

    async def Probe(  # noqa: N802
        self, request_iterator: AsyncIterator[profile_pb2.ProbeFrame], context: Context
    ) -> AsyncGenerator[profile_pb2.ProbeAck, None]:
        """Take a peer's tensors and acknowledge each."""
        frames = aiter(request_iterator)
        first = await self._next(frames)
        if first is None or not first.HasField("version"):
            raise ProtocolError("the first frame of a probe must have the version")
        check_version(first.version, peer="the prober")
        yield profile_pb2.ProbeAck(accepted=True)
        assembler = TensorAssembler(max_bytes=MAX_PROBE_BYTES)
        received = 0
        with self._profiler.turns() as take_turn:
            while (frame := await self._next(frames)) is not None:
                received += len(frame.part.data)
                if received > _MAX_STREAM_BYTES:
                    raise CapacityExceeded(f"a probe sends at most {_MAX_STREAM_BYTES} bytes")
                tensor = assembler.add(frame.part)
                if tensor is not None:
                    turn = await take_turn()
                    yield profile_pb2.ProbeAck(
                        received_bytes=tensor.numel(), turn_seconds=turn.seconds
                    )

    async def _next(
        self, frames: AsyncIterator[profile_pb2.ProbeFrame]
    ) -> profile_pb2.ProbeFrame | None:
        try:
            async with asyncio.timeout(_FRAME_SECONDS):
                return await anext(frames, None)
        except TimeoutError:
            raise ProtocolError(
                f"node {self._node_id}: the prober sent nothing for {_FRAME_SECONDS:g} s"
            ) from None


def profile_to_proto(profile: Profile) -> profile_pb2.NodeProfile:
    """The profile as it travels."""
    return profile_pb2.NodeProfile(
        rates=[
            profile_pb2.DtypeRates(
                dtype=name,
                stream_bytes_per_second=rates.stream_bytes_per_second,
                flops_per_second=rates.flops_per_second,
            )
            for name, rates in profile.speed.rates.items()
        ],
        layer_overhead_seconds=profile.speed.layer_overhead_seconds,
        step_overhead_seconds=profile.speed.step_overhead_seconds,
        memory_total_bytes=profile.memory.total_bytes,
        memory_free_bytes=profile.memory.free_bytes,
        memory_limit_bytes=profile.memory.limit_bytes,
        process_bytes=profile.process_bytes,
        measure_seconds=profile.measure_seconds,
        measured_at=profile.measured_at,
    )


def _checked_seconds(seconds: float) -> float:
    if not 0 < seconds <= _MAX_SECONDS:
        raise ConfigError(f"timeout_seconds must be in (0, {_MAX_SECONDS:g}], got {seconds}")
    return seconds
