"""Collectives that move tensors and change none. R is the group's size.

exchange     each rank has bytes for some ranks and expects bytes of some: all_gather (the same for
             all), gather (for dst), scatter (from src), all_to_all. Small ones ride in the
             agreement, larger ones follow in chunks, straight to where they belong; this is the
             least that can move.
broadcast    small: src sends the whole tensor in the agreement, as long as its R - 1 copies are
             small. Large: src cuts it in R - 1 pieces, and the ranks pass on what they get while
             the rest still arrives:

                 src ----- piece 0 -----> rank a --\\
                     ----- piece 1 -----> rank b <-/  each chunk, as soon as it is there

             so src sends the tensor once, instead of R - 1 times.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence

import torch

from stagemesh.comm.collectives import (
    FIRST,
    SECOND,
    CollectiveCall,
    Contribution,
    agree,
    exchange,
    spans,
    split_evenly,
)
from stagemesh.comm.large_copies import flatten_all, run_copy, write_result
from stagemesh.comm.layouts import check_layouts, pack, unpack
from stagemesh.comm.raw import shaped, write
from stagemesh.comm.tasks import run_together
from stagemesh.comm.transport import TensorSpec

_Chunks = Sequence[torch.Tensor]


async def barrier(call: CollectiveCall) -> None:
    """Return when all ranks have called it."""
    await agree(call)


async def broadcast(call: CollectiveCall, tensor: torch.Tensor, *, src: int) -> None:
    """Put the tensor of rank `src` into those of all ranks."""
    num_bytes = tensor.numel() * tensor.element_size()
    is_source = call.rank == src
    [raw] = await flatten_all([tensor] if is_source else [torch.empty(0, dtype=torch.uint8)])
    if call.is_direct(num_bytes, num_copies=call.size - 1):
        told = await agree(call, payloads=dict.fromkeys(call.peers, raw))
        chunks: _Chunks = [told[src].payload]
        if not is_source:
            call.check_received(src, chunks[0], num_bytes=num_bytes)
    else:
        await agree(call)
        helpers = [rank for rank in range(call.size) if rank != src]
        if is_source:
            pieces = split_evenly(raw, len(helpers)) if helpers else []
            outgoing = dict(zip(helpers, pieces, strict=True))
            await exchange(call, phase=FIRST, outgoing=outgoing, incoming={})
        else:
            chunks = await _relay(call, num_bytes=num_bytes, src=src, helpers=helpers)
    if not is_source:
        await write_result(tensor, chunks)


async def _relay(
    call: CollectiveCall, *, num_bytes: int, src: int, helpers: Sequence[int]
) -> _Chunks:
    """All chunks; those of this rank's piece are passed on to the other helpers."""
    edges = [num_bytes * index // len(helpers) for index in range(len(helpers) + 1)]
    sizes = {rank: edges[i + 1] - edges[i] for i, rank in enumerate(helpers)}
    others = [rank for rank in helpers if rank != call.rank]
    own_spans = list(spans(sizes[call.rank], call.chunk_bytes))
    own: list[torch.Tensor] = []
    has_arrived = [asyncio.Event() for _ in own_spans]

    async def take_own() -> None:
        for index, span in enumerate(own_spans):
            own.append(await call.receive_chunk(src, phase=FIRST, num_bytes=span.stop - span.start))
            has_arrived[index].set()

    # Apart from take_own, so that a slow helper does not hold back what src sends.
    async def pass_on(peer: int) -> None:
        for index in range(len(own_spans)):
            await has_arrived[index].wait()
            await call.send(peer, phase=SECOND, tensor=own[index])

    received: dict[int, list[torch.Tensor]] = {call.rank: own}

    async def take_others() -> None:
        incoming = {peer: sizes[peer] for peer in others}
        received.update(await exchange(call, phase=SECOND, outgoing={}, incoming=incoming))

    await run_together([take_own(), take_others(), *(pass_on(peer) for peer in others)])
    return [chunk for rank in helpers for chunk in received[rank]]


async def all_gather(
    call: CollectiveCall, outputs: Sequence[torch.Tensor], tensor: torch.Tensor
) -> None:
    """Put the tensor of rank r into `outputs[r]` of each rank."""
    [raw] = await flatten_all([tensor])
    outgoing = dict.fromkeys(range(call.size), raw)
    received = await _move(call, outgoing, incoming=dict.fromkeys(outgoing, raw.numel()))
    await _write_all(outputs, received, own=call.rank)


async def gather(
    call: CollectiveCall, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, *, dst: int
) -> None:
    """Put the tensor of rank r into `outputs[r]` of rank `dst`; other ranks have no outputs."""
    [raw] = await flatten_all([tensor])
    incoming = dict.fromkeys(range(call.size), raw.numel()) if call.rank == dst else {}
    received = await _move(call, {dst: raw}, incoming=incoming)
    if call.rank == dst:
        await _write_all(outputs, received, own=call.rank)


async def scatter(
    call: CollectiveCall, output: torch.Tensor, inputs: Sequence[torch.Tensor], *, src: int
) -> None:
    """Put `inputs[r]` of rank `src` into the output of rank r; other ranks have no inputs."""
    outgoing = dict(enumerate(await flatten_all(inputs)))
    incoming = {src: output.numel() * output.element_size()}
    received = await _move(call, outgoing, incoming=incoming)
    await write_result(output, received[src])


async def all_to_all(
    call: CollectiveCall, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> None:
    """Put `inputs[r]` of rank q into `outputs[q]` of rank r.

    The shapes may differ from pair to pair, so each rank tells all of them to every other, in front
    of the bytes that ride in the agreement; all ranks compare them all.
    """
    layout = [tuple(tensor.shape) for tensor in (*inputs, *outputs)]
    outgoing = dict(enumerate(await flatten_all(inputs)))
    payloads = {
        rank: pack(layout, raw if call.is_direct(raw.numel()) else raw[:0])
        for rank, raw in outgoing.items()
    }
    told = await agree(call, payloads=payloads)
    unpacked = [unpack(contribution.payload) for contribution in told]
    check_layouts(call, [layout for layout, _ in unpacked], dtype=inputs[0].dtype)
    sizes = {rank: output.numel() * output.element_size() for rank, output in enumerate(outputs)}
    direct = {rank: raw for rank, (_, raw) in enumerate(unpacked)}
    received = await _complete(call, outgoing, incoming=sizes, direct=direct)
    await _write_all(outputs, received, own=call.rank)


async def gather_variable(
    call: CollectiveCall, tensor: torch.Tensor, *, receivers: Sequence[int]
) -> list[torch.Tensor] | None:
    """The tensors of all ranks on each receiver; only their first dim may differ."""
    [raw] = await flatten_all([tensor])
    outgoing = dict.fromkeys(receivers, raw)
    told = await agree(call, payloads=_direct_ones(call, outgoing))
    specs = [(rank, _spec_of(contribution)) for rank, contribution in enumerate(told)]
    incoming = {}
    if call.rank in receivers:
        incoming = {rank: math.prod(spec.shape) * spec.dtype.itemsize for rank, spec in specs}
    direct = {rank: contribution.payload for rank, contribution in enumerate(told)}
    received = await _complete(call, outgoing, incoming=incoming, direct=direct)
    if call.rank not in receivers:
        return None

    def join() -> list[torch.Tensor]:
        received[call.rank] = [raw.clone()]
        return [shaped(received[rank], dtype=spec.dtype, shape=spec.shape) for rank, spec in specs]

    return await run_copy(join, num_bytes=sum(incoming.values()))


async def _move(
    call: CollectiveCall, outgoing: Mapping[int, torch.Tensor], *, incoming: Mapping[int, int]
) -> dict[int, _Chunks]:
    """Agree, and exchange what is known to come."""
    told = await agree(call, payloads=_direct_ones(call, outgoing))
    direct = {rank: contribution.payload for rank, contribution in enumerate(told)}
    return await _complete(call, outgoing, incoming=incoming, direct=direct)


def _direct_ones(
    call: CollectiveCall, outgoing: Mapping[int, torch.Tensor]
) -> dict[int, torch.Tensor]:
    return {rank: raw for rank, raw in outgoing.items() if call.is_direct(raw.numel())}


async def _complete(
    call: CollectiveCall,
    outgoing: Mapping[int, torch.Tensor],
    *,
    incoming: Mapping[int, int],
    direct: Mapping[int, torch.Tensor],
) -> dict[int, _Chunks]:
    """After the agreement: what rode in it, and what does not fit in it, by source rank."""
    received: dict[int, _Chunks] = {}
    for rank, num_bytes in incoming.items():
        if rank == call.rank:
            received[rank] = [outgoing[rank]]
        elif call.is_direct(num_bytes):
            call.check_received(rank, direct[rank], num_bytes=num_bytes)
            received[rank] = [direct[rank]]
    large = {
        rank: raw
        for rank, raw in outgoing.items()
        if rank != call.rank and not call.is_direct(raw.numel())
    }
    rest = {rank: num_bytes for rank, num_bytes in incoming.items() if rank not in received}
    received.update(await exchange(call, phase=FIRST, outgoing=large, incoming=rest))
    return received


async def _write_all(
    outputs: Sequence[torch.Tensor], received: Mapping[int, _Chunks], *, own: int
) -> None:
    def write_all() -> None:
        # An output may lie in the memory of this rank's own input (all_gather into a buffer of
        # which the input is a part), which the other writes would then change before it is read.
        kept = [chunk.clone() for chunk in received[own]]
        for rank, output in enumerate(outputs):
            write(output, kept if rank == own else received[rank])

    num_bytes = sum(output.numel() * output.element_size() for output in outputs)
    await run_copy(write_all, num_bytes=num_bytes)


def _spec_of(contribution: Contribution) -> TensorSpec:
    # The agreement has compared it with this rank's own.
    assert contribution.called_with is not None
    return contribution.called_with
