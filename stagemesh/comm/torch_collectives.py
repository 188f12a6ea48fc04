"""The collectives over torch.distributed, as blocking functions for the group's thread.

Same calls, same agreement and same bits as `movement` and `reductions`, with other means: rounds in
which every rank has bytes for every other (an all_to_all of unequal parts). The first is the
agreement, in blocks of one size, in which small payloads ride.

    small     agree                                      each payload in the first round
    large     agree, exchange                            gathers, scatter, all_to_all
              agree, exchange, reduce, exchange          reductions: rank p reduces piece p of R
              agree, all_reduce                          torch's own, where the bits are ours
              agree, broadcast                           torch's own

Nothing here writes to the caller's tensors: who called does, if nobody has ended the call. What a
large operation gives lies in memory that is lent (`Result`).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from stagemesh.comm.collectives import CollectiveCall, even_sizes, spans
from stagemesh.comm.layouts import check_layouts
from stagemesh.comm.raw import flat_bytes
from stagemesh.comm.reduce import ReduceOp, check_reducible, reduce_in_order
from stagemesh.comm.torch_calls import MAX_PAYLOAD_BYTES
from stagemesh.comm.torch_rounds import (
    Means,
    Result,
    agree,
    agree_on_layouts,
    as_bytes,
    cut,
    joined,
    limit_of,
    move,
    num_bytes,
    swap,
)

_SMALL_BYTES = 64 * 1024
"""Up to this size a reduction sends whole tensors: one round fewer."""

_SEGMENT_BYTES = 4 * 2**20
"""A larger reduction goes segment by segment: large messages of Gloo are slow on a busy machine."""

_REDUCE_BYTES = 2**20
"""What is reduced at a time: its temporary tensors stay in the cache."""


def barrier(means: Means, call: CollectiveCall) -> Result:
    """Nothing."""
    agree(means, call)
    return Result(chunks=())


def broadcast(means: Means, call: CollectiveCall, tensor: torch.Tensor, *, src: int) -> Result:
    """The bytes of rank `src`; nothing there."""
    raw = as_bytes(means, tensor)
    is_source = call.rank == src
    if raw.numel() <= MAX_PAYLOAD_BYTES:
        payloads = dict.fromkeys(call.peers, raw) if is_source else None
        told = agree(means, call, payloads=payloads)
        return Result(chunks=[told[src].payload])
    agree(means, call)
    # On the others a copy: torch writes into it, perhaps after the call was given up.
    memory = raw if is_source else means.scratch.take(raw.numel())
    flat = memory[: raw.numel()]
    means.wire.broadcast(flat, src=src, seconds=limit_of(call))
    return Result(chunks=[flat], lent=() if is_source else [memory])


def reduce_to(
    means: Means,
    call: CollectiveCall,
    tensor: torch.Tensor,
    *,
    op: ReduceOp,
    receivers: Collection[int],
) -> Result:
    """The reduced tensor's bytes in chunks, on receivers."""
    raw = as_bytes(means, tensor)
    if raw.numel() * (call.size - 1) <= _SMALL_BYTES:
        told = move(means, call, dict.fromkeys(receivers, raw), own=raw)
        check_reducible(tensor.dtype, op)
        if call.rank not in receivers:
            return told
        return Result(chunks=[_reduce(told.chunks, dtype=tensor.dtype, op=op)], lent=told.lent)
    agree(means, call)
    check_reducible(tensor.dtype, op)
    is_torchs = len(receivers) == call.size and _is_torchs_sum_ours(call, tensor.dtype, op)
    if is_torchs and means.reduces_in_place and _is_writable_memory_of(tensor, raw):
        _sum_by_torch(means, call, raw.view(tensor.dtype), op=op)
        return Result(chunks=())
    memory = means.scratch.take(raw.numel())
    result = memory[: raw.numel()]
    if is_torchs:
        # On a copy, as a failure must leave the caller's tensor alone.
        _sum_by_torch(means, call, result.copy_(raw).view(tensor.dtype), op=op)
    else:
        for span in spans(raw.numel(), _SEGMENT_BYTES):
            part = _Part(dtype=tensor.dtype, op=op, receivers=receivers)
            _reduce_segment(means, call, raw[span], result[span], part)
    return Result(chunks=[result] if call.rank in receivers else (), lent=[memory])


