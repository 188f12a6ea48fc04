"""Settings of a coordinator."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from coordinator.planner.profiles import Objective
from stagemesh.errors import ConfigError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
TpBackend = Literal["grpc", "gloo"]
Quantize = Literal["none", "auto", "int8", "int4"]

_COUNTS = (
    "max_context_tokens",
    "concurrency",
    "num_stages",
    "max_stages",
    "max_tp",
    "min_nodes",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentConfig:
    """A model to serve, and what is asked of its placement."""

    model: str
    """A folder, a .gguf file or a known name."""
    name: str | None = None
    """What clients call it; by default what the files call it."""
    dtype: Dtype = "auto"
    """Run dtype; "auto" is the checkpoint's own where it is a 16- or 32-bit float, else float32."""
    quantize: Quantize = "none"
    """How weights are held; see `stagemesh.checkpoint.low_bit`."""
    compile: bool = False
    """Compile each stage while it serves already."""
    max_context_tokens: int | None = None
    """Longest sequence; by default the model's, less when the nodes' memory does not hold it."""
    concurrency: int | None = None
    """Full-length sequences that the KV cache holds at once; by default 4, or what fits."""
    num_stages: int | None = None
    """Number of stages; by default one per node, or the planner's choice."""
    max_stages: int | None = None
    """No more stages than these."""
    tp: tuple[int, ...] = ()
    """Ranks that share each stage: one number a stage, or one for all; empty is one, or the
    planner's choice up to `max_tp`."""
    max_tp: int = 1
    """Ranks that the planner may let share a stage, where `tp` does not say."""
    tp_backend: TpBackend = "grpc"
    """What carries the tensors of ranks that share a stage."""
    objective: Objective | None = None
    """What the planner is to make good, from measured nodes; None gives every node layers by its
    memory."""
    prompt_tokens: int = 128
    """A typical prompt, for the prediction of the time to first token."""
    pinned: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Layers [start, end) that a node must have, by node id."""
    excluded: frozenset[str] = frozenset()
    """Nodes to leave alone."""
    min_nodes: int | None = None
    """Nodes to wait for before the first placement; by default whoever has come after a moment."""
    max_step_tokens: int = 512
    """Token budget of a step."""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.max_step_tokens < 1:
            raise ConfigError(f"max_step_tokens must be at least 1, got {self.max_step_tokens}")
        if self.prompt_tokens < 1:
            raise ConfigError(f"prompt_tokens must be at least 1, got {self.prompt_tokens}")
        if self.compile and self.quantize != "none":
            raise ConfigError(
                f"compile does not take quantised weights (quantize is {self.quantize}); drop one"
            )
        if self.compile and (self.is_shared or self.max_tp > 1):
            raise ConfigError("compile does not take stages that ranks share (tp); drop one")
        if any(degree < 1 for degree in self.tp):
            raise ConfigError(f"tp must be at least 1 for each stage, got {list(self.tp)}")
        if len(self.tp) > 1 and self.num_stages not in (None, len(self.tp)):
            raise ConfigError(
                f"tp names the ranks of {len(self.tp)} stages ({list(self.tp)}), "
                f"but {self.num_stages} stages are asked for"
            )

    @property
    def is_shared(self) -> bool:
        """Whether stages are to be shared by several ranks, each by so many as `tp` says."""
        return any(degree > 1 for degree in self.tp)

    @property
    def stage_ranks(self) -> tuple[int, ...] | None:
        """Ranks of each stage, where both their number and that of the stages are said."""
        if len(self.tp) == 1 and self.num_stages is not None:
            return self.tp * self.num_stages
        return self.tp if len(self.tp) > 1 else None

    @property
    def is_planned(self) -> bool:
        """Whether the planner decides, where nodes were measured: only it pins and shares."""
        return self.objective is not None or bool(self.pinned) or self.max_tp > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long the coordinator waits for what."""

    heartbeat_seconds: float = 1.0
    """Nodes beat this often."""
    silence_seconds: float = 6.0
    """A node that is silent for longer is lost."""
    load_stall_seconds: float = 60.0
    """A load that moves no byte for longer is given up; it has no other limit."""
    link_seconds: float = 10.0
    """Connecting two stages."""
    step_seconds: float = 120.0
    """From sending a step to its result."""
    settle_seconds: float = 1.0
    """Without `min_nodes`: how long no node must have joined before the first placement."""
    measure_seconds: float = 10.0
    """How long the first placement waits for the profiles of nodes and links, since a node
    joined; what is not there by then counts as what is slowest."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        if self.silence_seconds <= 2 * self.heartbeat_seconds:
            raise ConfigError(
                f"silence_seconds ({self.silence_seconds}) must be more than twice "
                f"heartbeat_seconds ({self.heartbeat_seconds}), or one late beat would be a death"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """What a coordinator is started with; checked once, here."""

    deployments: tuple[DeploymentConfig, ...]
    """Models to serve."""
    http_host: str = "127.0.0.1"
    """Where the API listens."""
    http_port: int | None = 8000
    """Port of the API; 0 takes a free one, None serves none."""
    rpc_bind: str = "127.0.0.1:7000"
    """host:port for nodes; port 0 takes a free one."""
    token: str | None = None
    """The cluster's secret; required when `rpc_bind` is not a loopback address."""
    insecure: bool = False
    """Allow public binds without secrets."""
    api_keys: frozenset[str] = frozenset()
    """Keys that API clients must show; none asks for none."""
    mqtt_url: str | None = None
    """Broker for presence and telemetry."""
    cluster: str = "default"
    """Name of the cluster in MQTT topics."""
    limits: Limits = field(default_factory=Limits)
    """Deadlines."""
    grace_seconds: float = 5.0
    """Bound of a clean shutdown."""

    def __post_init__(self) -> None:
        if not self.deployments:
            raise ConfigError("no model to serve: give --model a folder, a .gguf file or a name")
        if self.http_port is not None and not 0 <= self.http_port < 65536:
            raise ConfigError(f"http_port must be in [0, 65535], got {self.http_port}")
