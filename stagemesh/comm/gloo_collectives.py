"""The collectives over a Gloo group, as blocking functions for the group's thread.

Same calls, same agreement and same bits as `movement` and `reductions`, with other means: the
agreement is one all_gather of the calls, and the bytes travel in Gloo's all_gather, all_to_all and
broadcast. Results are chunks of bytes; who called writes them, if nobody has ended the call.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch

from stagemesh.comm.collectives import CollectiveCall, compare, split_evenly
from stagemesh.comm.frames import envelope_from_bytes, envelope_to_bytes
from stagemesh.comm.gloo_wire import GlooWire
from stagemesh.comm.layouts import Shape, check_layouts, pack, unpack
from stagemesh.comm.raw import flat_bytes, shaped
from stagemesh.comm.reduce import ReduceOp, check_reducible, reduce_in_order
from stagemesh.comm.transport import Envelope, TensorSpec
from stagemesh.errors import ProtocolError

_LENGTH_BYTES = 2
_CALL_BYTES = 2048
"""Room for a call; one of 64 dims needs less."""


def encode_call(envelope: Envelope) -> torch.Tensor:
    """A call in a fixed number of bytes."""
    data = envelope_to_bytes(replace(envelope, tag=0))
    assert len(data) <= _CALL_BYTES - _LENGTH_BYTES
    padded = len(data).to_bytes(_LENGTH_BYTES, "little") + data
    return torch.frombuffer(bytearray(padded.ljust(_CALL_BYTES, b"\0")), dtype=torch.uint8)


def empty_call() -> torch.Tensor:
    """Where a call can be received."""
    return torch.zeros(_CALL_BYTES, dtype=torch.uint8)


def decode_call(flat: torch.Tensor) -> Envelope:
    """What `encode_call` was given.

    Raises:
        ProtocolError: the bytes are not what it makes.
    """
    data = bytes(flat.tolist())
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    if end > len(data):
        raise ProtocolError(f"a call of {end} bytes came in {len(data)}")
    return envelope_from_bytes(data[_LENGTH_BYTES:end])


def num_bytes(spec: TensorSpec) -> int:
    """Size of a tensor."""
    return math.prod(spec.shape) * spec.dtype.itemsize


def as_tensor(spec: TensorSpec, flat: torch.Tensor) -> torch.Tensor:
    """A tensor out of its bytes."""
    return shaped([flat.clone()], dtype=spec.dtype, shape=spec.shape)


def agree(wire: GlooWire, call: CollectiveCall, *, seconds: float) -> list[Envelope]:
    """What each rank called.

    Raises:
        CollectiveMismatch: not all the same.
    """
    told = wire.all_gather(encode_call(call.envelope), seconds=seconds)
    envelopes = [decode_call(flat) for flat in told]
    compare(call, envelopes)
    return envelopes


def broadcast(
    wire: GlooWire, call: CollectiveCall, tensor: torch.Tensor, *, src: int, seconds: float
) -> torch.Tensor:
    """The bytes of rank `src`."""
    agree(wire, call, seconds=seconds)
    # A copy on each rank: Gloo writes into it, perhaps after the call was given up.
    flat = flat_bytes(tensor).clone()
    wire.broadcast(flat, src=src, seconds=seconds)
    return flat


def reduce_to(
    wire: GlooWire,
    call: CollectiveCall,
    tensor: torch.Tensor,
    *,
    op: ReduceOp,
    receivers: Collection[int],
    seconds: float,
) -> list[torch.Tensor]:
    """The reduced tensor's bytes in chunks, on receivers."""
    agree(wire, call, seconds=seconds)
    check_reducible(tensor.dtype, op)
    pieces = split_evenly(flat_bytes(tensor), wire.size, unit=tensor.element_size())
    own = _reduce_pieces(wire, pieces, dtype=tensor.dtype, op=op, seconds=seconds)
    outgoing = [own if rank in receivers else own[:0] for rank in range(wire.size)]
    sizes = [piece.numel() if wire.rank in receivers else 0 for piece in pieces]
    return wire.all_to_all(outgoing, incoming=sizes, seconds=seconds)


