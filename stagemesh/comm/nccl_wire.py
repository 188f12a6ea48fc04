"""Flat bytes over NCCL: the collectives' tensors stay on their accelerators.

Written against torch's API and not run by us yet: no machine of ours has two such devices.
"""

import datetime
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store, Work  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import (
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
)

from stagemesh.comm.gloo_wire import translated
from stagemesh.errors import CollectiveTimeout, ConfigError, PeerLost

_FIRST_NAP_SECONDS = 20e-6
_LONGEST_NAP_SECONDS = 1e-3


def nccl_device() -> torch.device:
    """The device of the calling thread, which `torch.cuda.set_device` chooses.

    Raises:
        ConfigError: this torch has no NCCL, or this machine has no device for it.
    """
    if not dist.is_nccl_available():
        raise ConfigError(
            f"backend 'nccl' needs a torch with NCCL, and torch {torch.__version__} has none; use "
            "backend 'gloo' or 'grpc'"
        )
    if not torch.cuda.is_available():
        raise ConfigError(
            "backend 'nccl' needs a CUDA device, and torch finds none here; use backend 'gloo' or "
            "'grpc'"
        )
    return torch.device("cuda", torch.cuda.current_device())


class NcclWire:
    """One rank's end of an NCCL group. For one thread, but for `abort`."""

    def __init__(self, group: Any, *, device: torch.device) -> None:
        """Wrap a ProcessGroupNCCL."""
        self._group = group
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.device = device

    def exchange(
        self,
        outgoing: torch.Tensor,
        incoming: torch.Tensor,
        *,
        send_sizes: Sequence[int],
        receive_sizes: Sequence[int],
        seconds: float,
    ) -> None:
        """As Wire."""
        with translated("a collective", library="NCCL"):
            work = self._live().alltoall_base(
                incoming, outgoing, list(receive_sizes), list(send_sizes), AllToAllOptions()
            )
            _wait_for(work, seconds=seconds)

    def broadcast(self, flat: torch.Tensor, *, src: int, seconds: float) -> None:
        """As Wire."""
        options = BroadcastOptions()
        options.rootRank = src
        with translated("broadcast", library="NCCL"):
            _wait_for(self._live().broadcast([flat], options), seconds=seconds)

    def all_reduce_sum(self, tensor: torch.Tensor, *, seconds: float) -> None:
        """As Wire."""
        with translated("all_reduce", library="NCCL"):
            _wait_for(self._live().allreduce([tensor], AllreduceOptions()), seconds=seconds)

    def synchronize(self) -> None:
        """As Wire; the caller's own streams are waited for too."""
        torch.cuda.synchronize(self.device)

    def abort(self) -> None:
        """As Wire."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _live(self) -> Any:
        if self._group is None:
            raise PeerLost("the group's connections are cut")
        return self._group


def connect_nccl(
    store: Store, *, rank: int, size: int, device: torch.device, timeout_seconds: float
) -> NcclWire:
    """Make this rank's end; NCCL itself connects with the first collective.

    Raises:
        PeerLost: NCCL fails.
    """
    library: Any = dist.distributed_c10d
    with translated("connecting", library="NCCL"):
        options = library.ProcessGroupNCCL.Options()
        options._timeout = datetime.timedelta(seconds=timeout_seconds)
        return NcclWire(library.ProcessGroupNCCL(store, rank, size, options), device=device)


def _wait_for(work: Work, *, seconds: float) -> None:
    """Wait until the device has done it. NCCL's own wait has no deadline that says so."""
    deadline = time.monotonic() + seconds
    nap = _FIRST_NAP_SECONDS
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise CollectiveTimeout(f"a collective over NCCL did not end in {seconds:g} s")
        time.sleep(nap)
        nap = min(2 * nap, _LONGEST_NAP_SECONDS)
    work.wait()
