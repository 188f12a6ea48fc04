"""How fast tensors reach a node: the sender's end of a Probe stream. Torch-free.

    hello -> accepted
    small tensor -> ack, some times         latency: half the median round trip
    large tensor -> ack                     bytes per second, beyond that latency

The frames are those that carry activations, and the peer assembles a tensor from them, so that what
is measured is what a step will take. Each small tensor follows a pause, in which threads fall
asleep, and wherever stages compute it comes from the thread that does and goes to one, after other
work has emptied the caches: without all that its way takes a quarter of the time. What the thread
at the peer does in between is taken off. Bytes and time are bounded.
"""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

import grpc.aio

from stagemesh.errors import ConfigError, PeerLost, ProtocolError
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.convert import our_version
from stagemesh.rpc.handshake import STREAM_ERRORS, shake_hands, why_ended
from stagemesh.rpc.v1 import profile_pb2, profile_pb2_grpc, tensor_pb2

MAX_PROBE_BYTES = 64 * 2**20
"""Largest tensor of a probe, on both ends."""

DEFAULT_PROBE_BYTES = 16 * 2**20

_CHUNK_BYTES = 2**20
_SMALL_BYTES = 2304
_FIRST_BULK_BYTES = 256 * 1024
_BULK_SECONDS = 0.08
_PAUSE_SECONDS = 0.01
_LEAST_SECONDS = 1e-6
_NUM_WARM_UPS = 2
_NUM_ROUND_TRIPS = 12

_Call: TypeAlias = "grpc.aio.StreamStreamCall[profile_pb2.ProbeFrame, profile_pb2.ProbeAck]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the thread that computes did between two messages; by `time.perf_counter`."""

    begun: float
    ended: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.begun


TakeTurn: TypeAlias = Callable[[], Awaitable[Turn]]
"""Goes to the thread that computes, lets it do something, and comes back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedLink:
    """One direction to a peer."""

    latency_seconds: float
    """One way, for a small message."""
    bytes_per_second: float
    """For large ones."""


async def probe_link(
    address: str,
    *,
    node_id: str,
    token: str | None,
    timeout_seconds: float,
    max_bytes: int = DEFAULT_PROBE_BYTES,
    take_turn: TakeTurn | None = None,
) -> ProbedLink:
    """Measure the way to a node.

    Args:
        address: host:port of the node.
        node_id: the node, for errors.
        token: the cluster's token.
        timeout_seconds: for the whole probe.
        max_bytes: size of the large tensor, at most; less where the link is slow.
        take_turn: where messages come from and go to here; None is the event loop itself.

    Raises:
        ConfigError: `max_bytes` is out of range.
        PeerLost: the node is not reached, or the time is over.
        StagemeshError: the node refuses.
    """
    if not 1 <= max_bytes <= MAX_PROBE_BYTES:
        raise ConfigError(f"max_bytes must be in [1, {MAX_PROBE_BYTES}], got {max_bytes}")
    peer = f"node {node_id} ({address})"
    channel = open_channel(address, token=token, kind="data")
    # Not called "async": protobuf's stub is typed for both, the channel decides.
    stub: profile_pb2_grpc.ProfileServiceAsyncStub = profile_pb2_grpc.ProfileServiceStub(channel)
    call = stub.Probe()
    try:
        await shake_hands(
            call,
            profile_pb2.ProbeFrame(version=our_version()),
            operation="probe",
            peer=peer,
            node_id=node_id,
            timeout_seconds=timeout_seconds,
        )
        async with asyncio.timeout(timeout_seconds):
            trips = [await _step_round_trip(call, take_turn) for _ in range(_NUM_ROUND_TRIPS)]
            latency = statistics.median(trips[_NUM_WARM_UPS:]) / 2
            size = min(max_bytes, _FIRST_BULK_BYTES)
            rate = _rate(size, await _round_trip(call, size), latency)
            size = min(max_bytes, max(size, int(rate * _BULK_SECONDS)))
            rate = _rate(size, await _round_trip(call, size), latency)
    except TimeoutError as error:
        raise PeerLost(f"probe: {peer} took over {timeout_seconds:g} s", node_id=node_id) from error
    except STREAM_ERRORS as error:
        raise await why_ended(call, error, operation="probe", peer=peer, node_id=node_id) from error
    finally:
        call.cancel()
        await channel.close()
    return ProbedLink(latency_seconds=latency, bytes_per_second=rate)


async def _step_round_trip(call: _Call, take_turn: TakeTurn | None) -> float:
    """Seconds of a small tensor's way there and back, as a step meets it."""
    await asyncio.sleep(_PAUSE_SECONDS)
    started = time.perf_counter() if take_turn is None else (await take_turn()).ended
    ack = await _exchange(call, _SMALL_BYTES)
    ended = time.perf_counter() if take_turn is None else (await take_turn()).begun
    return max(0.0, ended - started - ack.turn_seconds)


async def _round_trip(call: _Call, num_bytes: int) -> float:
    """Seconds from the first frame of a tensor of so many bytes to its acknowledgement."""
    started = time.perf_counter()
    ack = await _exchange(call, num_bytes)
    return max(0.0, time.perf_counter() - started - ack.turn_seconds)


async def _exchange(call: _Call, num_bytes: int) -> profile_pb2.ProbeAck:
    """Send a tensor of so many bytes and wait until it is acknowledged."""
    for offset in range(0, num_bytes, _CHUNK_BYTES):
        part = tensor_pb2.TensorPart(
            offset=offset, data=bytes(min(_CHUNK_BYTES, num_bytes - offset))
        )
        if offset == 0:
            part.header.CopyFrom(
                tensor_pb2.TensorHeader(
                    dtype=tensor_pb2.DTYPE_UINT8, shape=[num_bytes], num_bytes=num_bytes
                )
            )
        await call.write(profile_pb2.ProbeFrame(part=part))
    ack = await call.read()
    if not isinstance(ack, profile_pb2.ProbeAck) or ack.received_bytes != num_bytes:
        raise ProtocolError(f"a probe of {num_bytes} bytes was not acknowledged")
    return ack


def _rate(num_bytes: int, round_trip: float, latency: float) -> float:
    """Bytes per second, without the time that even a small message takes."""
    return num_bytes / max(round_trip - 2 * latency, 0.05 * round_trip, _LEAST_SECONDS)
