"""Bounds of the HTTP API."""

from dataclasses import dataclass, fields

from stagemesh.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiLimits:
    """What one request may take; a request that passes a bound is refused, never cut."""

    max_body_bytes: int = 4 * 1024 * 1024
    """Longest request body."""
    body_timeout_seconds: float = 30.0
    """The whole body must have arrived by then."""
    send_timeout_seconds: float = 60.0
    """A client that takes no byte for this long counts as gone."""
    max_choices: int = 128
    """Most sequences of one request: its prompts times n."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            # Written so that NaN fails too.
            if not value > 0:
                raise ConfigError(f"{field.name} must be more than 0, got {value}")
