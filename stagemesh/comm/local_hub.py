"""LocalHub: the meeting point of ranks that are threads of one process.

with LocalHub() as hub:
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
from stagemesh.comm.peer_link import PeerAddress, names_of

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

    async def open_group(
        self,
        *,
        group_id: str,
        rank: int,
        members: Sequence[PeerAddress],
        incarnation: int,
        timeout_seconds: float,
    ) -> AsyncGroup:
        """Make the caller a rank of a group.

        Raises:
            ConfigError: the rank is taken or out of range, or a value is.
        """
        key = (group_id, incarnation)
        if key not in self._networks:
            self._networks[key] = LocalNetwork(
                size=len(members), order=self._order, rank_names=names_of(members)
            )
        transport = self._networks[key].join(rank, incarnation=incarnation)
        group = AsyncGroup(
            transport,
            group_id=group_id,
            timeout_seconds=timeout_seconds,
            rank_names=names_of(members),
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
