"""Client channels between the processes of a mesh, and waiting for a peer. Torch-free.

Control and data use channels of their own, so a large tensor never delays a heartbeat. A channel
belongs to the event loop that runs when it is opened.
"""

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, Self

import grpc
import grpc.aio

from stagemesh.errors import PeerLost
from stagemesh.rpc.fork_guard import PROCESS_GUARD
from stagemesh.rpc.security import Metadata, auth_metadata

MAX_MESSAGE_BYTES = 16 * 2**20
"""Limit of one gRPC message on both sides. Tensors travel in chunks far below it; it is deliberate
headroom for a step's header, not a wall that a tensor meets."""

Options = list[tuple[str, int]]

MESSAGE_OPTIONS: Options = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
]

WINDOW_OPTIONS: Options = [
    # gRPC begins with a window of 64 KiB and finds a larger one with pings beside the data: a
    # message of 64 KiB then waits for a round trip, and each ping wakes both ends. Ours is fixed;
    # what a tensor stream may have under way is bounded by its own credit.
    ("grpc.http2.lookahead_bytes", 8 * 2**20),
    ("grpc.http2.bdp_probe", 0),
]
"""Of both ends: how much of a stream may be under way."""

_CHANNEL_OPTIONS: Options = [
    *MESSAGE_OPTIONS,
    *WINDOW_OPTIONS,
    # Else channels to one address share a TCP connection, and control would queue behind data.
    ("grpc.use_local_subchannel_pool", 1),
    # gRPC backs off up to two minutes by default: a restarted peer must be reached within 5 s.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # Despite its name the time that one connection attempt may take.
    ("grpc.min_reconnect_backoff_ms", 2000),
    # A peer whose machine vanished sends no FIN; pings find it in 10 + 5 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A proxy set for the web would otherwise carry (or break) traffic between peers.
    ("grpc.enable_http_proxy", 0),
    # A call that failed may have run; who called decides whether to repeat it.
    ("grpc.enable_retries", 0),
]

_DATA_OPTIONS: Options = [
    # Whole chunks in few HTTP/2 frames instead of 16 KiB ones.
    ("grpc.http2.max_frame_size", 2**20),
]


def open_channel(
    address: str, *, token: str | None, kind: Literal["control", "data"]
) -> grpc.aio.Channel:
    """A channel to `address` whose calls show the token. Connects on first use.

    Args:
        address: host:port of the peer.
        token: the cluster's token, or None for a cluster without.
        kind: "control" for unary calls and heartbeats, "data" for tensor streams.

    Raises:
        ConfigError: the token cannot travel, or this process was forked from one that uses gRPC.
    """
    PROCESS_GUARD.check()
    options = _CHANNEL_OPTIONS + (_DATA_OPTIONS if kind == "data" else [])
    channel = grpc.aio.insecure_channel(address, options=options)
    metadata = auth_metadata(token)
    return _MetadataChannel(channel, metadata) if metadata else channel


async def wait_ready(channel: grpc.aio.Channel, *, address: str, timeout_seconds: float) -> None:
    """Wait until the channel is connected.

    Raises:
        PeerLost: it is not within `timeout_seconds`.
    """
    start = time.monotonic()
    try:
        async with asyncio.timeout(timeout_seconds):
            await channel.channel_ready()
    except TimeoutError:
        elapsed = time.monotonic() - start
        state = channel.get_state().name.lower().replace("_", " ")
        raise PeerLost(
            f"{address} could not be reached in {elapsed:.1f} s (connection: {state}); "
            "check that the process runs there and that the address is right",
            node_id=address,
        ) from None


class _MultiCallable:
    """A method of a stub that adds metadata to each call."""

    def __init__(self, inner: Any, metadata: Metadata) -> None:
        self._inner = inner
        self._metadata = metadata

    def __call__(
        self,
        request: Any = None,
        *,
        timeout: float | None = None,
        metadata: Sequence[tuple[str, str | bytes]] | None = None,
        wait_for_ready: bool | None = None,
    ) -> Any:
        return self._inner(
            request,
            timeout=timeout,
            metadata=(*self._metadata, *(metadata or ())),
            wait_for_ready=wait_for_ready,
        )


class _MetadataChannel(grpc.aio.Channel):
    """A channel that adds fixed metadata to each call.

    Client interceptors of grpc.aio would do too, but put a task and a queue between a stream and
    its caller, which the data path must not pay for.
    """

    def __init__(self, inner: grpc.aio.Channel, metadata: Metadata) -> None:
        self._inner = inner
        self._metadata = metadata

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> bool | None:
        return await self._inner.__aexit__(exc_type, exc_val, exc_tb)

    async def close(self, grace: float | None = None) -> None:
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._inner.channel_ready()

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return _MultiCallable(self._inner.unary_unary(method, *args, **kwargs), self._metadata)

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return _MultiCallable(self._inner.unary_stream(method, *args, **kwargs), self._metadata)

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return _MultiCallable(self._inner.stream_unary(method, *args, **kwargs), self._metadata)

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return _MultiCallable(self._inner.stream_stream(method, *args, **kwargs), self._metadata)
