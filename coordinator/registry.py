"""Which nodes are there: decides, from the signs of life it is told, who joined, is lost or left.

Pure: time is an argument, nothing waits, nothing is sent. The heartbeat service reports joins,
beats and closed streams; the telemetry bus reports last wills; a timer calls `expire`. Each call
returns the events that it caused, in order, for the controller to act on.

A node is removed for four reasons only: silence beyond the limit, the end of its stream, its own
word, and a last will that no beat contradicts. A node that is slow but beats stays.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.membership import (
    LossReason,
    Member,
    MembershipEvent,
    NodeInfo,
    NodeJoined,
    NodeLeft,
    NodeLost,
    apply_event,
)
from stagemesh.errors import ConfigError, NotReady

PRESENCE_LIMIT_FRACTION = 0.5
"""A last will shortens the allowed silence to this part of the limit; it never ends it at once,
because a node whose broker connection broke may be well and beating."""


@dataclass(slots=True)
class _Signs:
    """Signs of life of a ready node."""

    last_beat: float
    num_streams: int = 1
    offline_since: float | None = None


class Registry:
    """The table of nodes and the bounded history of its events.

    Args:
        max_history: events kept for `status`, the oldest go first.
        max_departed: lost or left nodes kept in the table, the longest gone go first.
    """

    def __init__(self, *, max_history: int = 256, max_departed: int = 64) -> None:
        if max_history < 1 or max_departed < 0:
            raise ConfigError(
                f"max_history must be at least 1 and max_departed at least 0, "
                f"got {max_history} and {max_departed}"
            )
        self._members: dict[str, Member] = {}
        self._signs: dict[str, _Signs] = {}
        self._history: deque[MembershipEvent] = deque(maxlen=max_history)
        self._max_departed = max_departed

    @property
    def members(self) -> tuple[Member, ...]:
        """All known nodes, in the order of their first join."""
        return tuple(self._members.values())

    @property
    def history(self) -> tuple[MembershipEvent, ...]:
        """The last events, oldest first."""
        return tuple(self._history)

    def ready_nodes(self) -> tuple[NodeInfo, ...]:
        """The nodes that can take work, in the order of their first join."""
        return tuple(m.info for m in self._members.values() if m.state == "ready")

    def last_beat(self, node_id: str) -> float | None:
        """When a ready node last beat; None for one that is not ready."""
        signs = self._signs.get(node_id)
        return None if signs is None else signs.last_beat

    def joined_at(self, node_id: str) -> float | None:
        """When a ready node became one; None for one that is not ready."""
        member = self._members.get(node_id)
        if member is None or member.state != "ready":
            return None
        return member.changed_at_seconds

    def join(self, info: NodeInfo, *, now: float) -> list[MembershipEvent]:
        """A node opened its stream.

        A new start of a known node replaces the old one, which is reported lost first. The same
        start on another stream is a reconnect: an event only if the node was not ready in between.

        Raises:
            ConfigError: a node of this name is ready at another address.
        """
        if not info.node_id or not info.start_id or not info.address:
            raise ConfigError(f"a node must join with node_id, start_id and address, got {info}")
        member = self._members.get(info.node_id)
        if member is None or member.state != "ready":
            return self._admit(info, now)
        if member.info.address != info.address:
            raise ConfigError(
                f"node_id {info.node_id!r} is taken: the node at {member.info.address} with this "
                f"name still beats, so the one at {info.address} can't join; "
                f"give it another node_id"
            )
        if member.info.start_id != info.start_id:
            detail = f"node {info.node_id} started anew at {info.address}"
            return [self._lose(member.info, "replaced", detail, now), *self._admit(info, now)]
        signs = self._signs[info.node_id]
        # Both streams count: the end of the old one may be noticed after the new one is open.
        signs.num_streams += 1
        self._beat(signs, now)
        return [] if member.info == info else self._record(NodeJoined(info=info, at_seconds=now))

    def beat(self, node_id: str, *, start_id: str, now: float) -> None:
        """A node gave a sign of life.

        Raises:
            NotReady: this incarnation is not a ready member (any more); it must join again.
        """
        member = self._current(node_id, start_id)
        if member is None:
            known = self._members.get(node_id)
            why = "it never joined" if known is None else f"it is {known.state}: {known.detail}"
            raise NotReady(f"node {node_id} (start {start_id}) must join again: {why}")
        self._beat(self._signs[node_id], now)

    def leave(self, node_id: str, *, start_id: str, now: float) -> list[MembershipEvent]:
        """A node says that it stops; the word of a start that is not current changes nothing."""
        if self._current(node_id, start_id) is None:
            return []
        del self._signs[node_id]
        return self._record(NodeLeft(node_id=node_id, start_id=start_id, at_seconds=now))

    def stream_closed(self, start_id: str, *, now: float) -> list[MembershipEvent]:
        """A heartbeat stream whose join was accepted ended; the last one of a start is its end."""
        for member in self._members.values():
            if member.state == "ready" and member.info.start_id == start_id:
                signs = self._signs[member.info.node_id]
                signs.num_streams -= 1
                if signs.num_streams > 0:
                    return []
                detail = f"the heartbeat stream of node {member.info.node_id} closed"
                return [self._lose(member.info, "stream closed", detail, now)]
        return []

    def presence_offline(self, node_id: str, *, start_id: str, now: float) -> None:
        """The broker delivered a node's last will.

        It counts when no beat follows within a part of the heartbeat limit (`expire` decides). A
        will of an earlier incarnation, which brokers retain, is ignored.
        """
        if self._current(node_id, start_id) is not None:
            self._signs[node_id].offline_since = now

    def expire(self, *, now: float, limit_seconds: float) -> list[MembershipEvent]:
        """Report the nodes that were silent for too long."""
        events: list[MembershipEvent] = []
        for node_id, signs in list(self._signs.items()):
            info = self._members[node_id].info
            silence = now - signs.last_beat
            if silence > limit_seconds:
                detail = (
                    f"node {node_id} at {info.address} was silent for {silence:.1f} s "
                    f"(limit {limit_seconds:g} s)"
                )
                events.append(self._lose(info, "silence", detail, now))
            elif signs.offline_since is not None:
                since_will = now - signs.offline_since
                if since_will > limit_seconds * PRESENCE_LIMIT_FRACTION:
                    detail = (
                        f"node {node_id} at {info.address}: its last will was delivered and no "
                        f"beat came in the {since_will:.1f} s since"
                    )
                    events.append(self._lose(info, "presence", detail, now))
        return events

    def _current(self, node_id: str, start_id: str) -> Member | None:
        member = self._members.get(node_id)
        if member is None or member.state != "ready" or member.info.start_id != start_id:
            return None
        return member

    def _admit(self, info: NodeInfo, now: float) -> list[MembershipEvent]:
        self._signs[info.node_id] = _Signs(last_beat=now)
        return self._record(NodeJoined(info=info, at_seconds=now))

    def _lose(self, info: NodeInfo, reason: LossReason, detail: str, now: float) -> MembershipEvent:
        del self._signs[info.node_id]
        event = NodeLost(
            node_id=info.node_id,
            start_id=info.start_id,
            reason=reason,
            detail=detail,
            at_seconds=now,
        )
        self._record(event)
        return event

    def _record(self, event: MembershipEvent) -> list[MembershipEvent]:
        apply_event(self._members, event)
        self._history.append(event)
        for node_id in self._surplus():
            del self._members[node_id]
        return [event]

    def _surplus(self) -> Sequence[str]:
        """Departed nodes beyond the bound, so that ever new names can't fill the memory."""
        departed = [m for m in self._members.values() if m.state != "ready"]
        departed.sort(key=lambda member: member.changed_at_seconds)
        num_surplus = max(0, len(departed) - self._max_departed)
        return [member.info.node_id for member in departed[:num_surplus]]

    @staticmethod
    def _beat(signs: _Signs, now: float) -> None:
        signs.last_beat = now
        signs.offline_since = None