def reduce_scatter(
    means: Means,
    call: CollectiveCall,
    inputs: Sequence[torch.Tensor],
    *,
    op: ReduceOp,
) -> Result:
    """The reduced bytes of this rank's piece."""
    pieces = [as_bytes(means, tensor) for tensor in inputs]
    dtype = inputs[0].dtype
    num_bytes = pieces[0].numel()
    if num_bytes <= MAX_PAYLOAD_BYTES:
        told = agree(means, call, payloads=dict(enumerate(pieces)))
        check_reducible(dtype, op)
        parts = [each.payload for each in told]
        return Result(chunks=[_reduce(parts, dtype=dtype, op=op)])
    agree(means, call)
    check_reducible(dtype, op)
    memory = means.scratch.take(num_bytes)
    own = memory[:num_bytes]
    _reduce_own(means, call, pieces, own, _Part(dtype=dtype, op=op))
    return Result(chunks=[own], lent=[memory])


def all_gather(means: Means, call: CollectiveCall, tensor: torch.Tensor) -> Result:
    """Each rank's bytes."""
    raw = as_bytes(means, tensor)
    return move(means, call, dict.fromkeys(range(call.size), raw), own=raw)


def gather(means: Means, call: CollectiveCall, tensor: torch.Tensor, *, dst: int) -> Result:
    """Each rank's bytes, on rank `dst`."""
    raw = as_bytes(means, tensor)
    return move(means, call, {dst: raw}, own=raw)


def scatter(
    means: Means,
    call: CollectiveCall,
    output: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    *,
    src: int,
) -> Result:
    """The bytes that rank `src` has for this one."""
    outgoing = {rank: as_bytes(means, tensor) for rank, tensor in enumerate(inputs)}
    num_bytes = output.numel() * output.element_size()
    is_source = call.rank == src
    if num_bytes <= MAX_PAYLOAD_BYTES:
        told = agree(means, call, payloads=outgoing)
        return Result(chunks=[outgoing[src] if is_source else told[src].payload])
    agree(means, call)
    incoming = {} if is_source else {src: num_bytes}
    result = swap(means, call, outgoing, incoming=incoming)
    return Result(chunks=[outgoing[src] if is_source else result.chunks[src]], lent=result.lent)


def gather_variable(
    means: Means, call: CollectiveCall, tensor: torch.Tensor, *, receivers: Collection[int]
) -> Result:
    """Each rank's spec and bytes, on receivers."""
    raw = as_bytes(means, tensor)
    told = agree(means, call)
    specs = [each.envelope.called_with for each in told]
    known = [spec for spec in specs if spec is not None]
    sizes = {rank: num_bytes(spec) for rank, spec in enumerate(known) if rank != call.rank}
    is_receiver = call.rank in receivers
    outgoing = dict.fromkeys(receivers, raw)
    result = swap(means, call, outgoing, incoming=sizes if is_receiver else {})
    if not is_receiver:
        return Result(chunks=())
    chunks = [*result.chunks]
    chunks[call.rank] = raw
    return Result(chunks=chunks, lent=result.lent, specs=known)


def all_to_all(
    means: Means,
    call: CollectiveCall,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
) -> Result:
    """The bytes of each rank's tensor for this one; all ranks compare all shapes first."""
    shapes = [tuple(tensor.shape) for tensor in (*inputs, *outputs)]
    check_layouts(call, agree_on_layouts(means, call, shapes), dtype=inputs[0].dtype)
    outgoing = {rank: as_bytes(means, tensor) for rank, tensor in enumerate(inputs)}
    incoming = {
        rank: output.numel() * output.element_size()
        for rank, output in enumerate(outputs)
        if rank != call.rank
    }
    result = swap(means, call, outgoing, incoming=incoming)
    chunks = [*result.chunks]
    chunks[call.rank] = outgoing[call.rank]
    return Result(chunks=chunks, lent=result.lent)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What a reduction of a part has from its whole."""

    dtype: torch.dtype
    op: ReduceOp
    receivers: Collection[int] = ()


def _is_torchs_sum_ours(call: CollectiveCall, dtype: torch.dtype, op: ReduceOp) -> bool:
    """Whether torch's own all_reduce gives our bits: a sum of two has one order."""
    has_one_order = call.size == 2 and dtype in (torch.float32, torch.float64)
    return has_one_order and op in (ReduceOp.SUM, ReduceOp.AVG)


