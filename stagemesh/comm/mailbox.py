"""Received messages of one rank, waiting to be asked for; and the credit that bounds them.

    sender                                   receiver
    CreditWindow.acquire -- message ------>  Mailbox.put
                         <-- on_taken -----  Mailbox.get
    CreditWindow.release

Messages wait by (source rank, tag), in the order of arrival; who asks for a tag of any source gets
what arrived first. Of several that ask for one message the first gets it. What one source may have
waiting is bounded in bytes, per source, so that one busy peer cannot shut out the others. Every
waiter can be woken: by the loss of its source, or by the abort of the group. Loop-bound, not
thread-safe.
"""

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
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
_KeyT = TypeVar("_KeyT")


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter(Generic[MessageT]):
    """Somebody who asks for a message."""

    turn: int
    future: "asyncio.Future[tuple[int, MessageT]]"
    """Of the message and the number of its arrival."""
    sources: Collection[int] = ()
    """Any of these; else there is a key."""


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
        self._queues: defaultdict[_Key, deque[tuple[int, MessageT]]] = defaultdict(deque)
        self._waiters: defaultdict[_Key, deque[_Waiter[MessageT]]] = defaultdict(deque)
        self._any_waiters: defaultdict[int, deque[_Waiter[MessageT]]] = defaultdict(deque)
        self._num_arrived = 0
        self._num_asked = 0
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
        self._num_arrived += 1
        source, cost = message.source_rank, message_cost(message.num_bytes)
        waiter = self._pop_waiter(source, message.tag)
        if waiter is not None:
            waiter.future.set_result((self._num_arrived, message))
            self._taken(source, cost)
            return True
        waiting = self._waiting_bytes[source]
        if waiting and waiting + cost > self._capacity:
            raise CapacityExceeded(
                f"rank {source} has {waiting} bytes waiting and sent {cost} more; "
                f"the limit is {self._capacity}"
            )
        self._waiting_bytes[source] += cost
        self._queues[source, message.tag].append((self._num_arrived, message))
        return True

    async def get(self, source_rank: int, tag: int) -> MessageT:
        """Wait for the next message of a source with a tag. The caller sets the deadline.

        Raises:
            PeerLost: the source is lost and has nothing left here.
            GroupAborted: the group was aborted.
        """
        self.raise_if_aborted()
        key = (source_rank, tag)
        if key in self._queues:
            return self._pop_message(key)
        if source_rank in self._lost:
            raise self._lost[source_rank]()
        waiter = self._new_waiter()
        self._waiters[key].append(waiter)
        return await self._wait(waiter, self._waiters, key)

    async def get_any(self, tag: int, *, sources: Collection[int]) -> MessageT:
        """Wait for the next message with a tag of any of these sources, in the order of arrival.

        Raises:
            PeerLost: all of them are lost and have nothing left here.
            GroupAborted: the group was aborted.
        """
        self.raise_if_aborted()
        keys = [key for source in sources if (key := (source, tag)) in self._queues]
        if keys:
            return self._pop_message(min(keys, key=lambda key: self._queues[key][0][0]))
        self._raise_if_all_lost(sources)
        waiter = self._new_waiter(sources)
        self._any_waiters[tag].append(waiter)
        return await self._wait(waiter, self._any_waiters, tag)

    def fail_source(self, source_rank: int, reason: str, *, node_id: str = "") -> None:
        """Wake all that wait for a rank: it is lost. What it sent before can still be taken."""

        def make() -> CommError:
            return PeerLost(reason, rank=source_rank, node_id=node_id)

        self._lost.setdefault(source_rank, make)
        for key in [key for key in self._waiters if key[0] == source_rank]:
            for waiter in self._waiters.pop(key):
                _fail(waiter, make)
        for waiters in self._any_waiters.values():
            for waiter in waiters:
                if all(source in self._lost for source in waiter.sources):
                    _fail(waiter, make)

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
        for waiters in (*self._waiters.values(), *self._any_waiters.values()):
            for waiter in waiters:
                _fail(waiter, self._aborted_error)
        self._waiters.clear()
        self._any_waiters.clear()
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

    def _raise_if_all_lost(self, sources: Collection[int]) -> None:
        lost = [self._lost[source] for source in sources if source in self._lost]
        if lost and len(lost) == len(sources):
            raise lost[-1]()

    def _new_waiter(self, sources: Collection[int] = ()) -> _Waiter[MessageT]:
        self._num_asked += 1
        return _Waiter(self._num_asked, asyncio.get_running_loop().create_future(), sources)

    async def _wait(
        self,
        waiter: _Waiter[MessageT],
        waiters: dict[_KeyT, deque[_Waiter[MessageT]]],
        key: _KeyT,
    ) -> MessageT:
        try:
            return (await waiter.future)[1]
        except BaseException as error:
            if waiter in waiters.get(key, ()):
                _remove(waiter, waiters, key)
            if isinstance(error, asyncio.CancelledError):
                self._give_back(waiter)
            raise

    def _pop_message(self, key: _Key) -> MessageT:
        queue = self._queues[key]
        _, message = queue.popleft()
        if not queue:
            del self._queues[key]
        cost = message_cost(message.num_bytes)
        self._waiting_bytes[message.source_rank] -= cost
        self._taken(message.source_rank, cost)
        return message

    def _pop_waiter(self, source: int, tag: int) -> _Waiter[MessageT] | None:
        """Who gets a message: who asked first, of those that ask for its source or for any."""
        key = (source, tag)
        first = _first(self._waiters.get(key, ()), source)
        # Most groups have none that ask for any.
        other = _first(self._any_waiters.get(tag, ()), source) if self._any_waiters else None
        if other is not None and (first is None or other.turn < first.turn):
            _remove(other, self._any_waiters, tag)
            return other
        if first is not None:
            _remove(first, self._waiters, key)
        return first

    def _give_back(self, waiter: _Waiter[MessageT]) -> None:
        """A cancelled receive must not swallow the message that reached it at the same moment."""
        future = waiter.future
        if future.cancelled() or future.exception() is not None or self.aborted.is_set():
            return
        number, message = future.result()
        source, key = message.source_rank, (message.source_rank, message.tag)
        # It is older than whatever comes next for somebody who asks for it by now.
        other = self._pop_waiter(*key)
        if other is not None:
            other.future.set_result((number, message))
            return
        # Its credit is returned already, so the bound may be passed by this one message.
        self._waiting_bytes[source] += message_cost(message.num_bytes)
        self._queues[key].appendleft((number, message))


def _first(waiters: Iterable[_Waiter[MessageT]], source: int) -> _Waiter[MessageT] | None:
    for waiter in waiters:
        # One that is done has been woken, and is about to go.
        if not waiter.future.done() and (not waiter.sources or source in waiter.sources):
            return waiter
    return None


def _remove(
    waiter: _Waiter[MessageT], waiters: dict[_KeyT, deque[_Waiter[MessageT]]], key: _KeyT
) -> None:
    waiters[key].remove(waiter)
    if not waiters[key]:
        del waiters[key]


def _fail(waiter: _Waiter[MessageT], make_error: Callable[[], CommError]) -> None:
    if not waiter.future.done():
        waiter.future.set_exception(make_error())
