"""Opens groups over Gloo and NCCL: the store where their ranks meet, and the connecting.

Neither has a token: who reaches the store or the ranks' ports can join. Use them inside one host or
one trusted network.
"""

import asyncio
import datetime
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
)

from stagemesh.comm.async_group import AsyncGroup
from stagemesh.comm.gloo_transport import GlooTransport
from stagemesh.comm.gloo_wire import GlooWire, translated
from stagemesh.comm.message_group import DEFAULT_DIRECT_BYTES, DEFAULT_MESSAGE_BYTES
from stagemesh.comm.nccl_wire import connect_nccl
from stagemesh.comm.peer_link import PeerAddress, names_of
from stagemesh.comm.rank_names import RankNames
from stagemesh.comm.tcp_store import first_line
from stagemesh.comm.torch_engine import TorchEngine
from stagemesh.errors import CollectiveTimeout, ConfigError, PeerLost
from stagemesh.rpc.address import split_address

_MARGIN = datetime.timedelta(seconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedStore:
    """A store that this process serves."""

    store: TCPStore
    address: str
    """host:port for the other ranks."""


def serve_store(bind: str, *, advertise: str | None, timeout_seconds: float) -> ServedStore:
    """Serve a store on `bind`, and nowhere else.

    Raises:
        ConfigError: the address cannot be bound.
    """
    host, port = split_address(bind)
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host.strip("[]"), port))
        listener.listen(socket.SOMAXCONN)
        real_port = listener.getsockname()[1]
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {bind}: {error.strerror}; choose another port (0 takes a free one)"
        ) from error
    reach = advertise if advertise is not None else host
    store = TCPStore(
        reach.rpartition(":")[0] if ":" in reach else reach,
        real_port,
        is_master=True,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=timeout_seconds),
        # The store closes it.
        master_listen_fd=listener.detach(),
    )
    return ServedStore(store=store, address=reach if ":" in reach else f"{reach}:{real_port}")


def connect_store(address: str, *, timeout_seconds: float) -> TCPStore:
    """The store that rank 0 serves.

    Raises:
        PeerLost: it cannot be reached.
    """
    host, port = split_address(address)
    try:
        return TCPStore(
            host,
            port,
            is_master=False,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=timeout_seconds),
        )
    except dist.DistError as error:
        raise PeerLost(
            f"the store of rank 0 at {address} could not be reached in {timeout_seconds:g} s: "
            f"{first_line(error)}",
            rank=0,
        ) from error


class GlooOpener:
    """Opens the groups of a process over Gloo, or over NCCL with Gloo beside it."""

    def __init__(
        self,
        store: Store,
        *,
        host: str | None,
        nccl_device: torch.device | None = None,
        reduce_in_place: bool = False,
    ) -> None:
        """Use a store.

        Args:
            store: connected, the same for all ranks.
            host: own name or address on the network that Gloo is to use; None for that of the
                machine's name.
            nccl_device: of this rank; without, all goes over Gloo.
            reduce_in_place: see TorchEngine.
        """
        self._store = store
        self._host = host
        self._nccl_device = nccl_device
        self._reduce_in_place = reduce_in_place

    async def open_group(
        self,
        *,
        group_id: str,
        rank: int,
        members: Sequence[PeerAddress],
        incarnation: int,
        timeout_seconds: float,
        rank_names: Sequence[str] | None = None,
        direct_bytes: int = DEFAULT_DIRECT_BYTES,
        chunk_bytes: int = DEFAULT_MESSAGE_BYTES,
    ) -> AsyncGroup:
        """Connect to all ranks of a group, once they are all here.

        Torch chooses the sizes of its messages: `direct_bytes` and `chunk_bytes` change nothing.

        Raises:
            CollectiveTimeout: ranks do not come; names them.
            PeerLost: connecting fails.
        """
        names = names_of(members) if rank_names is None else rank_names
        store = PrefixStore(f"stagemesh-gloo/{group_id}/{incarnation}", self._store)
        wire = await asyncio.to_thread(
            self._connect, store, rank=rank, members=members, timeout_seconds=timeout_seconds
        )
        nccl = None
        if self._nccl_device is not None:
            nccl = await asyncio.to_thread(
                connect_nccl,
                PrefixStore("nccl", store),
                rank=rank,
                size=len(members),
                device=self._nccl_device,
                timeout_seconds=timeout_seconds,
            )
        transport = GlooTransport(
            *([wire] if nccl is None else [wire, nccl]),
            store=store,
            incarnation=incarnation,
            name=members[rank].name,
        )
        return AsyncGroup(
            transport,
            group_id=group_id,
            timeout_seconds=timeout_seconds,
            engine=TorchEngine(
                wire,
                transport=transport,
                names=RankNames(names),
                wire=nccl,
                reduce_in_place=self._reduce_in_place,
            ),
            rank_names=names,
            direct_bytes=direct_bytes,
            chunk_bytes=chunk_bytes,
        )

    async def leave_group(self, group: AsyncGroup) -> None:
        """Leave a group. May be called again."""
        await group.close()

    def _connect(
        self,
        store: Store,
        *,
        rank: int,
        members: Sequence[PeerAddress],
        timeout_seconds: float,
    ) -> GlooWire:
        size = len(members)
        limit = datetime.timedelta(seconds=timeout_seconds)
        keys = [f"here/{other}" for other in range(size)]
        try:
            store.set(keys[rank], "1")
            store.wait(keys, limit)
        except dist.DistStoreError:
            missing = [other for other, key in enumerate(keys) if not store.check([key])]
            names = RankNames(names_of(members))
            raise CollectiveTimeout(
                f"{names.of_all(missing)} of {size} did not come to the Gloo group in "
                f"{timeout_seconds:g} s"
            ) from None
        except dist.DistNetworkError as error:
            raise PeerLost(f"the store of the group is gone: {first_line(error)}") from error
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # Of messages. Later than ours, whose error says more.
        options._timeout = limit + _MARGIN
        device = (
            ProcessGroupGloo.create_default_device()
            if self._host is None
            else ProcessGroupGloo.create_device(hostname=self._host)
        )
        options._devices = [device]
        with translated("connecting"):
            return GlooWire(ProcessGroupGloo(store, rank, size, options))
