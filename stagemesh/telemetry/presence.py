"""Who is there: turns status messages into reports of change."""

import logging
from collections.abc import Callable

from stagemesh.errors import ProtocolError
from stagemesh.telemetry.payload import Presence, parse_presence
from stagemesh.telemetry.topics import Topics

logger = logging.getLogger(__name__)

MAX_WATCHED_NODES = 10_000
"""Nodes that are remembered; anything may publish to a broker, so there is a limit."""


class PresenceWatch:
    """Remembers the last status of each node and reports what is new.

    A reconnect delivers all retained statuses again; only differences reach the callback.

    Args:
        callback: called once per change.
        topics: the cluster that is watched.
    """

    def __init__(self, callback: Callable[[Presence], None], *, topics: Topics) -> None:
        self._callback = callback
        self._topics = topics
        self._last: dict[str, Presence] = {}

    def accept(self, topic: str, payload: bytes) -> None:
        """Take one message; one that is no valid status is logged and ignored."""
        node_id = self._topics.node_id_of(topic)
        # An empty payload is how an operator clears the status of a node that is gone for good.
        if node_id is None or not payload:
            return
        try:
            presence = parse_presence(node_id, payload)
            if self._is_news(presence):
                self._report(presence)
        except ProtocolError as error:
            logger.warning("mqtt presence ignored", extra={"why": str(error)})

    def _is_news(self, presence: Presence) -> bool:
        known = self._last.get(presence.node_id)
        if known is None and len(self._last) >= MAX_WATCHED_NODES:
            raise ProtocolError(
                f"more than {MAX_WATCHED_NODES} nodes publish a status; "
                f"{presence.node_id!r} is not watched"
            )
        self._last[presence.node_id] = presence
        return presence != known

    def _report(self, presence: Presence) -> None:
        try:
            self._callback(presence)
        except Exception:  # a mistake of the watcher must not end its own process's presence
            logger.exception("mqtt presence callback failed", extra={"peer": presence.node_id})
