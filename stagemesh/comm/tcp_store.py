"""Meeting at torch's TCPStore, with or without torchrun.

group = init_process_group(GroupConfig(rendezvous=torchrun_meeting(os.environ)))
"""

import datetime
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from stagemesh.comm.comm_loop import CommLoop
from stagemesh.comm.member_record import member_from, record_of
from stagemesh.comm.peer_link import PeerAddress
from stagemesh.comm.rendezvous import Arrival, Meeting, missing_ranks
from stagemesh.errors import ConfigError, PeerLost, ProtocolError


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpStoreMeeting:
    """torch's TCPStore, which one process serves."""

    host: str
    port: int
    rank: int
    world_size: int
    is_server: bool
    """Whether this process serves the store."""
    incarnation: int = 1

    def meet(self, arrival: Arrival, *, loop: CommLoop) -> Meeting:
        """Write this rank's record to the store, and read all."""
        for name, said, ours in (
            ("rank", arrival.rank, self.rank),
            ("world_size", arrival.world_size, self.world_size),
        ):
            if said not in (None, ours):
                raise ConfigError(f"{name} is {said}, but the environment says {ours}")
        deadline = time.monotonic() + arrival.timeout_seconds
        store = self._connect(arrival.timeout_seconds)
        prefix = f"stagemesh/{arrival.group_id}/{self.incarnation}"
        store.set(f"{prefix}/{self.rank}", json.dumps(record_of(arrival.member(self.rank))))
        ranks = range(self.world_size)
        keys = [f"{prefix}/{rank}" for rank in ranks]
        self._wait(store, keys, arrival, deadline=deadline)
        members = tuple(self._read(store, key, rank=rank) for rank, key in enumerate(keys))
        store.set(f"{prefix}/done/{self.rank}", "1")
        if self.is_server:
            # The store ends with this process: the others must have read it first.
            done = [f"{prefix}/done/{rank}" for rank in ranks]
            self._wait(store, done, arrival, deadline=deadline)
        return Meeting(rank=self.rank, members=members, incarnation=self.incarnation, keep=store)

    def _read(self, store: Store, key: str, *, rank: int) -> PeerAddress:
        source = f"{key} in the store at {self.host}:{self.port}"
        try:
            record = json.loads(store.get(key))
        except ValueError as error:
            raise ProtocolError(f"{source}: it is no record: {error}") from error
        return member_from(record, rank=rank, source=source)

    def _connect(self, timeout_seconds: float) -> TCPStore:
        try:
            return TCPStore(
                self.host,
                self.port,
                is_master=self.is_server,
                wait_for_workers=False,
                timeout=datetime.timedelta(seconds=timeout_seconds),
            )
        except dist.DistError as error:
            if self.is_server:
                raise ConfigError(
                    f"cannot serve the store on {self.host}:{self.port}: {first_line(error)}; "
                    "choose another MASTER_PORT"
                ) from error
            raise PeerLost(
                f"the store at {self.host}:{self.port} could not be reached in "
                f"{timeout_seconds:g} s; check that the process that serves it (rank 0, or "
                f"torchrun) runs: {first_line(error)}",
                rank=0,
            ) from error

    def _wait(
        self, store: Store, keys: Sequence[str], arrival: Arrival, *, deadline: float
    ) -> None:
        seconds = max(0.001, deadline - time.monotonic())
        try:
            store.wait(list(keys), datetime.timedelta(seconds=seconds))
        except dist.DistStoreError:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise missing_ranks(
                arrival, missing, place=f"the store at {self.host}:{self.port}"
            ) from None
        except dist.DistNetworkError as error:
            raise PeerLost(
                f"the store at {self.host}:{self.port} is gone: {first_line(error)}", rank=0
            ) from error


def torchrun_meeting(environ: Mapping[str, str]) -> TcpStoreMeeting:
    """The meeting that torchrun's variables describe; they may be set by hand, too.

    Args:
        environ: with MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE; os.environ, mostly.

    Raises:
        ConfigError: one is missing or no number.
    """
    missing = [
        name
        for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
        if not environ.get(name)
    ]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not set in the environment: start the ranks with torchrun, or "
            "set MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE yourself"
        )
    numbers = {}
    for name in ("MASTER_PORT", "RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"):
        text = environ.get(name, "0")
        if not text.isdecimal():
            raise ConfigError(f"{name} must be a number, got {text!r}")
        numbers[name] = int(text)
    rank, world_size = numbers["RANK"], numbers["WORLD_SIZE"]
    if rank >= world_size:
        raise ConfigError(f"RANK must be in [0, WORLD_SIZE), got {rank} of {world_size}")
    # torchrun serves the store from its own process when it says so.
    is_served = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return TcpStoreMeeting(
        host=environ["MASTER_ADDR"],
        port=numbers["MASTER_PORT"],
        rank=rank,
        world_size=world_size,
        is_server=rank == 0 and not is_served,
        incarnation=1 + numbers["TORCHELASTIC_RESTART_COUNT"],
    )


def first_line(error: BaseException) -> str:
    """The text of an error of torch without the stack that it may carry."""
    return str(error).partition("\n")[0]
