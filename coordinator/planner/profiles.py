"""What the planner knows of a cluster and of what is asked of it: measured values, wishes. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from stagemesh.errors import ConfigError

Objective = Literal["latency", "throughput"]

COORDINATOR = "coordinator"
"""Name of the coordinator in `ClusterProfile.links`: each token passes through it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProfile:
    """A node as it was measured."""

    node_id: str
    """Name of the node."""
    memory_bytes: int
    """What the stage may take: the node's limit less the reserve. Weights, KV cache, activations
    and `process_overhead_bytes` count against it."""
    stream_bytes_per_second: Mapping[str, float]
    """Weights that a matrix-vector product reads, by run dtype."""
    flops_per_second: Mapping[str, float]
    """Throughput of a matrix product, by run dtype."""
    process_overhead_bytes: int = 0
    """What the process takes before it holds a weight; 0 when the limit was measured with the
    process running."""
    layer_overhead_seconds: float = 0.0
    """Added per layer and step, whatever its size: calls, small kernels."""
    step_overhead_seconds: float = 0.0
    """Added per stage and step: decoding the message, embedding, sending on."""
    num_threads: int = 1
    """Threads it computes with."""
    device: str = "cpu"
    """What it computes on."""
    machine_id: str = ""
    """The machine; nodes of one that compute at once share its cores. Empty shares with nobody."""
    num_cores: int = 0
    """Cores of the machine that it may use; 0 where that is not known."""

    def __post_init__(self) -> None:
        if not self.node_id:
            raise ConfigError("a node needs a node_id")
        numbers = (
            ("memory_bytes", self.memory_bytes),
            ("process_overhead_bytes", self.process_overhead_bytes),
            ("layer_overhead_seconds", self.layer_overhead_seconds),
            ("step_overhead_seconds", self.step_overhead_seconds),
            *(
                (f"stream_bytes_per_second of {k}", v)
                for k, v in self.stream_bytes_per_second.items()
            ),
            *((f"flops_per_second of {k}", v) for k, v in self.flops_per_second.items()),
        )
        for name, value in numbers:
            # A comparison with NaN is false, so it is refused too.
            if not 0 <= value < float("inf"):
                raise ConfigError(
                    f"node {self.node_id!r}: {name} must be a finite number, 0 or more, got {value}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProfile:
    """One direction between two nodes."""

    latency_seconds: float
    """One way, for a small message."""
    bytes_per_second: float
    """For large ones."""
    sum_seconds: float | None = None
    """Of a small sum of two ranks that share a stage; None where only messages were measured."""
    sum_bytes_per_second: float | None = None
    """Of a large one."""
    sum_slowdown: float | None = None
    """How many times longer the two read weights when both do at once."""

    def __post_init__(self) -> None:
        if not 0 <= self.latency_seconds < float("inf") or not self.bytes_per_second > 0:
            raise ConfigError(
                f"a link needs latency_seconds of 0 or more and bytes_per_second above 0, got "
                f"{self.latency_seconds} and {self.bytes_per_second}"
            )
        if not 0 <= self.sum_latency < float("inf") or not self.sum_rate > 0:
            raise ConfigError(
                f"a link needs sum_seconds of 0 or more and sum_bytes_per_second above 0, got "
                f"{self.sum_seconds} and {self.sum_bytes_per_second}"
            )
        if not 1 <= self.slowdown < float("inf"):
            raise ConfigError(f"a link's sum_slowdown is 1 or more, got {self.sum_slowdown}")

    @property
    def sum_latency(self) -> float:
        """Seconds of a small sum: as measured, or of the message that it would take."""
        return self.latency_seconds if self.sum_seconds is None else self.sum_seconds

    @property
    def slowdown(self) -> float:
        """Of two nodes that read weights at once; 1 where it was not measured."""
        return 1.0 if self.sum_slowdown is None else self.sum_slowdown

    @property
    def sum_rate(self) -> float:
        """Bytes per second of a large sum, likewise."""
        rate = self.sum_bytes_per_second
        return self.bytes_per_second if rate is None else rate


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterProfile:
    """All nodes, in the caller's order, and the links between them."""

    nodes: tuple[NodeProfile, ...]
    """In the order of registration; later ones are appended."""
    default_link: LinkProfile
    """Where nothing was measured."""
    links: Mapping[tuple[str, str], LinkProfile] = field(default_factory=dict)
    """By (from, to); `COORDINATOR` may be either. One direction stands in for the other."""

    def __post_init__(self) -> None:
        ids = [node.node_id for node in self.nodes]
        twice = (
            sorted({node_id for node_id in ids if ids.count(node_id) > 1})
            if len(set(ids)) < len(ids)
            else []
        )
        if twice:
            raise ConfigError(f"nodes are offered more than once: {', '.join(twice)}")

    def link(self, source: str, target: str) -> LinkProfile:
        """The link from one node to another."""
        found = self.links.get((source, target)) or self.links.get((target, source))
        return found or self.default_link


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is to be served, and what of it is to be good."""

    max_context_tokens: int
    """Longest sequence; the KV cache holds `concurrency` of that length."""
    prompt_tokens: int = 128
    """Typical prompt: time to first token is predicted for it."""
    concurrency: int = 1
    """Sequences at once."""
    objective: Objective = "latency"
    """Least time per token of one stream, or most tokens per second of all streams."""
    max_step_tokens: int = 512
    """Token budget of a step: longer prompts go as several chunks, which overlap over stages."""

    def __post_init__(self) -> None:
        for name in ("max_context_tokens", "prompt_tokens", "concurrency", "max_step_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.prompt_tokens > self.max_context_tokens:
            raise ConfigError(
                f"prompt_tokens is {self.prompt_tokens}, more than max_context_tokens "
                f"({self.max_context_tokens})"
            )
        if self.objective not in ("latency", "throughput"):
            raise ConfigError(
                f"objective is {self.objective!r}: allowed are 'latency' and 'throughput'"
            )

    @property
    def decode_context_tokens(self) -> float:
        """Mean length of a sequence while it decodes to the full context."""
        return (self.prompt_tokens + self.max_context_tokens) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What the user wants of the placement; the default wants nothing."""

    num_stages: int | None = None
    """Exactly so many stages in each replica."""
    max_stages: int | None = None
    """No more stages than these."""
    pinned: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Layers [start, end) of a node, by node_id; nodes of one range share a stage (TP)."""
    excluded: frozenset[str] = frozenset()
    """Nodes to leave alone."""
    is_order_fixed: bool = False
    """Whether the order of the nodes is the order of the stages."""
    max_tp_degree: int = 1
    """Ranks that may share a stage."""
    tp_degrees: tuple[int, ...] = ()
    """Ranks that must share a stage: one number for all stages, or one for each, which also says
    how many there are. Empty leaves it open."""
    max_replicas: int = 1
    """Copies of the model that may share the streams."""

    def __post_init__(self) -> None:
        for name in ("num_stages", "max_stages", "max_tp_degree", "max_replicas"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if min(self.tp_degrees, default=1) < 1:
            raise ConfigError(f"tp_degrees must be at least 1, got {list(self.tp_degrees)}")
        if max(self.tp_degrees, default=1) > self.max_tp_degree:
            raise ConfigError(
                f"tp_degrees {list(self.tp_degrees)} are beyond max_tp_degree {self.max_tp_degree}"
            )
        if len(self.tp_degrees) > 1 and self.num_stages != len(self.tp_degrees):
            raise ConfigError(
                f"tp_degrees are of {len(self.tp_degrees)} stages, num_stages is {self.num_stages}"
            )
        for node_id, (start, end) in self.pinned.items():
            if not 0 <= start < end:
                raise ConfigError(f"pinned layers [{start}, {end}) of {node_id!r} are no range")
            if node_id in self.excluded:
                raise ConfigError(f"node {node_id!r} is pinned and excluded at once")
        ranges = sorted(set(self.pinned.values()))
        for (_, end), (start, other_end) in pairwise(ranges):
            if start < end:
                raise ConfigError(
                    f"pinned layers overlap without being equal at [{start}, {other_end})"
                )
