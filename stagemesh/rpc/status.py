"""The catalog from our errors to gRPC statuses, and back. Torch-free.

Server: `ErrorStatusInterceptor` ends a call that raised with the error's status and puts an
ErrorDetail in the trailing metadata `stagemesh-error-bin`. Client: `from_rpc_error` rebuilds the
class from it. An exception that is not ours becomes INTERNAL with a fixed sentence and its class
name; its text and traceback stay in the log, as they may hold what a peer should not see.
"""

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import grpc
import grpc.aio

from stagemesh import errors
from stagemesh.errors import StageFailed, StagemeshError
from stagemesh.rpc.convert import RemoteError, remote_error_from_bytes, remote_error_to_bytes

logger = logging.getLogger(__name__)

# A string, as the class takes no parameters at run time.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

ERROR_METADATA_KEY = "stagemesh-error-bin"

# Trailing metadata must stay under gRPC's 8 KiB soft limit, the status text included.
_MAX_STATUS_TEXT_BYTES = 1000
_MAX_MESSAGE_BYTES = 2000
_MAX_TRACEBACK_BYTES = 2000

STATUS_OF_ERROR: Mapping[type[StagemeshError], grpc.StatusCode] = MappingProxyType(
    {
        errors.StagemeshError: grpc.StatusCode.INTERNAL,
        errors.ConfigError: grpc.StatusCode.INVALID_ARGUMENT,
        errors.ModelError: grpc.StatusCode.FAILED_PRECONDITION,
        errors.ModelNotFound: grpc.StatusCode.NOT_FOUND,
        errors.CheckpointError: grpc.StatusCode.DATA_LOSS,
        errors.UnsupportedModel: grpc.StatusCode.FAILED_PRECONDITION,
        errors.PlacementError: grpc.StatusCode.FAILED_PRECONDITION,
        errors.CapacityExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
        errors.ProtocolError: grpc.StatusCode.INVALID_ARGUMENT,
        errors.VersionMismatch: grpc.StatusCode.FAILED_PRECONDITION,
        errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
        # Not UNAVAILABLE: the peer is there and says that its state does not allow the call.
        errors.NotReady: grpc.StatusCode.FAILED_PRECONDITION,
        errors.StageFailed: grpc.StatusCode.INTERNAL,
        errors.CommError: grpc.StatusCode.UNAVAILABLE,
        errors.PeerLost: grpc.StatusCode.UNAVAILABLE,
        errors.CollectiveMismatch: grpc.StatusCode.FAILED_PRECONDITION,
        errors.CollectiveTimeout: grpc.StatusCode.DEADLINE_EXCEEDED,
        errors.GroupAborted: grpc.StatusCode.ABORTED,
    }
)

# For a status without our detail: gRPC itself, a proxy or a foreign server made it.
_ERROR_OF_STATUS: Mapping[grpc.StatusCode, type[StagemeshError]] = MappingProxyType(
    {
        grpc.StatusCode.INVALID_ARGUMENT: errors.ProtocolError,
        grpc.StatusCode.OUT_OF_RANGE: errors.ProtocolError,
        grpc.StatusCode.UNIMPLEMENTED: errors.ProtocolError,
        grpc.StatusCode.NOT_FOUND: errors.NotReady,
        grpc.StatusCode.ALREADY_EXISTS: errors.NotReady,
        grpc.StatusCode.FAILED_PRECONDITION: errors.NotReady,
        grpc.StatusCode.DATA_LOSS: errors.ProtocolError,
        grpc.StatusCode.ABORTED: errors.GroupAborted,
        grpc.StatusCode.RESOURCE_EXHAUSTED: errors.CapacityExceeded,
        grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
        grpc.StatusCode.PERMISSION_DENIED: errors.Unauthenticated,
    }
)


def to_status(error: BaseException) -> grpc.StatusCode:
    """The gRPC status of an error; INTERNAL for what is not ours."""
    for cls in type(error).__mro__:
        if cls in STATUS_OF_ERROR:
            return STATUS_OF_ERROR[cls]
    return grpc.StatusCode.INTERNAL


def error_classes() -> Mapping[str, type[StagemeshError]]:
    """Each class of the catalog by its name, which is how it travels."""
    return {cls.__name__: cls for cls in STATUS_OF_ERROR}


def from_rpc_error(
    error: grpc.aio.AioRpcError,
    *,
    operation: str,
    peer: str,
    elapsed_seconds: float | None = None,
) -> StagemeshError:
    """The error to raise for a failed call.

    A peer that raised one of our errors gives the same class with the same text; a note adds who
    raised it and when. Without such a detail UNAVAILABLE, CANCELLED and DEADLINE_EXCEEDED all mean
    that no answer came, so they become PeerLost: a CollectiveTimeout comes from a live peer.

    Args:
        error: what the call raised.
        operation: what the call was for, as words ("load stage 1").
        peer: the node's id or address.
        elapsed_seconds: how long the call took.
    """
    after = "" if elapsed_seconds is None else f" after {elapsed_seconds:.1f} s"
    detail = _detail_of(error)
    if detail is None:
        return _from_status(error, what=f"{operation} on {peer} failed{after}", peer=peer)
    rebuilt = _rebuild(detail, operation=operation, peer=peer)
    rebuilt.add_note(f"raised by {detail.node_id or peer} during {operation}{after}")
    return rebuilt


def _detail_of(error: grpc.aio.AioRpcError) -> RemoteError | None:
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_METADATA_KEY and isinstance(value, bytes):
            try:
                return remote_error_from_bytes(value)
            except errors.ProtocolError:
                logger.warning("error detail does not parse", extra={"status": error.code().name})
    return None


