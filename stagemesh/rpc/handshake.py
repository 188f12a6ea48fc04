"""The beginning of a long-lived stream, and why one ended. Torch-free.

open -> hello -> accepted -> messages ...
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import grpc
import grpc.aio

from stagemesh.errors import PeerLost, ProtocolError, StagemeshError
from stagemesh.rpc.status import from_rpc_error

# What a write sets as the status of a stream whose end it meets.
_NOT_THE_PEERS = "Internal error from Core"
_STATUS_SECONDS = 1.0
_LOOK_AGAIN_SECONDS = 0.005

RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")

STREAM_ERRORS = (grpc.aio.AioRpcError, asyncio.InvalidStateError)
"""What writing to a stream raises, or reading from it, when it has ended."""


async def shake_hands(
    call: "grpc.aio.StreamStreamCall[RequestT, Any]",
    hello: RequestT,
    *,
    operation: str,
    peer: str,
    node_id: str,
    timeout_seconds: float,
) -> None:
    """Send the hello of a new stream and wait until the peer accepts it.

    Args:
        call: the stream; cancelled when there is no answer in time.
        hello: its first message.
        operation: what this is for, as words in errors.
        peer: who the peer is, as words in errors.
        node_id: the peer's.
        timeout_seconds: how long to wait.

    Raises:
        PeerLost: the peer does not answer in time, or is gone.
        StagemeshError: the peer refuses; the class is the peer's.
    """
    try:
        async with asyncio.timeout(timeout_seconds):
            await call.write(hello)
            ack: Any = await call.read()
    except TimeoutError as error:
        call.cancel()
        raise PeerLost(
            f"{operation}: {peer} did not accept the stream within {timeout_seconds:.1f} s",
            node_id=node_id,
        ) from error
    except STREAM_ERRORS as error:
        raise await why_ended(
            call, error, operation=operation, peer=peer, node_id=node_id
        ) from error
    if ack is grpc.aio.EOF:
        raise await why_ended(call, None, operation=operation, peer=peer, node_id=node_id)
    if not ack.accepted:
        call.cancel()
        raise ProtocolError(f"{operation}: {peer} answered the hello without accepting it")


async def why_ended(
    call: "grpc.aio.StreamStreamCall[Any, Any]",
    error: Exception | None,
    *,
    operation: str,
    peer: str,
    node_id: str,
    status: "PeerStatus | None" = None,
) -> StagemeshError:
    """Why a stream has ended, as an error of ours.

    Args:
        call: the stream.
        error: one of STREAM_ERRORS that it raised; None when a read found its end.
        operation: what was being done, as words.
        peer: who the peer is, as words.
        node_id: the peer's.
        status: what is known of the peer's, where whole tensors are written to it.
    """
    if not isinstance(error, grpc.aio.AioRpcError):
        error = await _status_of(call)
        if error.code() is grpc.StatusCode.OK:
            return PeerLost(f"{operation}: {peer} ended the stream", node_id=node_id)
    return named(
        from_rpc_error(await final_error(call, error, status), operation=operation, peer=peer),
        operation=operation,
        peer=peer,
        node_id=node_id,
    )


class PeerStatus:
    """The status that the peer of a stream gave.

    A write that meets the end of a stream gives it one of grpc.aio's own, which takes the place of
    the peer's, or has its place taken by it a moment later. So the peer's is kept as it comes.
    """

    def __init__(self, call: "grpc.aio.StreamStreamCall[Any, Any]") -> None:
        """Watch a stream that was just opened."""
        self.error: grpc.aio.AioRpcError | None = None
        call.add_done_callback(self._keep)

    def _keep(self, call: Any) -> None:
        error = _without_waiting(_status_of(call))
        if self.error is None and error is not None and error.details() != _NOT_THE_PEERS:
            self.error = error


async def final_error(
    call: "grpc.aio.StreamStreamCall[Any, Any]",
    error: grpc.aio.AioRpcError,
    status: PeerStatus | None = None,
) -> grpc.aio.AioRpcError:
    """The error with the status that the peer gave; waits for it for up to a second."""
    if error.details() == _NOT_THE_PEERS and status is not None and status.error is not None:
        return status.error
    looks = int(_STATUS_SECONDS / _LOOK_AGAIN_SECONDS)
    while error.details() == _NOT_THE_PEERS and looks:
        await asyncio.sleep(_LOOK_AGAIN_SECONDS)
        looks -= 1
        error = await _status_of(call)
    return error


async def _status_of(call: "grpc.aio.StreamStreamCall[Any, Any]") -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        await call.code(),
        await call.initial_metadata(),
        await call.trailing_metadata(),
        details=await call.details(),
    )


def _without_waiting(work: Coroutine[Any, Any, ResultT]) -> ResultT | None:
    """What a coroutine gives that has nothing to wait for; None when it has."""
    try:
        work.send(None)
    except StopIteration as end:
        result: ResultT = end.value
        return result
    work.close()
    return None


def named(error: StagemeshError, *, operation: str, peer: str, node_id: str) -> StagemeshError:
    """The same error, naming the peer: a node's own words need not say whose they are."""
    if node_id not in str(error):
        error.args = (f"{operation} on {peer}: {error}",)
    return error
