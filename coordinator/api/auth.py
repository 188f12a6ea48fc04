"""API keys: who may use /v1."""

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from coordinator.api.errors import HttpError

# Probes of orchestrators carry no key, and what it tells is no secret.
_OPEN_PATHS = frozenset({"/health"})


class ApiKeyGate:
    """ASGI middleware that lets through only requests with one of the keys.

    With no key configured everybody passes.
    """

    def __init__(self, app: ASGIApp, *, api_keys: frozenset[str]) -> None:
        self._app = app
        self._keys = tuple(key.encode() for key in api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] != "http" or not self._keys or scope["path"] in _OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._is_known(given.strip()):
            await self._app(scope, receive, send)
            return
        problem = "Incorrect API key provided" if given else "You did not provide an API key"
        refusal = HttpError(
            status=401,
            message=f"{problem}; send one as 'Authorization: Bearer KEY'.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await refusal.response()(scope, receive, send)

    def _is_known(self, given: str) -> bool:
        # Every key is compared, in constant time, so that the time tells nothing about them.
        matches = [hmac.compare_digest(given.encode(), key) for key in self._keys]
        return any(matches)
