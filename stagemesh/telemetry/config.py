"""Where the broker is, and the limits of the connection to it."""

from dataclasses import dataclass, field
from urllib.parse import SplitResult, unquote, urlsplit

from stagemesh.errors import ConfigError

_DEFAULT_PORTS = {"mqtt": 1883, "mqtts": 8883}
_FORM = "expected mqtt://[user[:password]@]host[:port] or mqtts://..."


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerAddress:
    """A broker and how to log in to it; `str()` shows it without the password."""

    host: str
    """Name or IP address, IPv6 without brackets."""
    port: int
    """TCP port."""
    use_tls: bool = False
    """Encrypt, and check the broker's certificate and name."""
    username: str | None = None
    """Log in as this user; None logs in as nobody."""
    password: str | None = field(default=None, repr=False)
    """Password of `username`."""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'mqtts' if self.use_tls else 'mqtt'}://{host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MqttLimits:
    """Bounds and intervals of one connection."""

    keepalive_seconds: int = 10
    """The broker sends the last will after 1.5 of these in silence."""
    connect_timeout_seconds: float = 5.0
    """Deadline of connecting and of each acknowledgement."""
    min_backoff_seconds: float = 0.25
    """Pause after the first failure; doubles with each further one."""
    max_backoff_seconds: float = 10.0
    """Longest pause, and how long a connection must last before the pauses start over."""
    max_queued_messages: int = 1000
    """Messages that wait while the broker is away; the oldest are dropped beyond."""
    max_queued_bytes: int = 4 * 2**20
    """The same in bytes, of topics and payloads; also the limit of all retained state."""
    stop_grace_seconds: float = 2.0
    """How long a stop may take: sending what waits, then the offline message."""

    def __post_init__(self) -> None:
        # Below 3 seconds a ping that is one event-loop tick late already reads as a death.
        _check("keepalive_seconds", self.keepalive_seconds, 3, 3600)
        _check("connect_timeout_seconds", self.connect_timeout_seconds, 0.05, 300)
        _check("min_backoff_seconds", self.min_backoff_seconds, 0.01, 3600)
        _check("max_backoff_seconds", self.max_backoff_seconds, self.min_backoff_seconds, 3600)
        _check("max_queued_messages", self.max_queued_messages, 1, 10**6)
        _check("max_queued_bytes", self.max_queued_bytes, 1024, 2**30)
        _check("stop_grace_seconds", self.stop_grace_seconds, 0.05, 300)


def parse_mqtt_url(url: str) -> BrokerAddress:
    """Read `mqtt://user:pass@host:port` or `mqtts://...`; user and password are percent-decoded.

    Raises:
        ConfigError: when the URL has another form. The text never shows the URL: a mistyped one may
            have the password anywhere.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        # The parser's own text may quote the password, so it is not chained either.
        raise ConfigError(f"the MQTT URL has a wrong host or port: {_FORM}") from None
    if parts.scheme not in _DEFAULT_PORTS:
        raise ConfigError(f"the MQTT URL must start with mqtt:// or mqtts://: {_FORM}")
    _check_parts(url, parts)
    return BrokerAddress(
        host=parts.hostname or "",
        port=_DEFAULT_PORTS[parts.scheme] if port is None else port,
        use_tls=parts.scheme == "mqtts",
        username=None if parts.username is None else unquote(parts.username),
        password=None if parts.password is None else unquote(parts.password),
    )


def _check_parts(url: str, parts: SplitResult) -> None:
    if not url.isprintable() or " " in url:
        raise ConfigError(f"the MQTT URL has a blank or control character: {_FORM}")
    if not parts.hostname:
        raise ConfigError(f"the MQTT URL names no host: {_FORM}")
    if parts.port == 0:
        raise ConfigError(f"the MQTT URL has port 0: a broker listens on 1 to 65535; {_FORM}")
    if parts.password is not None and not parts.username:
        raise ConfigError(f"the MQTT URL has a password and no user: {_FORM}")
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ConfigError(
            f"the MQTT URL has something after the port: {_FORM}. "
            f"Write '/', '?', '#' and '@' in a password as %2F, %3F, %23 and %40"
        )


def _check(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} is {value}: allowed are {low} to {high}")