def _rebuild(detail: RemoteError, *, operation: str, peer: str) -> StagemeshError:
    cls = error_classes().get(detail.type_name)
    node_id = detail.node_id or peer
    if cls is None or issubclass(cls, StageFailed):
        return StageFailed(
            detail.message,
            node_id=node_id,
            operation=detail.operation or operation,
            error_type=detail.type_name,
            remote_traceback=detail.traceback,
        )
    if issubclass(cls, errors.PeerLost):
        return cls(detail.message, node_id=node_id)
    return cls(detail.message)


def _from_status(error: grpc.aio.AioRpcError, *, what: str, peer: str) -> StagemeshError:
    code = error.code()
    text = f"{what}: {code.name} {error.details() or ''}".rstrip()
    if code in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
    ):
        return errors.PeerLost(text, node_id=peer)
    cls = _ERROR_OF_STATUS.get(code)
    if cls is None:
        return StageFailed(text, node_id=peer, error_type=code.name)
    return cls(text)


def _clip(text: str, limit: int, *, keep_end: bool = False) -> str:
    data = text.encode(errors="replace")
    data = data[-limit:] if keep_end else data[:limit]
    return data.decode(errors="ignore")


def describe_error(error: Exception, *, node_id: str, operation: str) -> RemoteError:
    """What a peer is told about an error."""
    if not isinstance(error, StagemeshError):
        name = type(error).__name__
        message = f"internal error ({name}) in {operation}; the log of the node has the traceback"
        return RemoteError(type_name=name, message=message, node_id=node_id, operation=operation)
    # The nearest class of the catalog: a subclass that only this process knows means nothing there.
    known = next(cls for cls in type(error).__mro__ if cls in STATUS_OF_ERROR)
    type_name, traceback = known.__name__, ""
    if isinstance(error, StageFailed):
        traceback = error.remote_traceback
        # A foreign name is rebuilt as StageFailed with that error_type, so nothing is lost.
        if error.error_type and error.error_type not in error_classes():
            type_name = error.error_type
    return RemoteError(
        type_name=type_name,
        message=_clip(str(error), _MAX_MESSAGE_BYTES),
        node_id=(getattr(error, "node_id", "") or node_id),
        operation=(getattr(error, "operation", "") or operation),
        traceback=_clip(traceback, _MAX_TRACEBACK_BYTES, keep_end=True),
    )


async def abort_with(
    context: grpc.aio.ServicerContext[Any, Any], error: Exception, *, node_id: str, operation: str
) -> None:
    """End the call with the status and detail of `error`; always raises (`context.abort`)."""
    detail = describe_error(error, node_id=node_id, operation=operation)
    fields = {"operation": operation, "error_type": type(error).__name__}
    if isinstance(error, StagemeshError):
        logger.info("rpc refused", extra={**fields, "error": str(error)})
    else:
        logger.error("rpc failed", extra=fields, exc_info=error)
    await context.abort(
        to_status(error),
        _clip(detail.message, _MAX_STATUS_TEXT_BYTES),
        ((ERROR_METADATA_KEY, remote_error_to_bytes(detail)),),
    )


class ErrorStatusInterceptor(grpc.aio.ServerInterceptor):
    """Turns what a handler raises into a status with detail, for all four kinds of RPC.

    Must be the outermost interceptor, so that what other interceptors raise is translated too.
    Handlers are coroutines or async generators; a blocking handler (we have none) passes through.
    """

    def __init__(self, *, node_id: str = "") -> None:
        self._node_id = node_id
        self._calls: set[asyncio.Task[Any]] = set()

    async def settle(self, timeout_seconds: float) -> bool:
        """Wait until no call is being handled; False when some still are at the timeout.

        After a server's stop, calls that it cancelled are still unwinding. A loop that ends
        meanwhile cancels them once more, which gRPC reports with tracebacks.
        """
        if self._calls:
            await asyncio.wait(self._calls, timeout=timeout_seconds)
        # gRPC's own task of each call awakes after the handler's and has no further wait.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return not self._calls

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Wrap the handler of one call."""
        handler = await continuation(handler_call_details)
        # None is gRPC's way to say that no such method exists.
        if handler is None:
            return handler
        operation = handler_call_details.method.rpartition("/")[2]
        return _wrap(handler, lambda behavior: self._guard(behavior, operation))

    def _guard(self, behavior: Callable[..., Any], operation: str) -> Callable[..., Any]:
        node_id = self._node_id

        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            self._note_call()
            try:
                return await behavior(request, context)
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                await abort_with(context, error, node_id=node_id, operation=operation)

        async def generate(
            request: Any, context: grpc.aio.ServicerContext[Any, Any]
        ) -> AsyncIterator[Any]:
            self._note_call()
            try:
                async with contextlib.aclosing(behavior(request, context)) as replies:
                    async for reply in replies:
                        yield reply
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                await abort_with(context, error, node_id=node_id, operation=operation)

        if inspect.isasyncgenfunction(behavior):
            return generate
        return call if inspect.iscoroutinefunction(behavior) else behavior

    def _note_call(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)


def _wrap(
    handler: Handler,
    guard: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Handler:
    codec = {
        "request_deserializer": handler.request_deserializer,
        "response_serializer": handler.response_serializer,
    }
    if handler.unary_unary is not None:
        return grpc.unary_unary_rpc_method_handler(guard(handler.unary_unary), **codec)
    if handler.unary_stream is not None:
        return grpc.unary_stream_rpc_method_handler(guard(handler.unary_stream), **codec)
    if handler.stream_unary is not None:
        return grpc.stream_unary_rpc_method_handler(guard(handler.stream_unary), **codec)
    assert handler.stream_stream is not None
    return grpc.stream_stream_rpc_method_handler(guard(handler.stream_stream), **codec)
