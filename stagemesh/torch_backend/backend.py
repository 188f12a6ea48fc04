"""Makes the groups of torch.distributed: this process's server, and the exchange of addresses.

Each rank writes its record to the store that torch hands out, reads those of the others, and opens
the group. Groups of a process share one server and one loop thread, which live from the first group
to the last.
"""

import atexit
import concurrent.futures
import contextlib
import json
import os
import secrets
import socket
import threading
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Self

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from stagemesh.comm.async_group import AsyncGroup
from stagemesh.comm.comm_loop import CommLoop
from stagemesh.comm.endpoint import CommEndpoint
from stagemesh.comm.member_record import member_from, record_of
from stagemesh.comm.message_group import DEFAULT_DIRECT_BYTES, DEFAULT_MESSAGE_BYTES
from stagemesh.comm.peer_link import PeerAddress
from stagemesh.errors import CollectiveTimeout, ConfigError
from stagemesh.rpc.address import split_address
from stagemesh.rpc.security import is_loopback
from stagemesh.torch_backend.group import MeshProcessGroup

BACKEND_NAME = "stagemesh"

# A bound, not a size: threads are started while all others are busy. It must be above the number
# of callbacks that wait at one time for a collective of their own (PowerSGD: one per bucket of
# DDP), as what ends their waiting runs here too.
_CALLBACK_THREADS = 1024
_CONTROL_SECONDS = 30.0
"""Limit of opening and leaving a group; neither waits for other ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshOptions:
    """Where this process listens. `init_process_group(..., pg_options=MeshOptions(...))`."""

    bind: str = "127.0.0.1:0"
    """host:port to listen on; port 0 takes a free one. Ranks on other hosts need a public one."""
    advertise: str | None = None
    """Host that the other ranks reach this one by, where it is not that of `bind`."""
    token: str | None = None
    """Secret of all ranks; needed where `bind` is not loopback."""
    unix_socket: bool = False
    """Whether ranks of one host that both say so reach each other over unix sockets."""
    direct_bytes: int = DEFAULT_DIRECT_BYTES
    """Up to which size tensors take one hop (see GroupConfig); for each group its own."""
    chunk_bytes: int = DEFAULT_MESSAGE_BYTES
    """Message size of larger tensors; for each group its own."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """From STAGEMESH_BIND, _ADVERTISE, _TOKEN and _UNIX_SOCKET (1 or 0).

        Raises:
            ConfigError: STAGEMESH_UNIX_SOCKET is something else.
        """
        unix_socket = environment.get("STAGEMESH_UNIX_SOCKET", "0")
        if unix_socket not in ("0", "1"):
            raise ConfigError(f"STAGEMESH_UNIX_SOCKET must be 1 or 0, got {unix_socket!r}")
        return cls(
            bind=environment.get("STAGEMESH_BIND", "127.0.0.1:0"),
            advertise=environment.get("STAGEMESH_ADVERTISE"),
            token=environment.get("STAGEMESH_TOKEN"),
            unix_socket=unix_socket == "1",
        )


class _Host:
    """The loop thread, server and callback threads of a process, while it has groups."""

    def __init__(self, options: MeshOptions) -> None:
        self.callbacks = concurrent.futures.ThreadPoolExecutor(
            _CALLBACK_THREADS, thread_name_prefix="stagemesh-callback"
        )
        self.num_groups = 0
        self._loop = CommLoop()
        try:
            self.endpoint = self.run(self._open(options))
        except BaseException:
            self._loop.close()
            raise

    def submit(self, work: Coroutine[Any, Any, Any]) -> "concurrent.futures.Future[Any]":
        return self._loop.submit(work)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run(work, timeout=_CONTROL_SECONDS)

    def close(self) -> None:
        try:
            self.run(self.endpoint.close())
        finally:
            self._loop.close()
            self.callbacks.shutdown(wait=False)

    async def _open(self, options: MeshOptions) -> CommEndpoint:
        endpoint = CommEndpoint(
            options.bind,
            advertise=options.advertise,
            token=options.token,
            node_id=_process_name(),
            unix_socket=options.unix_socket,
        )
        await endpoint.start()
        return endpoint


class MeshBackend:
    """Creates groups for torch, which holds on to the `create` of one object per process."""

    def __init__(self) -> None:
        self._host: _Host | None = None
        self._lock = threading.Lock()

    def create(self, request: Any, options: MeshOptions | None = None) -> MeshProcessGroup:
        """Open this rank's end of a group.

        Args:
            request: torch's DistributedBackendOptions: store, rank, size, timeout, name.
            options: `pg_options` of the caller; else the environment says it. The first group of a
                process decides where it listens.

        Raises:
            ConfigError: a setting is wrong, or a rank on another host listens on loopback.
            CollectiveTimeout: a rank does not write its address within the timeout.
        """
        options = options or MeshOptions.from_environment(os.environ)
        host = self._acquire(options)
        try:
            members, nonce = _exchange(host.endpoint.member(request.group_rank), request)
            group = host.run(
                host.endpoint.open_group(
                    group_id=f"{BACKEND_NAME}-{request.group_id}-{nonce}",
                    rank=request.group_rank,
                    members=members,
                    incarnation=1,
                    timeout_seconds=request.timeout.total_seconds(),
                    direct_bytes=options.direct_bytes,
                    chunk_bytes=options.chunk_bytes,
                )
            )
        except BaseException:
            self._release(host)
            raise
        return MeshProcessGroup(group, host=_Lease(host, self._release), store=request.store)

    def _acquire(self, options: MeshOptions) -> _Host:
        with self._lock:
            if self._host is None:
                self._host = _Host(options)
                # A program that ends without destroy_process_group: tell the peers, end the thread.
                atexit.register(self._host.close)
            self._host.num_groups += 1
            return self._host

    def _release(self, host: _Host) -> None:
        with self._lock:
            host.num_groups -= 1
            if host.num_groups:
                return
            self._host = None
        atexit.unregister(host.close)
        host.close()


class _Lease:
    """A group's share in the host of its process."""

    def __init__(self, host: _Host, release: Any) -> None:
        self._host = host
        self._release = release

    @property
    def callbacks(self) -> concurrent.futures.Executor:
        return self._host.callbacks

    def submit(self, work: Coroutine[Any, Any, Any]) -> "concurrent.futures.Future[Any]":
        return self._host.submit(work)

    def leave(self, group: AsyncGroup) -> None:
        try:
            self._host.run(self._host.endpoint.leave_group(group))
        finally:
            self._release(self._host)