def _is_writable_memory_of(tensor: torch.Tensor, raw: torch.Tensor) -> bool:
    # torch lets nobody compute in a tensor of inference mode.
    return raw.data_ptr() == tensor.data_ptr() and not tensor.is_inference()


def _sum_by_torch(means: Means, call: CollectiveCall, total: torch.Tensor, *, op: ReduceOp) -> None:
    means.wire.all_reduce_sum(total, seconds=limit_of(call))
    if op is ReduceOp.AVG:
        total.div_(call.size)


def _reduce_segment(
    means: Means, call: CollectiveCall, raw: torch.Tensor, result: torch.Tensor, part: _Part
) -> None:
    """Reduce this rank's piece of a segment, and exchange it for the pieces of the others."""
    sizes = even_sizes(raw.numel(), call.size, unit=part.dtype.itemsize)
    results = cut(result, sizes)
    memory = means.scratch.take(sizes[call.rank])
    # Two ranks write straight into the result. Of more, the others' pieces are not in one piece
    # there, so that torch puts the own one between them.
    own = results[call.rank] if call.size == 2 else memory[: sizes[call.rank]]
    _reduce_own(means, call, cut(raw, sizes), own, part)
    targets = [rank for rank in part.receivers if call.size > 2 or rank != call.rank]
    incoming = result if call.size > 2 else results[1 - call.rank]
    if call.rank not in part.receivers:
        incoming, sizes = incoming[:0], [0] * call.size
    means.wire.exchange(
        joined([own if rank in targets else own[:0] for rank in range(call.size)]),
        incoming,
        send_sizes=[own.numel() if rank in targets else 0 for rank in range(call.size)],
        receive_sizes=sizes if call.size > 2 else _without(sizes, call.rank),
        seconds=limit_of(call),
    )
    means.scratch.give_back(memory)


def _reduce_own(
    means: Means,
    call: CollectiveCall,
    pieces: Sequence[torch.Tensor],
    own: torch.Tensor,
    part: _Part,
) -> None:
    """Put into `own` this rank's piece of all ranks, reduced in rank order."""
    incoming = [own.numel()] * call.size
    outgoing = list(pieces)
    if call.size == 2:
        # What two ranks have for each other is in one piece without their own parts. Between more,
        # leaving them out would take a copy of all others.
        incoming = _without(incoming, call.rank)
        outgoing[call.rank] = outgoing[call.rank][:0]
    memory = means.scratch.take(sum(incoming))
    means.wire.exchange(
        joined(outgoing),
        memory[: sum(incoming)],
        send_sizes=[piece.numel() for piece in outgoing],
        receive_sizes=incoming,
        seconds=limit_of(call),
    )
    parts = cut(memory, incoming)
    parts[call.rank] = pieces[call.rank]
    for span in spans(own.numel(), _REDUCE_BYTES):
        reduced = _reduce([each[span] for each in parts], dtype=part.dtype, op=part.op)
        own[span] = reduced.view(torch.uint8)
    means.scratch.give_back(memory)


def _reduce(parts: Sequence[torch.Tensor], *, dtype: torch.dtype, op: ReduceOp) -> torch.Tensor:
    """The bytes that the ranks' bytes reduce to."""
    whole = [
        (part if part.storage_offset() % dtype.itemsize == 0 else part.clone()).view(dtype)
        for part in parts
    ]
    return flat_bytes(reduce_in_order(whole, op=op), keep_device=True)


def _without(sizes: Sequence[int], rank: int) -> list[int]:
    return [0 if index == rank else size for index, size in enumerate(sizes)]
