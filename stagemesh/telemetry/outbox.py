"""What waits to be sent: retained state (the latest of each topic) and a bounded queue of events.

No network here. Retained state outlives its sending, since a broker that restarted may have lost
it; events are sent once and dropped, oldest first, when too many wait.
"""

import asyncio
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A message on its way to the broker."""

    topic: str
    payload: bytes
    retain: bool

    @property
    def num_bytes(self) -> int:
        """What it counts against the limit in bytes."""
        return len(self.topic) + len(self.payload)


class Outbox:
    """Bounded store between callers, which never wait, and the connection, which does.

    Args:
        max_messages: limit of events, and of retained topics.
        max_bytes: limit of the bytes of events, and of those of retained state.
    """

    def __init__(self, *, max_messages: int, max_bytes: int) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._events: deque[Outgoing] = deque()
        self._event_bytes = 0
        self._retained: dict[str, Outgoing] = {}
        self._retained_bytes = 0
        self._unsent: dict[str, None] = {}
        self._news = asyncio.Event()
        self.dropped_messages = 0
        """Messages that were given up since the start."""

    def __len__(self) -> int:
        """Messages that wait to be sent."""
        return len(self._events) + len(self._unsent)

    @property
    def queued_bytes(self) -> int:
        """Bytes of the events that wait."""
        return self._event_bytes

    def put(self, message: Outgoing) -> None:
        """Add a message; drops the oldest events where it would not fit."""
        if message.retain:
            self._put_retained(message)
        else:
            self._events.append(message)
            self._event_bytes += message.num_bytes
            self._trim()
        self._news.set()

    def take(self) -> Outgoing | None:
        """The next message, retained state first; None when nothing waits."""
        if self._unsent:
            topic = next(iter(self._unsent))
            del self._unsent[topic]
            return self._retained[topic]
        if self._events:
            message = self._events.popleft()
            self._event_bytes -= message.num_bytes
            return message
        self._news.clear()
        return None

    def sent(self, message: Outgoing) -> None:
        """The broker has it: a retained topic that was cleared need not be kept."""
        if message.retain and not message.payload and self._retained.get(message.topic) is message:
            self._forget(message.topic)

    def give_back(self, message: Outgoing) -> None:
        """It was taken and could not be sent."""
        if message.retain:
            # A newer state may have come meanwhile; then that one is marked already.
            self._unsent[message.topic] = None
            return
        self._events.appendleft(message)
        self._event_bytes += message.num_bytes
        self._trim()

    def resend_retained(self) -> None:
        """Mark all retained state as unsent: a new connection may be to a broker that lost it."""
        self._unsent = dict.fromkeys(self._retained)
        self._news.set()

    def wake(self) -> None:
        """End `wait` though nothing was put."""
        self._news.set()

    async def wait(self) -> None:
        """Return when something may have been put; a sender calls it after `take` gave None."""
        await self._news.wait()

    def _put_retained(self, message: Outgoing) -> None:
        known = self._retained.get(message.topic)
        new_bytes = self._retained_bytes + message.num_bytes - (known.num_bytes if known else 0)
        is_full = known is None and len(self._retained) >= self._max_messages
        if is_full or new_bytes > self._max_bytes:
            self.dropped_messages += 1
            return
        self._retained[message.topic] = message
        self._retained_bytes = new_bytes
        self._unsent[message.topic] = None

    def _forget(self, topic: str) -> None:
        self._retained_bytes -= self._retained.pop(topic).num_bytes
        self._unsent.pop(topic, None)

    def _trim(self) -> None:
        while len(self._events) > self._max_messages or self._event_bytes > self._max_bytes:
            self._event_bytes -= self._events.popleft().num_bytes
            self.dropped_messages += 1
