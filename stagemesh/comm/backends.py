"""One way to make a group: which backend carries it, and how its ranks meet.

local   ranks are threads of this process          rendezvous: a LocalHub
grpc    ranks are processes, on any machines       rendezvous: any of stagemesh.comm.rendezvous
gloo    the same, over torch.distributed           the same
nccl    the same, on the device of each rank       the same

"nccl" uses the device that `torch.cuda.set_device` has chosen for the calling thread. It is written
against torch's API and not run by us yet: no machine of ours has two such devices.

A process with a grpc group may fork children that use no group, as a DataLoader with workers does:
importing stagemesh.comm sets GRPC_ENABLE_FORK_SUPPORT=0, without which they crash. gRPC reads it as
it loads, so a program that itself imports grpc does so after this. A forked child that wants a
group gets a ConfigError; start it with "spawn".
"""

import contextlib
import os
import socket
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from torch.distributed import Store  # type: ignore[attr-defined]

from stagemesh.comm.blocking import GroupOpener
from stagemesh.comm.comm_loop import CommLoop
from stagemesh.comm.endpoint import CommEndpoint
from stagemesh.comm.gloo_opener import GlooOpener, connect_store, serve_store
from stagemesh.comm.local_hub import LocalHub
from stagemesh.comm.message_group import (
    DEFAULT_DIRECT_BYTES,
    DEFAULT_MESSAGE_BYTES,
    check_sizes,
)
from stagemesh.comm.nccl_wire import nccl_device
from stagemesh.comm.peer_link import PeerAddress
from stagemesh.comm.process_group import ProcessGroup
from stagemesh.comm.rendezvous import AddressList, Arrival, Meeting, Rendezvous, check_rank
from stagemesh.comm.tcp_store import TcpStoreMeeting
from stagemesh.errors import ConfigError
from stagemesh.rpc.address import split_address
from stagemesh.rpc.codec import DEFAULT_MAX_TENSOR_BYTES
from stagemesh.rpc.fork_guard import PROCESS_GUARD
from stagemesh.rpc.security import is_loopback

Backend = Literal["local", "grpc", "gloo", "nccl"]

_DEFAULT_SIZES = (DEFAULT_DIRECT_BYTES, DEFAULT_MESSAGE_BYTES)
_ANY_PORT = "127.0.0.1:0"
_CLOSE_SECONDS = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """What a process says to become a rank."""

    rendezvous: Rendezvous | LocalHub
    """Where the ranks meet."""
    backend: Backend = "grpc"
    """What carries the tensors."""
    rank: int | None = None
    """This rank; None where the rendezvous knows or assigns it."""
    world_size: int | None = None
    """Number of ranks; None where the rendezvous knows it."""
    group_id: str = "world"
    """Name of the group; the same on all ranks."""
    timeout_seconds: float = 300.0
    """Deadline of the rendezvous, and of each operation that sets none of its own."""
    bind: str | None = None
    """host:port to listen on. None: this rank's address of an AddressList, else a free port of
    127.0.0.1, which only this machine reaches."""
    advertise: str | None = None
    """Host or host:port that the other ranks reach this one by, where that is not `bind`."""
    token: str | None = field(default=None, repr=False)
    """Shared by all ranks; grpc refuses a public `bind` without."""
    insecure: bool = False
    """Allow a public `bind` without token."""
    max_tensor_bytes: int = DEFAULT_MAX_TENSOR_BYTES
    """grpc: larger tensors are neither sent nor accepted."""
    unix_socket: bool = False
    """grpc: whether ranks of one host that both say so reach each other over unix sockets, which
    only processes of this user can open. They are no faster than TCP. An AddressList tells only
    addresses, so its ranks always use those."""
    direct_bytes: int = DEFAULT_DIRECT_BYTES
    """grpc and local: tensors up to this size take one hop, larger ones are cut and pipelined. Of
    an all_reduce or broadcast all copies that a rank sends count. 0 cuts all, a large number
    none. Equal on all ranks."""
    chunk_bytes: int = DEFAULT_MESSAGE_BYTES
    """grpc and local: message size of larger tensors. Equal on all ranks."""
    reduce_in_place: bool = False
    """gloo and nccl: whether an all_reduce of two ranks (sum or avg of float32 or float64, above
    64 KiB) works in the caller's tensor. For 16 to 64 MiB that takes a fifth to a third less time.
    But a failure leaves the tensor undefined, and torch may write to it for as long again as the
    operation's deadline: then make new tensors, too."""

    def __post_init__(self) -> None:
        if self.backend not in get_args(Backend):
            raise ConfigError(
                f"backend must be one of {', '.join(get_args(Backend))}, got {self.backend!r}"
            )
        if (self.backend == "local") != isinstance(self.rendezvous, LocalHub):
            raise ConfigError(
                "backend 'local' and a LocalHub as the rendezvous belong together, got backend "
                f"{self.backend!r} with {type(self.rendezvous).__name__}"
            )
        if not self.group_id:
            raise ConfigError("group_id must not be empty")
        if not self.timeout_seconds > 0:
            raise ConfigError(f"timeout_seconds must be positive, got {self.timeout_seconds}")
        check_sizes(direct_bytes=self.direct_bytes, chunk_bytes=self.chunk_bytes)
        are_set = (self.direct_bytes, self.chunk_bytes) != _DEFAULT_SIZES
        if are_set and self.backend in ("gloo", "nccl"):
            raise ConfigError(
                f"direct_bytes and chunk_bytes are for grpc and local; {self.backend!r} cuts "
                "tensors by itself"
            )


