"""The topics, all below `{prefix}/{cluster}`; docs/mqtt.md lists their payloads.

    nodes/{node_id}/status               retained, last will
    nodes/{node_id}/metrics
    coordinator/status                   retained, last will
    deployments/{model}/placement        retained
    requests/{request_id}/events

Ids are percent-encoded where they hold characters that mean something in a topic (`/`, `+`, `#`),
so an id that a client chose cannot reach another topic.
"""

from dataclasses import dataclass
from urllib.parse import quote, unquote

from stagemesh.errors import ConfigError

MAX_ID_LENGTH = 200
"""Longest id in characters; MQTT itself limits a topic to 65,535 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topics:
    """Builds the topics of one cluster."""

    prefix: str = "stagemesh"
    """First level; lets one broker serve several products."""
    cluster: str = "default"
    """Second level; clusters on one broker do not see each other."""

    def __post_init__(self) -> None:
        for field, value in (("prefix", self.prefix), ("cluster", self.cluster)):
            if not value or _level(value, field) != value:
                raise ConfigError(
                    f"MQTT {field} is {value!r}: it must be one topic level of letters, digits, "
                    f"'_', '.', '-' or '~'"
                )

    @property
    def base(self) -> str:
        """What all topics of the cluster start with."""
        return f"{self.prefix}/{self.cluster}"

    @property
    def coordinator_status(self) -> str:
        """Presence of the coordinator."""
        return f"{self.base}/coordinator/status"

    @property
    def all_node_status(self) -> str:
        """The subscription that matches every node's presence."""
        return f"{self.base}/nodes/+/status"

    def node_status(self, node_id: str) -> str:
        """Presence of a node."""
        return f"{self.base}/nodes/{_level(node_id, 'node_id')}/status"

    def node_metrics(self, node_id: str) -> str:
        """Measurements of a node."""
        return f"{self.base}/nodes/{_level(node_id, 'node_id')}/metrics"

    def placement(self, model: str) -> str:
        """Which node runs which layers of a model."""
        return f"{self.base}/deployments/{_level(model, 'model')}/placement"

    def request_events(self, request_id: str) -> str:
        """What happens to a request."""
        return f"{self.base}/requests/{_level(request_id, 'request_id')}/events"

    def node_id_of(self, topic: str) -> str | None:
        """The node whose status topic this is; None for any other topic."""
        head, tail = f"{self.base}/nodes/", "/status"
        if not (topic.startswith(head) and topic.endswith(tail)):
            return None
        level = topic[len(head) : -len(tail)]
        return unquote(level) if level and "/" not in level else None


def _level(value: str, field: str) -> str:
    """One topic level from an id.

    Raises:
        ConfigError: when the id is empty or too long.
    """
    if not 0 < len(value) <= MAX_ID_LENGTH:
        raise ConfigError(f"{field} has {len(value)} characters: allowed are 1 to {MAX_ID_LENGTH}")
    return quote(value, safe="", errors="replace")
