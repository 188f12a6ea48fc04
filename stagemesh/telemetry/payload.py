"""JSON at the edge: what we publish, and presence messages that arrive.

A payload that arrives is not trusted: anything may publish to a broker.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from stagemesh.errors import ProtocolError

MAX_PRESENCE_BYTES = 16 * 1024
"""Longest presence message that is read."""
_MAX_FIELD_LENGTH = 500

PresenceState = Literal["online", "offline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """What a node's status topic says."""

    node_id: str
    """The node."""
    state: PresenceState
    """Whether it is there."""
    start_id: str
    """Drawn by the daemon at its start: tells an earlier process's will from news of this one."""
    reason: str
    """Why it is offline: "stopped" (its own word) or "lost" (its last will); "" when online."""


def encode_payload(payload: Mapping[str, Any] | None) -> bytes:
    """Compact JSON; None is the empty payload, which clears a retained topic.

    NaN and infinities, which JSON does not know, become null: a measurement that went wrong must
    not silence the others.

    Raises:
        TypeError: when a value is not JSON at all, which is a mistake of the caller.
    """
    if payload is None:
        return b""
    try:
        text = json.dumps(payload, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(_without_non_finite(payload), separators=(",", ":"), allow_nan=False)
    return text.encode()


def presence_payload(
    state: PresenceState,
    *,
    start_id: str,
    reason: str = "",
    details: Mapping[str, Any] | None = None,
) -> bytes:
    """The payload of a status topic."""
    fields = {**(details or {}), "state": state, "start_id": start_id}
    return encode_payload(fields if not reason else {**fields, "reason": reason})


def parse_presence(node_id: str, payload: bytes) -> Presence:
    """Read a status payload.

    Raises:
        ProtocolError: when it is too long, not a JSON object, or lacks a field.
    """
    if len(payload) > MAX_PRESENCE_BYTES:
        raise ProtocolError(
            f"the status of node {node_id!r} has {len(payload)} bytes: "
            f"allowed are {MAX_PRESENCE_BYTES}"
        )
    try:
        fields = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the status of node {node_id!r} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ProtocolError(f"the status of node {node_id!r} is not a JSON object")
    state = fields.get("state")
    if state not in ("online", "offline"):
        raise ProtocolError(
            f"the status of node {node_id!r} has state {str(state)[:40]!r}: "
            f"allowed are online, offline"
        )
    return Presence(
        node_id=node_id,
        state=state,
        start_id=_text(fields, "start_id", node_id=node_id),
        reason=_text(fields, "reason", node_id=node_id),
    )


def _text(fields: dict[str, Any], name: str, *, node_id: str) -> str:
    value = fields.get(name, "")
    if not isinstance(value, str) or len(value) > _MAX_FIELD_LENGTH:
        raise ProtocolError(
            f"the status of node {node_id!r} has a wrong {name}: expected a short text"
        )
    return value


def _without_non_finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _without_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_non_finite(item) for item in value]
    return value
