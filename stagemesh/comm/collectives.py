"""The algorithms of collectives, over point-to-point messages. R is the group's size.

Each begins with a round in which every rank tells every other what it called; who sees a difference
raises, and as all see the same calls, all raise. Small tensors travel whole in that round:

    direct       rank 0 <-> rank 1      one hop; each rank reduces all R tensors
                     \\     /
                      rank 2

Large ones follow in chunks, by reduce-scatter and all-gather; rank r owns the r-th of R pieces:

    phase 1      every rank sends piece p to rank p; rank p reduces chunk by chunk, in rank order
    phase 2      rank p sends each reduced chunk to all

so a rank moves 2 (R - 1) / R of the tensor instead of R - 1 of it. Both reduce element-wise in rank
order: the bits of the result are equal on all ranks and do not depend on the algorithm.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from stagemesh.comm.reduce import ReduceOp, check_reducible, reduce_in_order
from stagemesh.comm.tasks import WaitingRanks, run_together
from stagemesh.comm.transport import MAX_USER_TAG, Envelope, Message, TensorSpec, Transport
from stagemesh.errors import CollectiveMismatch, ProtocolError

_PHASES_PER_CALL = 4
_AGREE, _REDUCE_SCATTER, _ALL_GATHER = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """One call of a collective on this rank."""

    group_id: str
    transport: Transport
    envelope: Envelope
    """Says what was called; its tag is set per phase."""
    waiting: WaitingRanks

    @property
    def peers(self) -> list[int]:
        """All other ranks."""
        return [rank for rank in range(self.transport.size) if rank != self.transport.rank]

    def tag(self, phase: int) -> int:
        """Tag of a phase of this call; no other call of the group has it."""
        return MAX_USER_TAG + 1 + self.envelope.sequence * _PHASES_PER_CALL + phase

    async def send(self, peer: int, *, phase: int, tensor: torch.Tensor) -> None:
        """Send to a peer."""
        envelope = replace(self.envelope, tag=self.tag(phase))
        await self.transport.send(peer, envelope=envelope, tensor=tensor)

    async def receive(self, peer: int, *, phase: int) -> Message:
        """The peer's next message of a phase."""
        with self.waiting.on(peer):
            return await self.transport.mailbox.get(peer, self.tag(phase))

    async def receive_chunk(self, peer: int, *, phase: int, like: torch.Tensor) -> torch.Tensor:
        """The peer's next chunk, of the dtype and shape that `like` has."""
        tensor = (await self.receive(peer, phase=phase)).tensor
        if TensorSpec.of(tensor) != TensorSpec.of(like):
            raise ProtocolError(
                f"rank {peer} sent a chunk of {TensorSpec.of(tensor)}, "
                f"expected {TensorSpec.of(like)}; all ranks need the same chunk_bytes"
            )
        return tensor


async def agree(call: CollectiveCall, *, payload: torch.Tensor) -> list[torch.Tensor]:
    """Tell all ranks what this one called, with a payload; the payloads in rank order.

    Raises:
        CollectiveMismatch: a rank called something else. All messages of the round were taken, so
            the group stays in step.
    """

    sends = [call.send(peer, phase=_AGREE, tensor=payload) for peer in call.peers]
    receives = [call.receive(peer, phase=_AGREE) for peer in call.peers]
    messages = (await run_together([*sends, *receives]))[len(sends) :]
    by_rank = {message.source_rank: message for message in messages if message is not None}
    calls = {rank: message.envelope.describe() for rank, message in by_rank.items()}
    calls[call.transport.rank] = call.envelope.describe()
    if len(set(calls.values())) > 1:
        text = ", ".join(f"rank {rank} called {calls[rank]}" for rank in sorted(calls))
        raise CollectiveMismatch(
            f"ranks disagree in collective {call.envelope.sequence} of group {call.group_id}: "
            f"{text}"
        )
    tensors = {rank: message.tensor for rank, message in by_rank.items()}
    tensors[call.transport.rank] = payload
    return [tensors[rank] for rank in range(call.transport.size)]


async def all_reduce_direct(
    call: CollectiveCall, tensor: torch.Tensor, *, op: ReduceOp
) -> torch.Tensor:
    """The reduced tensor, by sending the whole tensor to each rank.

    Shapes:
        tensor: any; the result has its shape.
    """
    parts = await agree(call, payload=tensor)
    check_reducible(tensor.dtype, op)
    return reduce_in_order(parts, op=op)


async def all_reduce_chunked(
    call: CollectiveCall, tensor: torch.Tensor, *, op: ReduceOp, chunk_bytes: int
) -> torch.Tensor:
    """The reduced tensor, by reduce-scatter and all-gather of chunks.

    Shapes:
        tensor: any, with N elements; the result has its shape.
        flat, out: [N]; rank r owns [N * r // R, N * (r + 1) // R).
    """
    flat = tensor.detach().contiguous().reshape(-1)
    await agree(call, payload=flat[:0])
    check_reducible(tensor.dtype, op)
    # Not in place: a call that fails half-way leaves the caller's tensor as it was.
    out = torch.empty_like(flat)
    chunk = max(1, chunk_bytes // flat.element_size())
    size = call.transport.size
    spans = [_spans(flat.numel(), rank, size, chunk) for rank in range(size)]
    own = spans[call.transport.rank]
    is_reduced = [asyncio.Event() for _ in own]

    async def scatter(peer: int) -> None:
        for span in spans[peer]:
            await call.send(peer, phase=_REDUCE_SCATTER, tensor=flat[span])

    async def reduce_own() -> None:
        for index, span in enumerate(own):
            mine = flat[span]
            chunks = await run_together(
                call.receive_chunk(peer, phase=_REDUCE_SCATTER, like=mine) for peer in call.peers
            )
            out[span] = reduce_in_order(_insert(chunks, call.transport.rank, mine), op=op)
            is_reduced[index].set()

    # Apart from reduce_own: if it waited for these sends, two ranks that are out of credit towards
    # each other would both stop taking chunks, for ever.
    async def share(peer: int) -> None:
        for index, span in enumerate(own):
            await is_reduced[index].wait()
            await call.send(peer, phase=_ALL_GATHER, tensor=out[span])

    async def gather(peer: int) -> None:
        for span in spans[peer]:
            out[span] = await call.receive_chunk(peer, phase=_ALL_GATHER, like=out[span])

    await run_together(
        [reduce_own(), *(work(peer) for work in (scatter, share, gather) for peer in call.peers)]
    )
    return out.reshape(tensor.shape)


def _spans(num_elements: int, rank: int, size: int, chunk: int) -> list[slice]:
    """The chunks of a rank's piece."""
    start, end = num_elements * rank // size, num_elements * (rank + 1) // size
    return [slice(at, min(at + chunk, end)) for at in range(start, end, chunk)]


def _insert(
    chunks: Sequence[torch.Tensor], rank: int, mine: torch.Tensor
) -> Sequence[torch.Tensor]:
    return [*chunks[:rank], mine, *chunks[rank:]]
