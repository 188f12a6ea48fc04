"""Received messages of one rank, waiting to be asked for; and the credit that bounds them.

    sender                                   receiver
    CreditWindow.acquire -- message ------>  Mailbox.put
                         <-- on_taken -----  Mailbox.get
    CreditWindow.release

Messages wait by (source rank, tag), in the order of arrival. What one source may have waiting is
bounded in bytes, per source, so that one busy peer cannot shut out the others. Every waiter can be
woken: by the loss of its source, or by the abort of the group. Loop-bound, not thread-safe.
"""

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from stagemesh.errors import CapacityExceeded, CommError, GroupAborted, PeerLost, ProtocolError

DEFAULT_CAPACITY_BYTES = 64 * 2**20
"""What one source may have waiting at one rank. A larger message is taken when nothing waits."""

_MESSAGE_OVERHEAD_BYTES = 1024


def message_cost(num_bytes: int) -> int:
    """What a message counts against the bound; an empty one counts too, to bound their number."""
    return num_bytes + _MESSAGE_OVERHEAD_BYTES


class Deliverable(Protocol):
    """What a mailbox needs to know of a message."""

    @property
    def source_rank(self) -> int:
        """Who sent it."""

    @property
    def incarnation(self) -> int:
        """Incarnation of the group in which it was sent."""

    @property
    def tag(self) -> int:
        """Which receive it is for."""

    @property
    def num_bytes(self) -> int:
        """Its payload."""


MessageT = TypeVar("MessageT", bound=Deliverable)
_Key = tuple[int, int]


class CreditWindow:
    """How many bytes a sender may have under way to one receiver."""

    def __init__(self, *, capacity_bytes: int = DEFAULT_CAPACITY_BYTES) -> None:
        self._capacity = capacity_bytes
        self._outstanding = 0
        self._failure: Callable[[], CommError] | None = None
        self._changed = asyncio.Event()

    async def acquire(self, cost: int) -> None:
        """Wait until `cost` fits, or nothing else is under way.

        Raises:
            CommError: the window failed.
        """
        while True:
            if self._failure is not None:
                raise self._failure()
            if not self._outstanding or self._outstanding + cost <= self._capacity:
                self._outstanding += cost
                return
            self._changed.clear()
            await self._changed.wait()

    def has_room(self, cost: int) -> bool:
        """Whether `acquire` would return at once."""
        fits = not self._outstanding or self._outstanding + cost <= self._capacity
        return self._failure is None and fits

    def release(self, cost: int) -> None:
        """The receiver took that many bytes."""
        self._outstanding = max(0, self._outstanding - cost)
        self._changed.set()

    def fail(self, make_error: Callable[[], CommError]) -> None:
        """Wake all waiters with an error; later ones get it at once."""
        self._failure = self._failure or make_error
        self._changed.set()


