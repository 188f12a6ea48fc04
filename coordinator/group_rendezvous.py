r"""Who waits to become a group, and who completes it. Pure: no clock, no network.

arrive -> arrive -> ... -> the last one: all get one Meeting
       \-> withdraw (deadline, hung up): as if it had never come
"""

from dataclasses import dataclass, field

from stagemesh.errors import CapacityExceeded, ConfigError

MAX_WORLD_SIZE = 4096
MAX_WAITING_GROUPS = 1024
MAX_GROUP_ID_CHARS = 200
MAX_ADDRESS_CHARS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a process is; only the address need be there."""

    address: str
    """host:port where the others reach it."""
    node_id: str = ""
    """Its name in errors."""
    unix_path: str = ""
    """A unix socket of it, for those of its host."""
    host_id: str = ""
    """Which host that is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """A complete group."""

    places: tuple[Place, ...]
    """Of all ranks, in rank order."""
    incarnation: int
    """Higher than that of any earlier meeting."""


@dataclass(slots=True, kw_only=True, eq=False)
class Arrival:
    """One process that waits."""

    group_id: str
    world_size: int
    place: Place
    rank: int | None
    """The rank it asks for; its own one once the group is complete."""
    meeting: Meeting | None = None
    """Set when the group is complete."""

    @property
    def address(self) -> str:
        """Where the others reach it."""
        return self.place.address


@dataclass(slots=True)
class GroupRendezvous:
    """The groups that are being formed."""

    _waiting: dict[str, list[Arrival]] = field(default_factory=dict)
    _num_completed: int = 0

    def arrive(self, group_id: str, *, world_size: int, rank: int | None, place: Place) -> Arrival:
        """A process comes. When it is the last one, all arrivals of the group get their meeting.

        Args:
            group_id: name of the group.
            world_size: how many come.
            rank: which it wants to be; None for any.
            place: where it is.

        Raises:
            ConfigError: a value is wrong, or does not fit what those that wait have said.
            CapacityExceeded: too many groups are being formed.
        """
        _check(group_id, world_size=world_size, rank=rank, place=place)
        address = place.address
        others = self._waiting.get(group_id, [])
        if not others and len(self._waiting) >= MAX_WAITING_GROUPS:
            raise CapacityExceeded(
                f"{MAX_WAITING_GROUPS} groups are being formed, which is the limit"
            )
        for other in others:
            if other.world_size != world_size:
                raise ConfigError(
                    f"group {group_id!r}: {address} says world_size {world_size}, but "
                    f"{other.address} said {other.world_size}; all ranks must say the same"
                )
            if rank is not None and other.rank == rank:
                raise ConfigError(
                    f"group {group_id!r}: {address} wants to be rank {rank}, which "
                    f"{other.address} is"
                )
        arrival = Arrival(group_id=group_id, world_size=world_size, rank=rank, place=place)
        arrivals = self._waiting.setdefault(group_id, [])
        arrivals.append(arrival)
        if len(arrivals) == world_size:
            self._complete(self._waiting.pop(group_id))
        return arrival

    def withdraw(self, arrival: Arrival) -> None:
        """A process waits no more; nothing, when its group is complete. May be called again."""
        arrivals = self._waiting.get(arrival.group_id, [])
        if arrival in arrivals:
            arrivals.remove(arrival)
            if not arrivals:
                del self._waiting[arrival.group_id]

    def describe_missing(self, arrival: Arrival) -> str:
        """Who has not come, as words: "1 of 3 are there; rank 0, 2 did not come"."""
        arrivals = self._waiting.get(arrival.group_id, [])
        taken = {other.rank for other in arrivals}
        there = f"{len(arrivals)} of {arrival.world_size} are there"
        if None in taken:
            return f"{there}: {', '.join(other.address for other in arrivals)}"
        missing = [str(rank) for rank in range(arrival.world_size) if rank not in taken]
        return f"{there}; rank {', '.join(missing)} did not come"

    def _complete(self, arrivals: list[Arrival]) -> None:
        self._num_completed += 1
        taken = {arrival.rank for arrival in arrivals}
        free = iter([rank for rank in range(len(arrivals)) if rank not in taken])
        for arrival in arrivals:
            if arrival.rank is None:
                arrival.rank = next(free)
        in_order = sorted(arrivals, key=lambda arrival: arrival.rank or 0)
        meeting = Meeting(
            places=tuple(arrival.place for arrival in in_order),
            incarnation=self._num_completed,
        )
        for arrival in arrivals:
            arrival.meeting = meeting


def _check(group_id: str, *, world_size: int, rank: int | None, place: Place) -> None:
    if not 0 < len(group_id) <= MAX_GROUP_ID_CHARS:
        raise ConfigError(
            f"group_id must have 1 to {MAX_GROUP_ID_CHARS} characters, got {len(group_id)}"
        )
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise ConfigError(f"world_size must be in [1, {MAX_WORLD_SIZE}], got {world_size}")
    if rank is not None and not 0 <= rank < world_size:
        raise ConfigError(f"rank must be in [0, {world_size}), got {rank}")
    if not place.address:
        raise ConfigError(f"address must have 1 to {MAX_ADDRESS_CHARS} characters, got 0")
    for name in ("address", "node_id", "unix_path", "host_id"):
        length = len(getattr(place, name))
        if length > MAX_ADDRESS_CHARS:
            raise ConfigError(f"{name} must have 1 to {MAX_ADDRESS_CHARS} characters, got {length}")
