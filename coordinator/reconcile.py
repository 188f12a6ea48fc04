"""What to do about a deployment: a pure decision from what is wanted and what is there.

        waiting --Place--> loading --loaded--> ready
           ^                  |                  |
           `---- Abandon -----+----- Abandon ----'     (a node of the plan is gone)

A node that joins does not change a plan that runs: running answers would lose their caches for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from coordinator.membership import NodeInfo

Phase = Literal["waiting", "loading", "ready", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentView:
    """What is known when the decision is made."""

    phase: Phase
    """Where the deployment is."""
    nodes: Sequence[NodeInfo]
    """Nodes that can take work."""
    used: Mapping[str, str]
    """The plan's nodes: node id to the start id with which it was made; empty without a plan."""
    min_nodes: int | None
    """Nodes to wait for before the first placement."""
    was_ready: bool
    """It has been ready once, so it no longer waits for `min_nodes`."""
    seconds_since_join: float
    """Since the last node joined."""
    settle_seconds: float
    """Without `min_nodes`, the first placement waits until no node joined for so long."""
    failed_with: frozenset[str]
    """Start ids of the nodes present when the last attempt failed for a reason of its own."""
    measuring: str = ""
    """Profiles and links that the placement would go by and that are still to come."""
    measure_seconds: float = 0.0
    """How long the first placement waits for them, since the last node joined."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing can be done now."""

    detail: str
    """What is missing, for a person."""
    seconds: float | None = None
    """Decide again after this long even if nothing changes."""


@dataclass(frozen=True, slots=True)
class Place:
    """Make a plan for these nodes, in this order, and load it."""

    nodes: tuple[NodeInfo, ...]


@dataclass(frozen=True, slots=True)
class Abandon:
    """The plan no longer holds."""

    detail: str
    """Who is gone, for a person."""


@dataclass(frozen=True, slots=True)
class Keep:
    """All is as it should be, or as it must stay until something changes."""


Action = Wait | Place | Abandon | Keep


def decide(view: DeploymentView) -> Action:
    """The next thing to do."""
    present = {node.node_id: node.start_id for node in view.nodes}
    gone = [node_id for node_id, start in view.used.items() if present.get(node_id) != start]
    if gone:
        return Abandon(f"node {', '.join(sorted(gone))} is gone")
    if view.phase in ("loading", "ready"):
        return Keep()
    if view.phase == "failed" and view.failed_with == frozenset(present.values()):
        return Keep()
    return _first_step(view)


def _first_step(view: DeploymentView) -> Action:
    count = len(view.nodes)
    if count == 0:
        return Wait("no node is registered; start node-daemon --coordinator HOST:PORT on a host")
    if not view.was_ready:
        if view.min_nodes is not None and count < view.min_nodes:
            return Wait(f"{count} of {view.min_nodes} nodes are registered")
        left = view.settle_seconds - view.seconds_since_join
        if view.min_nodes is None and left > 0:
            return Wait(f"{count} nodes are registered; waiting a moment for more", seconds=left)
        left = view.measure_seconds - view.seconds_since_join
        if view.measuring and left > 0:
            most = f"for {view.measure_seconds:g} s at most"
            return Wait(f"waiting {most} until these are measured: {view.measuring}", seconds=left)
    return Place(tuple(sorted(view.nodes, key=lambda node: node.node_id)))