def reduce_scatter(
    wire: GlooWire,
    call: CollectiveCall,
    inputs: Sequence[torch.Tensor],
    *,
    op: ReduceOp,
    seconds: float,
) -> torch.Tensor:
    """The reduced bytes of this rank's piece."""
    agree(wire, call, seconds=seconds)
    check_reducible(inputs[0].dtype, op)
    pieces = [flat_bytes(tensor) for tensor in inputs]
    return _reduce_pieces(wire, pieces, dtype=inputs[0].dtype, op=op, seconds=seconds)


def all_gather(
    wire: GlooWire, call: CollectiveCall, tensor: torch.Tensor, *, seconds: float
) -> list[torch.Tensor]:
    """Each rank's bytes."""
    agree(wire, call, seconds=seconds)
    return wire.all_gather(flat_bytes(tensor), seconds=seconds)


def move(
    wire: GlooWire,
    call: CollectiveCall,
    outgoing: Mapping[int, torch.Tensor],
    *,
    incoming: Mapping[int, int],
    seconds: float,
) -> list[torch.Tensor]:
    """The bytes of those ranks that have some for this one."""
    agree(wire, call, seconds=seconds)
    return _swap(wire, outgoing, incoming=incoming, seconds=seconds)


def gather_variable(
    wire: GlooWire,
    call: CollectiveCall,
    tensor: torch.Tensor,
    *,
    receivers: Collection[int],
    seconds: float,
) -> list[tuple[TensorSpec, torch.Tensor]]:
    """Each rank's spec and bytes, on receivers."""
    specs = [told.called_with for told in agree(wire, call, seconds=seconds)]
    known = [spec for spec in specs if spec is not None]
    is_receiver = wire.rank in receivers
    sizes = {rank: num_bytes(spec) for rank, spec in enumerate(known)}
    chunks = _swap(
        wire,
        dict.fromkeys(receivers, flat_bytes(tensor)),
        incoming=sizes if is_receiver else {},
        seconds=seconds,
    )
    return list(zip(known, chunks, strict=True)) if is_receiver else []


def all_to_all(
    wire: GlooWire,
    call: CollectiveCall,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    *,
    seconds: float,
) -> list[torch.Tensor]:
    """The bytes of each rank's tensor for this one; all ranks compare all shapes first."""
    agree(wire, call, seconds=seconds)
    shapes = [tuple(tensor.shape) for tensor in (*inputs, *outputs)]
    layouts = _all_layouts(wire, shapes, seconds=seconds)
    check_layouts(call, layouts, dtype=inputs[0].dtype)
    return wire.all_to_all(
        [flat_bytes(tensor) for tensor in inputs],
        incoming=[output.numel() * output.element_size() for output in outputs],
        seconds=seconds,
    )


def _all_layouts(
    wire: GlooWire, shapes: Sequence[Shape], *, seconds: float
) -> list[Sequence[Shape]]:
    packed = pack(shapes, torch.empty(0, dtype=torch.uint8))
    size = torch.tensor([packed.numel()]).view(torch.uint8)
    sizes = [int(told.view(torch.int64)) for told in wire.all_gather(size, seconds=seconds)]
    told = wire.all_to_all([packed] * wire.size, incoming=sizes, seconds=seconds)
    return [unpack(flat)[0] for flat in told]


def _reduce_pieces(
    wire: GlooWire,
    pieces: Sequence[torch.Tensor],
    *,
    dtype: torch.dtype,
    op: ReduceOp,
    seconds: float,
) -> torch.Tensor:
    """This rank's piece of all ranks, reduced in rank order."""
    sizes = [pieces[wire.rank].numel()] * wire.size
    parts = wire.all_to_all(pieces, incoming=sizes, seconds=seconds)
    # Clones: the views of one buffer need not be aligned for the dtype.
    return flat_bytes(reduce_in_order([part.clone().view(dtype) for part in parts], op=op))


def _swap(
    wire: GlooWire,
    outgoing: Mapping[int, torch.Tensor],
    *,
    incoming: Mapping[int, int],
    seconds: float,
) -> list[torch.Tensor]:
    nothing = torch.empty(0, dtype=torch.uint8)
    return wire.all_to_all(
        [outgoing.get(rank, nothing) for rank in range(wire.size)],
        incoming=[incoming.get(rank, 0) for rank in range(wire.size)],
        seconds=seconds,
    )
