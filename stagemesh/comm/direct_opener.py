"""Connects the ranks of a group with each other, for `direct_links`.

1. every rank listens at the group's own address, on a free port
2. over the group, which knows its ranks, each tells the others where, and a secret
3. if all are on one host, rank 0 makes memory for them, which has a name until step 6
4. rank r connects to the ranks below it, and shows each its secret
5. over the group all hear whether all are connected, and all have that memory
6. where not all have, messages go over the connections
"""

import contextlib
import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from stagemesh.comm.direct_links import DirectLinks
from stagemesh.comm.direct_memory import MemoryLinks
from stagemesh.comm.direct_region import (
    SharedRegion,
    can_share,
    make_region,
    open_region,
    remove_name,
)
from stagemesh.comm.direct_sockets import SocketLinks
from stagemesh.comm.process_group import ProcessGroup
from stagemesh.comm.reduce import ReduceOp
from stagemesh.errors import ConfigError
from stagemesh.rpc.address import split_address
from stagemesh.rpc.unix_socket import host_id

_HELLO = struct.Struct("<32sI")
_WELCOME = b"\x01"
_HELLO_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """What a rank tells the others over the group, so that they can connect."""

    process: str
    """Names the process, and with it the host."""
    host: str
    cores: list[int]
    """On which its process may run."""
    address: str
    """host:port; empty where this rank can listen nowhere."""
    secret: str
    """Who connects shows it: only ranks of the group have heard it."""
    can_share: bool
    """Whether it can exchange messages through memory."""


def open_links(
    group: ProcessGroup,
    *,
    timeout_seconds: float,
    within_process: bool = False,
    shares_memory: bool = True,
) -> DirectLinks | None:
    """Connect the ranks of a group with each other. All call it, as a collective of the group.

    Args:
        group: over which they tell each other where they listen.
        timeout_seconds: until all must be connected.
        within_process: connect ranks that are threads of one process, too.
        shares_memory: let ranks of one host exchange messages through memory, where they can.

    Returns:
        The links; None, on all ranks, where some cannot connect or are in one process.
    """
    listener = _listen(group)
    with contextlib.ExitStack() as stack:
        if listener is not None:
            stack.callback(listener.close)
        told = _tell(group, listener, timeout_seconds, shares_memory=shares_memory)
        processes = {each.process for each in told}
        if not all(each.address for each in told) or (
            len(processes) < len(told) and not within_process
        ):
            return None
        assert listener is not None
        deadline = time.monotonic() + timeout_seconds
        with _shared_region(group.rank, told) as find_region:
            sockets = _connect(group.rank, told, listener, deadline)
            # Rank 0 has made it before it welcomes anyone.
            region = find_region()
            have = torch.tensor([len(sockets) == group.size - 1, region is not None])
            group.all_reduce(have, op=ReduceOp.MIN, timeout=timeout_seconds)
        is_connected, is_shared = have.tolist()
        if is_connected and is_shared:
            assert region is not None
            return MemoryLinks(sockets, region, rank=group.rank)
        links = SocketLinks(sockets, spins=_has_cores(group.rank, told))
        if is_connected:
            return links
        links.close()
        return None


@contextlib.contextmanager
def _shared_region(rank: int, told: Sequence[_Told]) -> Iterator[Callable[[], SharedRegion | None]]:
    """Memory of all ranks, which has a name within this block; gives what maps it."""
    first = told[0]
    is_possible = (
        all(each.can_share and each.host and each.host == first.host for each in told)
        # Without a core for each, who looks would keep who writes from writing.
        and _has_cores(rank, told)
    )
    if not is_possible:
        yield lambda: None
    elif rank:
        yield lambda: open_region(first.secret, len(told))
    else:
        made = make_region(first.secret, len(told))
        try:
            yield lambda: made
        finally:
            remove_name(first.secret)


def _has_cores(rank: int, told: Sequence[_Told]) -> bool:
    """Whether each rank on the host of this one can have a core of its own."""
    here = [each.cores for each in told if each.host == told[rank].host]
    owners: dict[int, int] = {}

    def takes(index: int, seen: set[int]) -> bool:
        """Find a core for a rank, moving others on (an augmenting path)."""
        for core in here[index]:
            if core not in seen:
                seen.add(core)
                if core not in owners or takes(owners[core], seen):
                    owners[core] = index
                    return True
        return False

    return all(takes(index, set()) for index in range(len(here)))


def _listen(group: ProcessGroup) -> socket.socket | None:
    """Where the group's own address is; None where that is no address or is not this machine's."""
    try:
        host, _ = split_address(group.members[group.rank].address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host.strip("[]"), 0), family=family, backlog=group.size)
    except (ConfigError, OSError):
        return None


def _tell(
    group: ProcessGroup,
    listener: socket.socket | None,
    timeout_seconds: float,
    *,
    shares_memory: bool,
) -> list[_Told]:
    host = host_id()
    address = ""
    if listener is not None:
        own_host, _ = split_address(group.members[group.rank].address)
        address = f"{own_host}:{listener.getsockname()[1]}"
    ours = _Told(
        process=f"{host}/{socket.gethostname()}/{os.getpid()}",
        host=host,
        cores=sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0],
        address=address,
        secret=secrets.token_hex(16),
        can_share=shares_memory and can_share(group.size),
    )
    raw = bytearray(json.dumps(asdict(ours)).encode())
    records = group.all_gather_variable(
        torch.frombuffer(raw, dtype=torch.uint8), timeout=timeout_seconds
    )
    return [_Told(**json.loads(bytes(record.tolist()))) for record in records]


def _connect(
    rank: int, told: Sequence[_Told], listener: socket.socket, deadline: float
) -> dict[int, socket.socket]:
    """Connect to the ranks below this one and accept those above; what is made in time."""
    sockets: dict[int, socket.socket] = {}
    with contextlib.suppress(OSError, TimeoutError):
        for peer in range(rank):
            host, port = split_address(told[peer].address)
            limit = max(deadline - time.monotonic(), 1e-3)
            made = socket.create_connection((host.strip("[]"), port), timeout=limit)
            sockets[peer] = made
            made.sendall(_HELLO.pack(told[peer].secret.encode(), rank))
            if made.recv(1) != _WELCOME:
                made.close()
                del sockets[peer]
                return sockets
        while len(sockets) < len(told) - 1:
            listener.settimeout(max(deadline - time.monotonic(), 1e-3))
            made, _ = listener.accept()
            peer = _welcome(made, told[rank].secret)
            if rank < peer < len(told) and peer not in sockets:
                sockets[peer] = made
                made.sendall(_WELCOME)
            else:
                made.close()
    return sockets


def _welcome(made: socket.socket, secret: str) -> int:
    """Which rank has connected; -1 for one that does not know the secret or says nothing."""
    made.settimeout(_HELLO_SECONDS)
    hello = b""
    with contextlib.suppress(OSError, TimeoutError):
        while len(hello) < _HELLO.size:
            more = made.recv(_HELLO.size - len(hello))
            if not more:
                return -1
            hello += more
        shown, rank = _HELLO.unpack(hello)
        if hmac.compare_digest(shown, secret.encode()):
            return int(rank)
    return -1
