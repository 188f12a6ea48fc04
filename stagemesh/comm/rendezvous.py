"""How the ranks of a group find each other: from a name, or a place, to everybody's record.

    AddressList      the addresses are known before; nothing is exchanged, so there is no more
    SharedFolder     a folder that all ranks see
    TcpStoreMeeting  torch's TCPStore, as torchrun sets it up: stagemesh.comm.tcp_store
    CoordinatorMeeting  a running coordinator: stagemesh.comm.coordinator_meeting

Each blocks its caller until all are there, or raises at the deadline, naming who is missing.
"""

import contextlib
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from stagemesh.comm.comm_loop import CommLoop
from stagemesh.comm.member_record import member_from, record_of
from stagemesh.comm.peer_link import PeerAddress
from stagemesh.errors import CollectiveTimeout, ConfigError, ProtocolError
from stagemesh.rpc.address import split_address

_POLL_SECONDS = 0.02
_MAX_FILE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """What a rank says when it arrives."""

    group_id: str
    """Name of the group."""
    address: str
    """host:port where the other ranks reach this one."""
    node_id: str
    """Name of this process in errors."""
    rank: int | None
    """Its rank, or None where the rendezvous may choose."""
    world_size: int | None
    """Number of ranks, or None where the rendezvous knows."""
    timeout_seconds: float
    """How long to wait for the others."""
    unix_path: str = ""
    """A unix socket of this process, if it has one."""
    host_id: str = ""
    """Where the socket is (see stagemesh.rpc.unix_socket)."""

    def member(self, rank: int) -> PeerAddress:
        """This process as a rank."""
        return PeerAddress(
            rank=rank,
            node_id=self.node_id,
            address=self.address,
            unix_path=self.unix_path,
            host_id=self.host_id,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """What a rank knows when all are there."""

    rank: int
    members: tuple[PeerAddress, ...]
    """All ranks, in rank order."""
    incarnation: int = 1
    """Version of the group, higher than any before it of this name."""
    keep: Any = None
    """Must live as long as the group."""


class Rendezvous(Protocol):
    """A way to meet."""

    def meet(self, arrival: Arrival, *, loop: CommLoop) -> Meeting:
        """Wait until all ranks are there.

        Raises:
            ConfigError: what the ranks say does not fit together.
            CollectiveTimeout: ranks are missing at the deadline; names them.
            PeerLost: the place to meet cannot be reached.
        """


def check_rank(*, rank: int | None, world_size: int | None, why: str) -> tuple[int, int]:
    """Rank and world size, where both must be given.

    Raises:
        ConfigError: one is missing or out of range.
    """
    if rank is None or world_size is None:
        raise ConfigError(f"rank and world_size must be set: {why}")
    if world_size < 1 or not 0 <= rank < world_size:
        raise ConfigError(f"rank must be in [0, world_size), got rank {rank} of {world_size}")
    return rank, world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressList:
    """Addresses that are known before; nobody is waited for."""

    addresses: Sequence[str]
    """host:port of each rank, in rank order."""
    incarnation: int = 1
    """Raise it when the same processes form the group again."""

    def meet(self, arrival: Arrival, *, loop: CommLoop) -> Meeting:
        """Check and hand out the list."""
        if arrival.world_size not in (None, len(self.addresses)):
            raise ConfigError(
                f"world_size is {arrival.world_size}, but {len(self.addresses)} addresses are given"
            )
        for address in self.addresses:
            split_address(address)
        if arrival.rank is None:
            raise ConfigError("rank must be set: a list of addresses assigns none")
        self.address_of(arrival.rank)
        members = tuple(
            PeerAddress(rank=rank, node_id=f"rank-{rank}", address=address)
            for rank, address in enumerate(self.addresses)
        )
        return Meeting(rank=arrival.rank, members=members, incarnation=self.incarnation)

    def address_of(self, rank: int) -> str:
        """Address of a rank.

        Raises:
            ConfigError: there is no such rank.
        """
        if not 0 <= rank < len(self.addresses):
            raise ConfigError(
                f"rank must be in [0, {len(self.addresses)}), as that many addresses are given, "
                f"got {rank}"
            )
        return self.addresses[rank]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFolder:
    """A folder that all ranks see: each puts its record there and waits for the others'."""

    path: Path
    """The folder; made when it is not there."""
    incarnation: int = 1
    """A folder that was used before needs a higher one than then."""

    def meet(self, arrival: Arrival, *, loop: CommLoop) -> Meeting:
        """Write this rank's file, and read all."""
        rank, world_size = check_rank(
            rank=arrival.rank, world_size=arrival.world_size, why="a shared folder assigns none"
        )
        self.path.mkdir(parents=True, exist_ok=True)
        ours = {
            **record_of(arrival.member(rank)),
            "world_size": world_size,
            "nonce": secrets.token_hex(8),
        }
        own_file = self._file(arrival.group_id, rank)
        if own_file.exists():
            raise ConfigError(
                f"{own_file} is there already: two processes have rank {rank}, or the folder was "
                "used before; take an empty folder or raise the incarnation"
            )
        # Whole or not there at all: a reader must not see half a file.
        part = own_file.with_suffix(f".{ours['nonce']}.part")
        part.write_text(json.dumps(ours))
        part.replace(own_file)
        try:
            found = self._wait_for_all(arrival, ours, rank=rank, world_size=world_size)
        except BaseException:
            # So that it can be tried again here.
            if self._is_own(own_file, ours):
                own_file.unlink(missing_ok=True)
            raise
        return Meeting(rank=rank, members=found, incarnation=self.incarnation)

    def _wait_for_all(
        self, arrival: Arrival, ours: Mapping[str, Any], *, rank: int, world_size: int
    ) -> tuple[PeerAddress, ...]:
        deadline = time.monotonic() + arrival.timeout_seconds
        # This rank's own file is read last, to find that a second process has replaced it.
        waiting = [*(other for other in range(world_size) if other != rank), rank]
        found: dict[int, PeerAddress] = {}
        while waiting:
            entry = self._read(arrival.group_id, waiting[0])
            if entry is not None:
                other = waiting.pop(0)
                found[other] = self._member(entry, arrival.group_id, other)
                self._check(entry, ours, rank=rank, other=other)
            elif time.monotonic() > deadline:
                missing = [r for r in waiting if self._read(arrival.group_id, r) is None]
                raise missing_ranks(arrival, sorted(missing), place=str(self.path))
            else:
                time.sleep(_POLL_SECONDS)
        return tuple(found[other] for other in range(world_size))

    def _is_own(self, path: Path, ours: Mapping[str, Any]) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return bool(json.loads(path.read_text()) == ours)
        return False

    def _file(self, group_id: str, rank: int) -> Path:
        # Quoted: the name of a group is no path.
        return self.path / f"{quote(group_id, safe='')}.{self.incarnation}.rank{rank}.json"

    def _read(self, group_id: str, rank: int) -> Any:
        path = self._file(group_id, rank)
        try:
            with path.open("rb") as file:
                return json.loads(file.read(_MAX_FILE_BYTES))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ProtocolError(f"{path} is not the file of a rank: {error}") from error

    def _member(self, entry: Any, group_id: str, rank: int) -> PeerAddress:
        source = f"{self._file(group_id, rank)} is not the file of a rank"
        return member_from(entry, rank=rank, source=source)

    def _check(
        self, entry: Mapping[str, Any], ours: Mapping[str, Any], *, rank: int, other: int
    ) -> None:
        if entry.get("world_size") != ours["world_size"]:
            raise ConfigError(
                f"ranks disagree about world_size: rank {other} says {entry.get('world_size')}, "
                f"rank {rank} says {ours['world_size']}"
            )
        if other == rank and entry.get("nonce") != ours["nonce"]:
            raise ConfigError(f"two processes have rank {rank}: {entry['address']} has taken it")


def missing_ranks(arrival: Arrival, ranks: Sequence[int], *, place: str) -> CollectiveTimeout:
    """The error of a deadline at which ranks are missing."""
    names = ", ".join(str(rank) for rank in ranks)
    return CollectiveTimeout(
        f"group {arrival.group_id} is not complete after {arrival.timeout_seconds:g} s: rank "
        f"{names} of {arrival.world_size} did not come to {place}"
    )
