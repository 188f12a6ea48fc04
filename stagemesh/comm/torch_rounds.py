"""Rounds of torch.distributed in which every rank has bytes for every other, and their agreement.

For `torch_collectives`: blocking, on the group's thread.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch

from stagemesh.comm.collectives import CollectiveCall, compare
from stagemesh.comm.gloo_wire import Wire
from stagemesh.comm.layouts import Shape, pack, unpack
from stagemesh.comm.raw import flat_bytes
from stagemesh.comm.scratch import Scratch
from stagemesh.comm.torch_calls import (
    BLOCK_BYTES,
    MAX_PAYLOAD_BYTES,
    Told,
    encode_call,
    read_block,
    write_block,
)
from stagemesh.comm.transport import TensorSpec

_MARGIN_SECONDS = 1.0
"""Deadlines of torch come after ours, whose errors say more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What the functions here work with."""

    wire: Wire
    """Moves the tensors."""
    calls: Wire
    """Moves the agreements, on the CPU; the same where the tensors are there too."""
    scratch: Scratch
    reduces_in_place: bool
    """Whether torch's own all_reduce may work in the caller's tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a function here gives."""

    chunks: Sequence[torch.Tensor]
    """Flat bytes, per rank or in order; none where there is nothing to write."""
    lent: Sequence[torch.Tensor] = ()
    """Memory of the chunks, to be given back when they have been read."""
    specs: Sequence[TensorSpec] = field(default=())
    """Of variable gathers: what each rank brought."""


def agree(
    means: Means, call: CollectiveCall, *, payloads: Mapping[int, torch.Tensor] | None = None
) -> list[Told]:
    """What each rank called, with its payload for this one.

    Raises:
        CollectiveMismatch: not all the same.
    """
    calls = means.calls
    data = encode_call(call.envelope)
    # Zeros, as the rest of a block travels too.
    outgoing = torch.zeros(calls.size * BLOCK_BYTES, dtype=torch.uint8)
    incoming = torch.empty_like(outgoing)
    payloads = payloads or {}
    sizes = [BLOCK_BYTES] * calls.size
    for rank, block in enumerate(cut(outgoing, sizes)):
        write_block(block, data, payloads.get(rank))
    calls.exchange(
        outgoing, incoming, send_sizes=sizes, receive_sizes=sizes, seconds=limit_of(call)
    )
    told = [read_block(block) for block in cut(incoming, sizes)]
    compare(call, [each.envelope for each in told])
    return told


def num_bytes(spec: TensorSpec) -> int:
    """Size of a tensor."""
    return math.prod(spec.shape) * spec.dtype.itemsize


def agree_on_layouts(
    means: Means, call: CollectiveCall, shapes: Sequence[Shape]
) -> list[Sequence[Shape]]:
    """Agree, and tell every rank the shapes of this one's tensors; those of all ranks.

    Raises:
        CollectiveMismatch: not all called the same.
    """
    packed = pack(shapes, torch.empty(0, dtype=torch.uint8))
    fits = packed.numel() <= MAX_PAYLOAD_BYTES
    told = agree(means, call, payloads=dict.fromkeys(range(call.size), packed) if fits else None)
    payloads = [each.payload for each in told]
    if all(payload.numel() for payload in payloads):
        return [unpack(payload)[0] for payload in payloads]
    # All ranks see that the layout of one was too long, and exchange them apart.
    calls, seconds = means.calls, limit_of(call)
    lengths = torch.empty(calls.size, dtype=torch.int64).view(torch.uint8)
    ours = torch.full((calls.size,), packed.numel(), dtype=torch.int64).view(torch.uint8)
    words = [torch.int64.itemsize] * calls.size
    calls.exchange(ours, lengths, send_sizes=words, receive_sizes=words, seconds=seconds)
    sizes = lengths.view(torch.int64).tolist()
    layouts = torch.empty(sum(sizes), dtype=torch.uint8)
    calls.exchange(
        torch.cat([packed] * calls.size),
        layouts,
        send_sizes=[packed.numel()] * calls.size,
        receive_sizes=sizes,
        seconds=seconds,
    )
    return [unpack(piece)[0] for piece in cut(layouts, sizes)]


def move(
    means: Means, call: CollectiveCall, outgoing: Mapping[int, torch.Tensor], *, own: torch.Tensor
) -> Result:
    """Agree, and exchange bytes of which each rank has as many for those that want them."""
    if own.numel() <= MAX_PAYLOAD_BYTES:
        told = agree(means, call, payloads=outgoing)
        chunks = [each.payload for each in told]
        return Result(chunks=chunks if call.rank in outgoing else ())
    agree(means, call)
    incoming = dict.fromkeys(call.peers, own.numel()) if call.rank in outgoing else {}
    result = swap(means, call, outgoing, incoming=incoming)
    chunks = [*result.chunks]
    chunks[call.rank] = own
    return Result(chunks=chunks if call.rank in outgoing else (), lent=result.lent)


def swap(
    means: Means,
    call: CollectiveCall,
    outgoing: Mapping[int, torch.Tensor],
    *,
    incoming: Mapping[int, int],
) -> Result:
    """Bytes for other ranks, and of other ranks; what this one has for itself stays."""
    nothing = torch.empty(0, dtype=torch.uint8, device=means.wire.device)
    pieces = [
        nothing if rank == call.rank else outgoing.get(rank, nothing) for rank in range(call.size)
    ]
    sizes = [incoming.get(rank, 0) for rank in range(call.size)]
    memory = means.scratch.take(sum(sizes))
    means.wire.exchange(
        joined(pieces),
        memory[: sum(sizes)],
        send_sizes=[piece.numel() for piece in pieces],
        receive_sizes=sizes,
        seconds=limit_of(call),
    )
    return Result(chunks=cut(memory, sizes), lent=[memory])


def joined(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """The pieces in one; without a copy, where they follow each other in one memory."""
    real = [piece for piece in pieces if piece.numel()]
    if not real:
        return pieces[0]
    storage = real[0].untyped_storage().data_ptr()
    follow = all(
        left.data_ptr() + left.numel() == right.data_ptr()
        and right.untyped_storage().data_ptr() == storage
        for left, right in pairwise(real)
    )
    if follow:
        return real[0].as_strided((sum(piece.numel() for piece in real),), (1,))
    return torch.cat(real)


def as_bytes(means: Means, tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, where the wire takes them."""
    raw = flat_bytes(tensor, keep_device=True).view(torch.uint8)
    return raw if raw.device == means.wire.device else raw.to(means.wire.device)


def cut(flat: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Views of consecutive pieces of these sizes."""
    edges = [0, *accumulate(sizes)]
    return [flat[start:end] for start, end in pairwise(edges)]


def limit_of(call: CollectiveCall) -> float:
    """Deadline of a round."""
    return call.seconds + _MARGIN_SECONDS
