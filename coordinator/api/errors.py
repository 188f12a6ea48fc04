"""Errors in OpenAI's shape, and the one catalog from our exceptions to HTTP.

Every failed request answers `{"error": {"message", "type", "param", "code"}}`, whichever layer
refused it: the router, the body, the validation, the engine or a stage.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from stagemesh.errors import (
    CapacityExceeded,
    CommError,
    ConfigError,
    ModelNotFound,
    NotReady,
    StageFailed,
    StagemeshError,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpError:
    """What a client is told."""

    status: int
    """HTTP status."""
    message: str
    """The whole sentence for a person."""
    type: str = "invalid_request_error"
    """OpenAI's class of the error."""
    param: str | None = None
    """The request field that is wrong."""
    code: str | None = None
    """For programs."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Extra response headers."""

    def body(self) -> dict[str, Any]:
        """The JSON object of the response, and of the event that ends a failed stream."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    def response(self) -> JSONResponse:
        """The whole HTTP response."""
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)


class RequestError(Exception):
    """The request cannot be served as it is; raised by the API's own checks."""

    def __init__(self, error: HttpError) -> None:
        super().__init__(error.message)
        self.error = error


def bad_request(message: str, *, param: str | None, code: str = "invalid_value") -> RequestError:
    """A 400 that names the parameter."""
    return RequestError(HttpError(status=400, message=message, param=param, code=code))


def model_not_found(name: str, *, served: list[str]) -> RequestError:
    """A 404 that lists what is served."""
    known = ", ".join(repr(n) for n in served) or "none"
    message = f"The model {name!r} does not exist here; served models: {known}."
    return RequestError(
        HttpError(status=404, message=message, param="model", code="model_not_found")
    )


# Most specific first: the first class that fits decides.
_CATALOG: tuple[tuple[type[Exception], int, str, str, Mapping[str, str]], ...] = (
    (ModelNotFound, 404, "invalid_request_error", "model_not_found", {}),
    (ConfigError, 400, "invalid_request_error", "invalid_value", {}),
    (NotReady, 503, "server_error", "not_ready", {"Retry-After": "1"}),
    (CapacityExceeded, 429, "rate_limit_error", "capacity_exceeded", {"Retry-After": "1"}),
    (StageFailed, 500, "server_error", "stage_failed", {}),
    (CommError, 503, "server_error", "peer_lost", {}),
    (StagemeshError, 500, "server_error", "internal_error", {}),
)


def http_error_of(error: Exception) -> HttpError:
    """What a client is told about `error`.

    The text of an exception that is not ours stays in the log: it may hold anything.
    """
    if isinstance(error, RequestError):
        return error.error
    for kind, status, error_type, code, headers in _CATALOG:
        if isinstance(error, kind):
            message = str(error) or type(error).__name__
            return HttpError(
                status=status, message=message, type=error_type, code=code, headers=headers
            )
    return HttpError(
        status=500,
        message="The server failed in an unexpected way; its log has the details.",
        type="server_error",
        code="internal_error",
    )


async def answer_error(_request: Request, error: Exception) -> JSONResponse:
    """Exception handler for `RequestError`, `StagemeshError` and everything unexpected."""
    answer = http_error_of(error)
    if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        # Of what we raise on purpose the text says all; a traceback is for what nobody foresaw.
        unforeseen = None if isinstance(error, StagemeshError) else error
        logger.warning(
            "request failed: %s",
            answer.message,
            exc_info=unforeseen,
            extra={"status": answer.status},
        )
    return answer.response()


async def answer_http_exception(request: Request, error: Exception) -> JSONResponse:
    """Exception handler for what the router refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    messages = {
        404: f"Unknown request URL: {where}.",
        405: f"Method not allowed: {where}.",
    }
    codes = {404: "unknown_url", 405: "method_not_allowed"}
    return HttpError(
        status=error.status_code,
        message=messages.get(error.status_code, f"{where}: {error.detail}"),
        code=codes.get(error.status_code),
        headers=error.headers or {},
    ).response()
