"""The values of membership: who a node is, what can happen to it, and the fold of those events.

    joins --> NodeJoined --> ready --+--> NodeLost(reason) --> lost --> NodeJoined --> ready ...
                                     `--> NodeLeft -----------> left --> NodeJoined --> ready ...

`coordinator.registry` decides which event happens; here an event changes the table, and nothing
else does, so the table of any moment is the fold of the events until then (less the nodes gone
longest, which the registry forgets).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

NodeState = Literal["ready", "lost", "left"]
LossReason = Literal["silence", "stream closed", "presence", "replaced"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo:
    """What a node says about itself when it joins."""

    node_id: str
    """Name of the node, unique in the cluster."""
    address: str
    """Where peers reach its gRPC server, host:port."""
    device: str = "cpu"
    """Torch device that computes."""
    num_threads: int = 1
    """Threads of the device, where it is a CPU."""
    memory_bytes: int = 0
    """Memory offered for weights and KV cache."""
    memory_total_bytes: int = 0
    """Memory of the device."""
    hostname: str = ""
    """For a person."""
    platform: str = ""
    """Operating system and architecture, for a person."""
    start_id: str
    """Changes at each start of the daemon: tells one incarnation of a node from the next."""
    software: str = ""
    """Release of the daemon."""
    will_measure: bool = False
    """It measures itself after it has joined."""
    unix_path: str = ""
    """A unix socket of its server, where it has one."""
    host_id: str = ""
    """On which host that is."""
    machine_id: str = ""
    """The machine; empty where it cannot be told."""
    num_cores: int = 0
    """Cores of the machine that the node may use; 0 where it does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined:
    """A node is there, for the first time or again."""

    info: NodeInfo
    at_seconds: float

    @property
    def node_id(self) -> str:
        """The node."""
        return self.info.node_id


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """An incarnation of a node is gone without a word of its own."""

    node_id: str
    start_id: str
    reason: LossReason
    detail: str
    """The whole sentence for a person."""
    at_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLeft:
    """A node said that it stops."""

    node_id: str
    start_id: str
    at_seconds: float


MembershipEvent = NodeJoined | NodeLost | NodeLeft


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One row of the table."""

    info: NodeInfo
    state: NodeState
    changed_at_seconds: float
    """When the state was entered."""
    detail: str = ""
    """Why it is lost; empty otherwise."""


def apply_event(members: dict[str, Member], event: MembershipEvent) -> None:
    """Change the table as the event says. A node that comes back keeps its place in the order."""
    match event:
        case NodeJoined(info=info, at_seconds=at):
            members[info.node_id] = Member(info=info, state="ready", changed_at_seconds=at)
        case NodeLost(node_id=node_id, detail=detail, at_seconds=at):
            members[node_id] = replace(
                members[node_id], state="lost", changed_at_seconds=at, detail=detail
            )
        case NodeLeft(node_id=node_id, at_seconds=at):
            members[node_id] = replace(
                members[node_id], state="left", changed_at_seconds=at, detail=""
            )


def fold(events: Iterable[MembershipEvent]) -> dict[str, Member]:
    """The table after all events."""
    members: dict[str, Member] = {}
    for event in events:
        apply_event(members, event)
    return members
