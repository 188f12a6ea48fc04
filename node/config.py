"""Settings of a node daemon."""

from dataclasses import dataclass
from pathlib import Path

from stagemesh.errors import ConfigError
from stagemesh.rpc.address import split_address
from stagemesh.telemetry.config import parse_mqtt_url
from stagemesh.telemetry.topics import Topics


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """What a node daemon is started with; checked once, here."""

    node_id: str
    """Name of the node, unique in the cluster."""
    coordinator: str | None
    """host:port of the coordinator's gRPC server; None runs without one."""
    bind: str = "127.0.0.1:0"
    """host:port of the node's gRPC server; port 0 takes a free one."""
    advertise: str | None = None
    """host:port at which peers reach this node; the bound address by default."""
    device: str = "auto"
    """"auto", "cpu", "cuda:N" or "mps"."""
    num_threads: int | None = None
    """Threads of a CPU device; all cores by default."""
    memory_bytes: int | None = None
    """Memory offered for weights and KV cache; 90 % of what is free by default."""
    measure: bool = True
    """Measure the device at the start, so that models are placed by speed too."""
    token: str | None = None
    """The cluster's secret; required when `bind` is not a loopback address."""
    insecure: bool = False
    """Allow a public bind without a token."""
    unix_socket: bool = False
    """Listen on a unix socket too, and carry groups over those of nodes on this host."""
    cache_folder: Path | None = None
    """Where fetched weights are kept; by default "weights" in the user's cache folder."""
    cache_limit_bytes: int | None = None
    """Most bytes of weights to keep; by default what the disk has room for."""
    has_local_files: bool = True
    """Look for models at the coordinator's path and by their reference."""
    is_streaming: bool = True
    """Fetch the weights of a model that is not here."""
    mqtt_url: str | None = None
    """Broker for presence and telemetry."""
    cluster: str = "default"
    """Name of the cluster in MQTT topics."""
    metrics_seconds: float = 5.0
    """Pause between two measurements that go to the broker."""
    grace_seconds: float = 5.0
    """Bound of a clean shutdown."""
    max_tensor_bytes: int = 2 * 2**30
    """Largest tensor that is taken from the network."""

    def __post_init__(self) -> None:
        if not self.node_id or any(c in self.node_id for c in "/+# "):
            raise ConfigError(
                f"node id must be a word without '/', '+', '#' or blanks, got {self.node_id!r}"
            )
        if self.num_threads is not None and self.num_threads < 1:
            raise ConfigError(f"threads must be at least 1, got {self.num_threads}")
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise ConfigError(f"memory must be positive, got {self.memory_bytes} bytes")
        if self.cache_limit_bytes is not None and self.cache_limit_bytes < 1:
            raise ConfigError(f"cache limit must be positive, got {self.cache_limit_bytes} bytes")
        if not self.has_local_files and not self.is_streaming:
            raise ConfigError(
                "--no-local-files and --local-only together leave no place to find a model in"
            )
        if self.mqtt_url is not None:
            parse_mqtt_url(self.mqtt_url)
            Topics(cluster=self.cluster)
        if self.metrics_seconds <= 0:
            raise ConfigError(f"metrics_seconds must be positive, got {self.metrics_seconds}")
        for name in ("bind", "advertise", "coordinator"):
            value = getattr(self, name)
            if value is not None:
                _check_address(name, value)


def _check_address(name: str, value: str) -> None:
    try:
        host, _ = split_address(value)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    if not host:
        raise ConfigError(f"{name}: address {value!r} has no host")
