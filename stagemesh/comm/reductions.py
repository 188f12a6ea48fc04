"""all_reduce, reduce and reduce_scatter. R is the group's size, N the bytes of the tensor.

Small: every rank sends its part in the agreement, and who needs the result reduces all R parts. For
an all_reduce the R - 1 copies that a rank sends count, so more ranks cut a tensor sooner.
Large: rank p owns piece p of R.

    phase 1      every rank sends piece p to rank p; rank p reduces chunk by chunk, in rank order
    phase 2      rank p sends each reduced chunk to those that want the result: to all (all_reduce),
                 to one (reduce), to nobody (reduce_scatter)

So a rank of a large all_reduce sends 2 (R - 1) / R N instead of (R - 1) N. Both reduce element-wise
in rank order: the bits of the result are equal on all ranks and do not depend on the algorithm.
"""

import asyncio
from collections.abc import Collection, Sequence

import torch

from stagemesh.comm.collectives import (
    FIRST,
    SECOND,
    CollectiveCall,
    agree,
    agree_as_pair,
    spans,
    split_evenly,
)
from stagemesh.comm.large_copies import flatten_all, write_result
from stagemesh.comm.raw import flat_bytes, write_elements
from stagemesh.comm.reduce import ReduceOp, check_reducible, reduce_in_order
from stagemesh.comm.tasks import run_together


async def all_reduce(call: CollectiveCall, tensor: torch.Tensor, *, op: ReduceOp) -> None:
    """Reduce a tensor in place on each rank."""
    await _reduce_to(call, tensor, op=op, receivers=range(call.size))


async def reduce_to_one(
    call: CollectiveCall, tensor: torch.Tensor, *, op: ReduceOp, dst: int
) -> None:
    """Reduce a tensor in place on rank `dst`."""
    await _reduce_to(call, tensor, op=op, receivers=[dst])


async def reduce_scatter(
    call: CollectiveCall,
    output: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    *,
    op: ReduceOp,
) -> None:
    """Reduce the ranks' `inputs[r]` into the output of rank r.

    Shapes:
        inputs: R tensors, each as the output.
    """
    pieces = await flatten_all(inputs)
    num_bytes = pieces[0].numel()
    if call.is_direct(num_bytes):
        parts = await _agree_on_parts(call, dict(enumerate(pieces)), num_bytes=num_bytes)
        check_reducible(output.dtype, op)
        write_elements(output, _reduce_parts(parts, dtype=output.dtype, op=op))
        return
    await agree(call)
    check_reducible(output.dtype, op)
    reduced = await _reduce_pieces(call, pieces, dtype=output.dtype, op=op, receivers=[])
    await write_result(output, reduced[call.rank])


async def _reduce_to(
    call: CollectiveCall, tensor: torch.Tensor, *, op: ReduceOp, receivers: Collection[int]
) -> None:
    # The usual one is small and contiguous, and pays for no coroutine.
    raw = flat_bytes(tensor) if tensor.is_contiguous() else (await flatten_all([tensor]))[0]
    is_receiver = call.rank in receivers
    num_copies = call.size - 1 if len(receivers) > 1 else 1
    if call.is_direct(raw.numel(), num_copies=num_copies):
        if call.size == 2 and len(receivers) == 2:
            theirs = await agree_as_pair(call, raw)
            parts = [theirs, raw] if call.rank else [raw, theirs]
            write_elements(tensor, _reduce_parts(parts, dtype=tensor.dtype, op=op))
            return
        payloads = dict.fromkeys(receivers, raw)
        parts = await _agree_on_parts(call, payloads, num_bytes=raw.numel() if is_receiver else 0)
        check_reducible(tensor.dtype, op)
        if is_receiver:
            write_elements(tensor, _reduce_parts(parts, dtype=tensor.dtype, op=op))
        return
    await agree(call)
    check_reducible(tensor.dtype, op)
    pieces = split_evenly(raw, call.size, unit=tensor.element_size())
    reduced = await _reduce_pieces(call, pieces, dtype=tensor.dtype, op=op, receivers=receivers)
    if is_receiver:
        # Only now: a call that fails half-way leaves the caller's tensor as it was.
        await write_result(tensor, [chunk for piece in reduced for chunk in piece])


async def _agree_on_parts(
    call: CollectiveCall, payloads: dict[int, torch.Tensor], *, num_bytes: int
) -> list[torch.Tensor]:
    parts = [contribution.payload for contribution in await agree(call, payloads=payloads)]
    for rank, part in enumerate(parts):
        call.check_received(rank, part, num_bytes=num_bytes)
    return parts


async def _reduce_pieces(
    call: CollectiveCall,
    pieces: Sequence[torch.Tensor],
    *,
    dtype: torch.dtype,
    op: ReduceOp,
    receivers: Collection[int],
) -> list[list[torch.Tensor]]:
    """The reduced chunks of each piece; of this rank's own one only, if it is no receiver."""
    chunk = max(1, call.chunk_bytes // dtype.itemsize) * dtype.itemsize
    by_piece = [list(spans(piece.numel(), chunk)) for piece in pieces]
    own_spans = by_piece[call.rank]
    reduced: list[list[torch.Tensor]] = [[] for _ in pieces]
    is_reduced = [asyncio.Event() for _ in own_spans]

    async def scatter(peer: int) -> None:
        for span in by_piece[peer]:
            await call.send(peer, phase=FIRST, tensor=pieces[peer][span])

    async def reduce_own() -> None:
        for index, span in enumerate(own_spans):
            num_bytes = span.stop - span.start
            parts = await run_together(
                call.receive_chunk(peer, phase=FIRST, num_bytes=num_bytes) for peer in call.peers
            )
            parts.insert(call.rank, pieces[call.rank][span])
            reduced[call.rank].append(flat_bytes(_reduce_parts(parts, dtype=dtype, op=op)))
            is_reduced[index].set()

    # Apart from reduce_own: if it waited for these sends, two ranks that are out of credit towards
    # each other would both stop taking chunks, for ever.
    async def share(peer: int) -> None:
        for index in range(len(own_spans)):
            await is_reduced[index].wait()
            await call.send(peer, phase=SECOND, tensor=reduced[call.rank][index])

    async def gather(peer: int) -> None:
        for span in by_piece[peer]:
            received = await call.receive_chunk(
                peer, phase=SECOND, num_bytes=span.stop - span.start
            )
            reduced[peer].append(received)

    targets = [peer for peer in call.peers if peer in receivers]
    sources = call.peers if call.rank in receivers else []
    await run_together(
        [
            reduce_own(),
            *(scatter(peer) for peer in call.peers),
            *(share(peer) for peer in targets),
            *(gather(peer) for peer in sources),
        ]
    )
    return reduced


def _reduce_parts(
    parts: Sequence[torch.Tensor], *, dtype: torch.dtype, op: ReduceOp
) -> torch.Tensor:
    """What the ranks' bytes reduce to. Shapes: parts R x [bytes], result [elements]."""
    return reduce_in_order([part.view(dtype) for part in parts], op=op)
