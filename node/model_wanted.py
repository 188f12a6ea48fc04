"""What a node is told to load, and where it may look."""

from dataclasses import dataclass, field

from node.weight_fetch import FetchLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWanted:
    """What part of which model a node needs."""

    name: str
    """What clients call it."""
    path: str
    """Where the coordinator has it."""
    reference: str
    """What the user asked for."""
    fingerprint: str
    """Of the model that was planned with."""
    start_layer: int
    end_layer: int
    weights_address: str = ""
    """Who sends its weights; empty for the coordinator that the node registered at."""
    peers: tuple[tuple[str, str], ...] = ()
    """(id, address) of nodes that may have some."""
    ranks: tuple[str, ...] = ()
    """Ids of the nodes that share the stage, in the order of their ranks; empty for one alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceConfig:
    """Where to look."""

    node_id: str
    coordinator: str | None
    """host:port of the coordinator that the node registered at."""
    token: str | None
    has_local_files: bool = True
    """Whether paths and references are tried."""
    is_streaming: bool = True
    """Whether weights are taken from the network."""
    limits: FetchLimits = field(default_factory=FetchLimits)
    """Bounds of a fetch."""
