"""The beginning of a long-lived stream, and why one ended. Torch-free.

open -> hello -> accepted -> messages ...
"""

import asyncio
from typing import Any, TypeVar

import grpc.aio

from stagemesh.errors import PeerLost, ProtocolError, StagemeshError
from stagemesh.rpc.status import from_rpc_error

RequestT = TypeVar("RequestT")

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
) -> StagemeshError:
    """Why a stream has ended, as an error of ours.

    Args:
        call: the stream.
        error: one of STREAM_ERRORS that it raised; None when a read found its end.
        operation: what was being done, as words.
        peer: who the peer is, as words.
        node_id: the peer's.
    """
    if isinstance(error, grpc.aio.AioRpcError):
        return named(
            from_rpc_error(error, operation=operation, peer=peer),
            operation=operation,
            peer=peer,
            node_id=node_id,
        )
    code, details = await call.code(), await call.details()
    return PeerLost(f"{operation}: {peer} ended the stream: {code.name} {details}", node_id=node_id)


def named(error: StagemeshError, *, operation: str, peer: str, node_id: str) -> StagemeshError:
    """The same error, naming the peer: a node's own words need not say whose they are."""
    if node_id not in str(error):
        error.args = (f"{operation} on {peer}: {error}",)
    return error