class Mailbox(Generic[MessageT]):
    """Messages to one rank in one incarnation of a group."""

    def __init__(
        self,
        *,
        incarnation: int = 1,
        capacity_bytes: int = DEFAULT_CAPACITY_BYTES,
        on_taken: Callable[[int, int], None] | None = None,
    ) -> None:
        """Make an empty one.

        Args:
            incarnation: messages of older ones are dropped.
            capacity_bytes: bound of what waits from one source.
            on_taken: called with source rank and cost when a message has left the mailbox.
        """
        self.incarnation = incarnation
        self.num_dropped = 0
        self.aborted = asyncio.Event()
        self._abort_callbacks: list[Callable[[], None]] = []
        self._capacity = capacity_bytes
        self._on_taken = on_taken
        self._queues: defaultdict[_Key, deque[MessageT]] = defaultdict(deque)
        self._waiters: defaultdict[_Key, deque[asyncio.Future[MessageT]]] = defaultdict(deque)
        self._waiting_bytes: Counter[int] = Counter()
        self._lost: dict[int, Callable[[], CommError]] = {}
        self._abort_cause = ""

    def put(self, message: MessageT) -> bool:
        """Deliver a message; False when it was dropped as old, or as the group is aborted.

        Raises:
            CapacityExceeded: the source did not wait for credit.
            ProtocolError: the message is of a later incarnation.
        """
        if message.incarnation > self.incarnation:
            raise ProtocolError(
                f"message of incarnation {message.incarnation} in a mailbox of {self.incarnation}"
            )
        if message.incarnation < self.incarnation or self.aborted.is_set():
            self.num_dropped += 1
            return False
        source, cost = message.source_rank, message_cost(message.num_bytes)
        waiter = self._pop_waiter((source, message.tag))
        if waiter is not None:
            waiter.set_result(message)
            self._taken(source, cost)
            return True
        waiting = self._waiting_bytes[source]
        if waiting and waiting + cost > self._capacity:
            raise CapacityExceeded(
                f"rank {source} has {waiting} bytes waiting and sent {cost} more; "
                f"the limit is {self._capacity}"
            )
        self._waiting_bytes[source] += cost
        self._queues[source, message.tag].append(message)
        return True

    async def get(self, source_rank: int, tag: int) -> MessageT:
        """Wait for the next message of a source with a tag. The caller sets the deadline.

        Raises:
            PeerLost: the source is lost and has nothing left here.
            GroupAborted: the group was aborted.
        """
        self.raise_if_aborted()
        key = (source_rank, tag)
        queue = self._queues.get(key)
        if queue:
            message = queue.popleft()
            if not queue:
                del self._queues[key]
            cost = message_cost(message.num_bytes)
            self._waiting_bytes[source_rank] -= cost
            self._taken(source_rank, cost)
            return message
        if source_rank in self._lost:
            raise self._lost[source_rank]()
        waiter: asyncio.Future[MessageT] = asyncio.get_running_loop().create_future()
        self._waiters[key].append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            self._give_back(key, waiter)
            raise

    def fail_source(self, source_rank: int, reason: str, *, node_id: str = "") -> None:
        """Wake all that wait for a rank: it is lost. What it sent before can still be taken."""

        def make() -> CommError:
            return PeerLost(reason, rank=source_rank, node_id=node_id)

        self._lost.setdefault(source_rank, make)
        self._fail_waiters([key for key in self._waiters if key[0] == source_rank], make)

    def is_lost(self, source_rank: int) -> bool:
        """Whether a rank is lost."""
        return source_rank in self._lost

    def abort(self, cause: str) -> None:
        """Wake everybody: the group is aborted. Later calls raise, waiting messages are freed."""
        if self.aborted.is_set():
            return
        self._abort_cause = cause
        self.aborted.set()
        self._queues.clear()
        self._waiting_bytes.clear()
        self._fail_waiters(list(self._waiters), self._aborted_error)
        for callback in self._abort_callbacks:
            callback()

    def call_on_abort(self, callback: Callable[[], None]) -> None:
        """Call back once the group is aborted."""
        self._abort_callbacks.append(callback)

    def raise_if_aborted(self) -> None:
        """Raise GroupAborted, once the group is aborted."""
        if self.aborted.is_set():
            raise self._aborted_error()

    def _aborted_error(self) -> CommError:
        return GroupAborted(self._abort_cause)

    def _taken(self, source_rank: int, cost: int) -> None:
        if self._on_taken is not None:
            self._on_taken(source_rank, cost)

    def _pop_waiter(self, key: _Key) -> asyncio.Future[MessageT] | None:
        waiters = self._waiters.get(key)
        found = None
        while waiters and found is None:
            waiter = waiters.popleft()
            found = None if waiter.done() else waiter
        if waiters is not None and not waiters:
            del self._waiters[key]
        return found

    def _fail_waiters(self, keys: list[_Key], make_error: Callable[[], CommError]) -> None:
        for key in keys:
            for waiter in self._waiters.pop(key):
                if not waiter.done():
                    waiter.set_exception(make_error())

    def _give_back(self, key: _Key, waiter: asyncio.Future[MessageT]) -> None:
        """A cancelled receive must not swallow the message that reached it at the same moment."""
        if waiter.cancelled() or not waiter.done():
            waiters = self._waiters.get(key)
            if waiters and waiter in waiters:
                waiters.remove(waiter)
                if not waiters:
                    del self._waiters[key]
        elif waiter.exception() is None and not self.aborted.is_set():
            # Its credit is returned already, so the bound may be passed by this one message.
            message = waiter.result()
            self._waiting_bytes[key[0]] += message_cost(message.num_bytes)
            self._queues[key].appendleft(message)
