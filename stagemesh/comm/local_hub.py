"""LocalHub: the meeting point of ranks that are threads of one process.

with LocalHub() as hub:
    hub.network(size=2).drop_peer(1, step=3)  # where a fault is wanted; see LocalNetwork
    config = GroupConfig(backend="local", rendezvous=hub, rank=rank, world_size=2)
    ...  # in each rank's thread: init_process_group(config)
"""

import random
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from stagemesh.comm.async_group import AsyncGroup
from stagemesh.comm.comm_loop import CommLoop
from stagemesh.comm.local import LocalNetwork
from stagemesh.comm.message_group import DEFAULT_DIRECT_BYTES, DEFAULT_MESSAGE_BYTES
from stagemesh.comm.peer_link import PeerAddress, names_of
from stagemesh.errors import ConfigError

_Key = tuple[str, int]


class LocalHub:
    """Opens groups whose ranks all live here; one loop serves all of them."""

    def __init__(self, *, order: random.Random | None = None) -> None:
        """Start the loop.

        Args:
            order: when given, messages of different (source, tag) pairs overtake each other, in a
                way that a seed repeats.
        """
        self.loop = CommLoop()
        self._order = order
        self._networks: dict[_Key, LocalNetwork] = {}
        self._present: dict[_Key, set[AsyncGroup]] = {}

    def network(self, group_id: str = "world", *, size: int, incarnation: int = 1) -> LocalNetwork:
        """The wires of a group, to put faults into; also before its ranks are here.

        Faults at a step may be set on any thread. `drop_peer` without a step acts at once: call it
        on the hub's loop.

        Raises:
            ConfigError: the group is there, with another size.
        """
        return self._network((group_id, incarnation), size=size, rank_names=())

    def _network(self, key: _Key, *, size: int, rank_names: Sequence[str]) -> LocalNetwork:
        # At once: ranks open on the loop, and a test asks on its own thread.
        network = self._networks.setdefault(
            key, LocalNetwork(size=size, order=self._order, rank_names=rank_names)
        )
        if network.size != size:
            raise ConfigError(f"group {key[0]} has {network.size} ranks here, not {size}")
        return network

    async def open_group(
        self,
        *,
        group_id: str,
        rank: int,
        members: Sequence[PeerAddress],
        incarnation: int,
        timeout_seconds: float,
        direct_bytes: int = DEFAULT_DIRECT_BYTES,
        chunk_bytes: int = DEFAULT_MESSAGE_BYTES,
    ) -> AsyncGroup:
        """Make the caller a rank of a group.

        Raises:
            ConfigError: the rank is taken or out of range, or a value is.
        """
        key = (group_id, incarnation)
        network = self._network(key, size=len(members), rank_names=names_of(members))
        transport = network.join(rank, incarnation=incarnation)
        group = AsyncGroup(
            transport,
            group_id=group_id,
            timeout_seconds=timeout_seconds,
            rank_names=names_of(members),
            direct_bytes=direct_bytes,
            chunk_bytes=chunk_bytes,
        )
        self._present.setdefault(key, set()).add(group)
        return group

    async def leave_group(self, group: AsyncGroup) -> None:
        """Leave a group; its wires go with the last rank. May be called again."""
        key = (group.group_id, group.incarnation)
        await group.close()
        present = self._present.get(key, set())
        present.discard(group)
        if not present:
            self._present.pop(key, None)
            self._networks.pop(key, None)

    def close(self) -> None:
        """Stop the loop: what waits in a group raises. May be called again."""
        self.loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
