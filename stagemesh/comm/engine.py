"""Engine: what carries out the operations of a group, once their arguments are checked.

    AsyncGroup        signatures, checks, documentation; one CollectiveCall per collective
      Engine          one method per operation
        MeshEngine    over a Transport: the algorithms of `movement` and `reductions`
        TorchEngine   over a process group of torch.distributed (see torch_engine)

An engine agrees with the other ranks on the call before it moves anything, and writes into the
tensors that it was given.
"""

import contextlib
from collections.abc import Sequence
from typing import Protocol

import torch

from stagemesh.comm import movement, reductions
from stagemesh.comm.collectives import CollectiveCall
from stagemesh.comm.reduce import ReduceOp
from stagemesh.comm.tasks import WaitingRanks
from stagemesh.comm.transport import Envelope, Transport


class Engine(Protocol):
    """The operations of one rank of a group."""

    @property
    def messages_can_break(self) -> bool:
        """Whether a send or receive that fails leaves the group unusable."""

    async def send(
        self, tensor: torch.Tensor, *, peer: int, tag: int, waiting: WaitingRanks
    ) -> None:
        """Send to a rank."""

    async def receive(
        self, *, peer: int | None, tag: int, waiting: WaitingRanks
    ) -> tuple[int, torch.Tensor]:
        """The next tensor of a rank, or of any; and whose it is."""

    async def barrier(self, call: CollectiveCall) -> None:
        """Return when all ranks are here."""

    async def broadcast(self, call: CollectiveCall, tensor: torch.Tensor, *, src: int) -> None:
        """Put the tensor of rank `src` into those of all ranks."""

    async def all_reduce(self, call: CollectiveCall, tensor: torch.Tensor, *, op: ReduceOp) -> None:
        """Reduce a tensor in place on each rank."""

    async def reduce(
        self, call: CollectiveCall, tensor: torch.Tensor, *, op: ReduceOp, dst: int
    ) -> None:
        """Reduce a tensor in place on rank `dst`."""

    async def reduce_scatter(
        self,
        call: CollectiveCall,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        *,
        op: ReduceOp,
    ) -> None:
        """Reduce the ranks' `inputs[r]` into the output of rank r."""

    async def all_gather(
        self, call: CollectiveCall, outputs: Sequence[torch.Tensor], tensor: torch.Tensor
    ) -> None:
        """Put the tensor of rank r into `outputs[r]` of each rank."""

    async def gather(
        self,
        call: CollectiveCall,
        outputs: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        *,
        dst: int,
    ) -> None:
        """Put the tensor of rank r into `outputs[r]` of rank `dst`; others have no outputs."""

    async def gather_variable(
        self, call: CollectiveCall, tensor: torch.Tensor, *, receivers: Sequence[int]
    ) -> list[torch.Tensor] | None:
        """The tensors of all ranks on each receiver; only their first dim may differ."""

    async def scatter(
        self,
        call: CollectiveCall,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        *,
        src: int,
    ) -> None:
        """Put `inputs[r]` of rank `src` into the output of rank r; others have no inputs."""

    async def all_to_all(
        self,
        call: CollectiveCall,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
    ) -> None:
        """Put `inputs[r]` of rank q into `outputs[q]` of rank r."""

    async def find_abort(self) -> None:
        """Look whether another rank has aborted the group, where nobody tells this one."""

    async def close(self) -> None:
        """Let go of what the engine holds beside its transport. May be called again."""


class MeshEngine:
    """Our own algorithms over a transport."""

    messages_can_break = False

    barrier = staticmethod(movement.barrier)
    broadcast = staticmethod(movement.broadcast)
    all_reduce = staticmethod(reductions.all_reduce)
    reduce = staticmethod(reductions.reduce_to_one)
    reduce_scatter = staticmethod(reductions.reduce_scatter)
    all_gather = staticmethod(movement.all_gather)
    gather = staticmethod(movement.gather)
    gather_variable = staticmethod(movement.gather_variable)
    scatter = staticmethod(movement.scatter)
    all_to_all = staticmethod(movement.all_to_all)

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def send(
        self, tensor: torch.Tensor, *, peer: int, tag: int, waiting: WaitingRanks
    ) -> None:
        """Send to a rank."""
        with waiting.on(peer):
            envelope = Envelope(tag=tag, operation="send")
            await self._transport.send(peer, envelope=envelope, tensor=tensor)

    async def receive(
        self, *, peer: int | None, tag: int, waiting: WaitingRanks
    ) -> tuple[int, torch.Tensor]:
        """The next tensor of a rank, or of any; and whose it is."""
        mailbox = self._transport.mailbox
        if peer is not None:
            with waiting.on(peer):
                return peer, (await mailbox.get(peer, tag)).tensor
        peers = [rank for rank in range(self._transport.size) if rank != self._transport.rank]
        with contextlib.ExitStack() as stack:
            for each in peers:
                stack.enter_context(waiting.on(each))
            message = await mailbox.get_any(tag, sources=peers)
        return message.source_rank, message.tensor

    async def find_abort(self) -> None:
        """Nothing to look for: who aborts tells all."""

    async def close(self) -> None:
        """Nothing to let go of."""
