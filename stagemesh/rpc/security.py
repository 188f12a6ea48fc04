"""The cluster token: checked by servers, shown by clients; and the rule where a server may listen.

The token is a shared secret in the metadata `authorization: Bearer TOKEN`. It proves that a peer
belongs to the cluster; it does not encrypt. The health service stays open, as load balancers and
container probes ask it and it tells nothing but "serving".
"""

import hmac
import ipaddress
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio

from stagemesh.errors import ConfigError, Unauthenticated

# A string, as the class takes no parameters at run time.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Metadata = tuple[tuple[str, str], ...]

_HEADER = "authorization"
_OPEN_PREFIX = "/grpc.health.v1.Health/"


def check_token(token: str | None) -> None:
    """Refuse a token that could not travel in a header, or is none.

    Raises:
        ConfigError: it is empty, or has other characters than visible ASCII.
    """
    if token is None:
        return
    if not token or not all("!" <= char <= "~" for char in token):
        raise ConfigError(
            "token must be one or more visible ASCII characters without spaces "
            f"(got {len(token)} characters)"
        )


def auth_metadata(token: str | None) -> Metadata:
    """Metadata that shows the token; empty without one."""
    check_token(token)
    return () if token is None else ((_HEADER, f"Bearer {token}"),)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    if host.strip("[]").lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_bind(host: str, *, token: str | None, insecure: bool) -> None:
    """Refuse to listen where others reach us without a token.

    Raises:
        ConfigError: `host` is not loopback, there is no token, and `insecure` was not asked for.
    """
    check_token(token)
    if is_loopback(host) or token is not None or insecure:
        return
    raise ConfigError(
        f"refusing to listen on {host or 'all interfaces'!r} without a token: anyone who reaches "
        "the port could run work here. Set a token, bind to 127.0.0.1, or allow it on purpose "
        "(insecure)"
    )


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses each call that does not show the token, before any of its messages is read."""

    def __init__(self, token: str) -> None:
        check_token(token)
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Let the call through, or answer it with a refusal."""
        if handler_call_details.method.startswith(_OPEN_PREFIX):
            return await continuation(handler_call_details)
        if self._shows_token(handler_call_details):
            return await continuation(handler_call_details)
        # Stream in, stream out fits all four kinds, and answers without waiting for a message.
        return grpc.stream_stream_rpc_method_handler(_refuse)

    def _shows_token(self, details: grpc.HandlerCallDetails) -> bool:
        for key, value in details.invocation_metadata or ():
            if key == _HEADER:
                shown = value if isinstance(value, bytes) else value.encode()
                # Constant time: how much of a guess is right must not show in the answer time.
                return hmac.compare_digest(shown, self._expected)
        return False


async def _refuse(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    raise Unauthenticated(
        "this call needs the cluster's token (metadata 'authorization: Bearer TOKEN'); "
        "start both sides with the same token"
    )