def init_process_group(config: GroupConfig, *, loop: CommLoop | None = None) -> ProcessGroup:
    """Become a rank of a group: meet the others, and make the group. Blocks.

    Args:
        config: what, where, and as which rank.
        loop: the process's loop, when it has one already; a second group shares it with the first.
            Without, the group makes one, and ends it when it closes.

    Raises:
        ConfigError: a setting is wrong, or the ranks' do not fit together.
        CollectiveTimeout: ranks are missing at the deadline; names them.
        PeerLost: the place to meet cannot be reached.
    """
    with contextlib.ExitStack() as stack:
        if isinstance(config.rendezvous, LocalHub):
            return _open_local(config, config.rendezvous)
        if loop is None:
            loop = CommLoop()
            stack.callback(loop.close)
        opener: GroupOpener
        if config.backend in ("gloo", "nccl"):
            opener, meeting = _meet_torch(config, config.rendezvous, loop=loop)
        else:
            opener, meeting = _meet_grpc(config, config.rendezvous, loop=loop, stack=stack)
        return _open(config, opener, meeting, loop=loop, stack=stack)


def _open_local(config: GroupConfig, hub: LocalHub) -> ProcessGroup:
    rank, world_size = check_rank(
        rank=config.rank, world_size=config.world_size, why="a LocalHub assigns none"
    )
    members = tuple(
        PeerAddress(rank=other, node_id=f"rank-{other}", address="this process")
        for other in range(world_size)
    )
    meeting = Meeting(rank=rank, members=members)
    return _open(config, hub, meeting, loop=hub.loop, stack=contextlib.ExitStack())


def _open(
    config: GroupConfig,
    opener: GroupOpener,
    meeting: Meeting,
    *,
    loop: CommLoop,
    stack: contextlib.ExitStack,
) -> ProcessGroup:
    group = loop.run(
        opener.open_group(
            group_id=config.group_id,
            rank=meeting.rank,
            members=meeting.members,
            incarnation=meeting.incarnation,
            timeout_seconds=config.timeout_seconds,
            direct_bytes=config.direct_bytes,
            chunk_bytes=config.chunk_bytes,
        ),
        timeout=config.timeout_seconds + _CLOSE_SECONDS,
    )
    on_close = stack.pop_all().close
    return ProcessGroup(group, loop=loop, opener=opener, members=meeting.members, on_close=on_close)


def _meet_grpc(
    config: GroupConfig,
    rendezvous: Rendezvous,
    *,
    loop: CommLoop,
    stack: contextlib.ExitStack,
) -> tuple[CommEndpoint, Meeting]:
    PROCESS_GUARD.warn_if_late()

    async def listen() -> CommEndpoint:
        endpoint = CommEndpoint(
            _bind(config, rendezvous),
            advertise=config.advertise,
            token=config.token,
            insecure=config.insecure,
            node_id=_process_name(),
            max_tensor_bytes=config.max_tensor_bytes,
            unix_socket=config.unix_socket,
        )
        await endpoint.start()
        return endpoint

    endpoint = loop.run(listen(), timeout=_CLOSE_SECONDS)
    stack.callback(lambda: loop.run(endpoint.close(), timeout=_CLOSE_SECONDS))
    ours = endpoint.member(0)
    arrival = replace(
        _arrival(config, ours.address), unix_path=ours.unix_path, host_id=ours.host_id
    )
    return endpoint, rendezvous.meet(arrival, loop=loop)


def _meet_torch(
    config: GroupConfig, rendezvous: Rendezvous, *, loop: CommLoop
) -> tuple[GlooOpener, Meeting]:
    """torch's ranks meet at a store: that of the rendezvous, or one that rank 0 serves."""
    device = nccl_device() if config.backend == "nccl" else None

    def opener(store: Store, host: str | None) -> GlooOpener:
        return GlooOpener(
            store, host=host, nccl_device=device, reduce_in_place=config.reduce_in_place
        )

    if isinstance(rendezvous, TcpStoreMeeting):
        meeting = rendezvous.meet(_arrival(config, "at the store"), loop=loop)
        is_one_host = is_loopback(rendezvous.host)
        return opener(meeting.keep, "127.0.0.1" if is_one_host else None), meeting
    bind = _bind(config, rendezvous)
    seconds = config.timeout_seconds
    served = None
    if config.rank == 0 or not isinstance(rendezvous, AddressList):
        # Nobody need know yet who is rank 0.
        served = serve_store(bind, advertise=config.advertise, timeout_seconds=seconds)
    address = bind if served is None else served.address
    meeting = rendezvous.meet(_arrival(config, address), loop=loop)
    store = (
        served.store
        if served is not None and meeting.rank == 0
        else connect_store(meeting.members[0].address, timeout_seconds=seconds)
    )
    return opener(store, split_address(address)[0]), meeting


def _arrival(config: GroupConfig, address: str) -> Arrival:
    return Arrival(
        group_id=config.group_id,
        address=address,
        node_id=_process_name(),
        rank=config.rank,
        world_size=config.world_size,
        timeout_seconds=config.timeout_seconds,
    )


def _bind(config: GroupConfig, rendezvous: Rendezvous) -> str:
    if config.bind is not None:
        return config.bind
    if isinstance(rendezvous, AddressList) and config.rank is not None:
        return rendezvous.address_of(config.rank)
    return _ANY_PORT


def _process_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"
