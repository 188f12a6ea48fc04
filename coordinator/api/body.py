"""Reads a request's body within the bounds and validates it into a schema."""

import asyncio
import logging
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from coordinator.api.errors import HttpError, RequestError, bad_request
from coordinator.api.limits import ApiLimits
from coordinator.api.values import UnsupportedError

logger = logging.getLogger(__name__)

SchemaT = TypeVar("SchemaT", bound=BaseModel)

_MAX_SHOWN_INPUT = 80


async def read_request(request: Request, schema: type[SchemaT], *, limits: ApiLimits) -> SchemaT:
    """Read and validate the JSON body.

    Raises:
        RequestError: the body is too long, too slow, no JSON or not what `schema` wants.
    """
    body = await _read_body(request, limits=limits)
    try:
        value = schema.model_validate_json(body)
    except ValidationError as error:
        raise _refusal_of(error) from error
    if value.model_extra:
        # Clients send fields that are newer than this server; refusing them would break those
        # clients for nothing.
        logger.debug("unknown request fields ignored", extra={"fields": sorted(value.model_extra)})
    return value


async def _read_body(request: Request, *, limits: ApiLimits) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_timeout_seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limits.max_body_bytes:
                    raise _too_large(limits)
    except TimeoutError as error:
        message = f"The request body did not arrive within {limits.body_timeout_seconds} s."
        raise RequestError(
            HttpError(status=408, message=message, code="request_timeout")
        ) from error
    return bytes(body)


def _too_large(limits: ApiLimits) -> RequestError:
    message = f"The request body is longer than the limit of {limits.max_body_bytes} bytes."
    # The rest of the body is not read, so the connection cannot carry another request.
    return RequestError(
        HttpError(
            status=413, message=message, code="request_too_large", headers={"Connection": "close"}
        )
    )


def _refusal_of(error: ValidationError) -> RequestError:
    # One message names one parameter; the client meets the next one when the first is right.
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return bad_request(
            f"The body is not valid JSON: {first['ctx']['error']}.", param=None, code="invalid_json"
        )
    param = parameter_name(first["loc"]) or None
    where = f"{param}: " if param else ""
    if first["type"] == "missing":
        message = f"Missing required parameter: {param}."
        return bad_request(message, param=param, code="missing_required_parameter")
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ValueError):
        code = "unsupported_value" if isinstance(cause, UnsupportedError) else "invalid_value"
        return bad_request(f"{where}{cause}", param=param, code=code)
    shown = _shorten(first["input"])
    return bad_request(f"{where}{first['msg']}, got {shown}.", param=param)


def _shorten(value: Any) -> str:
    # Containers are named, not shown: their text may be as long as the body.
    if isinstance(value, list | dict):
        return f"a {type(value).__name__}"
    text = repr(value[:_MAX_SHOWN_INPUT] if isinstance(value, str) else value)
    return text if len(text) <= _MAX_SHOWN_INPUT + 2 else f"{text[:_MAX_SHOWN_INPUT]}..."


def parameter_name(location: tuple[int | str, ...]) -> str:
    """`("messages", 1, "content")` as `messages[1].content`."""
    name = ""
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]"
        else:
            name += f".{part}" if name else part
    return name