def _process_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


def _exchange(ours: PeerAddress, request: Any) -> tuple[list[PeerAddress], str]:
    """All ranks' records, in rank order, and a word that no other group of this name has.

    A group may be made again under its old name in the same store; so each rank counts its own
    joins, which are as many on all ranks, and only looks at those of the same number.
    """
    store, rank, size = request.store, request.group_rank, request.group_size
    attempt = store.add(f"joins/{rank}", 1)
    record = {
        **record_of(ours),
        "host": socket.gethostname(),
        "nonce": secrets.token_hex(4),
    }
    store.set(f"{attempt}/{rank}", json.dumps(record))
    keys = [f"{attempt}/{peer}" for peer in range(size)]
    _wait_for(store, keys, timeout=request.timeout, name=request.group_id)
    records = [json.loads(store.get(key)) for key in keys]
    for peer, other in enumerate(records):
        peer_host, _ = split_address(other["address"])
        if other["host"] != record["host"] and is_loopback(peer_host):
            raise ConfigError(
                f"rank {peer} is on host {other['host']} and listens on {other['address']}, which "
                f"rank {rank} on host {record['host']} cannot reach: set STAGEMESH_BIND there, "
                "such as 0.0.0.0:0 with STAGEMESH_ADVERTISE and STAGEMESH_TOKEN"
            )
    members = [
        member_from(other, rank=peer, source=f"what rank {peer} of {request.group_id} left")
        for peer, other in enumerate(records)
    ]
    # torch names none for the group of all.
    members = [
        replace(member, world_rank=world_rank)
        for member, world_rank in zip(
            members, request.global_ranks_in_group or [None] * size, strict=True
        )
    ]
    return members, records[0]["nonce"]


def _wait_for(store: Store, keys: list[str], *, timeout: timedelta, name: str) -> None:
    try:
        store.wait(keys, timeout)
    except DistStoreError as error:
        missing = [str(rank) for rank, key in enumerate(keys) if not _has(store, key)]
        raise CollectiveTimeout(
            f"rank {', '.join(missing)} of group {name} gave no address in "
            f"{timeout.total_seconds():g} s"
        ) from error


def _has(store: Store, key: str) -> bool:
    with contextlib.suppress(DistStoreError):
        return bool(store.check([key]))
    return False
