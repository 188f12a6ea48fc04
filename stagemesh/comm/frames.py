"""Group messages to and from the frames of the Exchange stream, and reduce ops and specs too."""

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Mapping
from types import MappingProxyType

import torch

from stagemesh.comm.reduce import ReduceOp
from stagemesh.comm.transport import Envelope, TensorSpec
from stagemesh.errors import GroupAborted, ProtocolError
from stagemesh.rpc.codec import TensorAssembler, check_header, header_for, stream_parts
from stagemesh.rpc.v1 import comm_pb2, tensor_pb2

_REDUCE_OPS: Mapping["comm_pb2.ReduceOp.ValueType", ReduceOp] = MappingProxyType(
    {
        comm_pb2.REDUCE_OP_SUM: ReduceOp.SUM,
        comm_pb2.REDUCE_OP_AVG: ReduceOp.AVG,
        comm_pb2.REDUCE_OP_MIN: ReduceOp.MIN,
        comm_pb2.REDUCE_OP_MAX: ReduceOp.MAX,
        comm_pb2.REDUCE_OP_PRODUCT: ReduceOp.PRODUCT,
    }
)
_WIRE_REDUCE_OPS = MappingProxyType({op: number for number, op in _REDUCE_OPS.items()})

MAX_OPERATION_CHARS = 100
MAX_CAUSE_CHARS = 2000


def reduce_op_to_proto(op: ReduceOp) -> "comm_pb2.ReduceOp.ValueType":
    """A reduce op as its wire number."""
    return _WIRE_REDUCE_OPS[op]


def reduce_op_from_proto(number: "comm_pb2.ReduceOp.ValueType") -> ReduceOp:
    """A reduce op out of its wire number.

    Raises:
        ProtocolError: it is none.
    """
    op = _REDUCE_OPS.get(number)
    if op is None:
        raise ProtocolError(f"unknown reduce op {number}; known are 1 to {max(_REDUCE_OPS)}")
    return op


def spec_from_header(header: tensor_pb2.TensorHeader) -> TensorSpec:
    """Dtype and shape out of a header, checked."""
    # No memory is taken for it, so any size that can exist is fine.
    dtype, shape = check_header(header, max_bytes=2**63)
    return TensorSpec(dtype=dtype, shape=shape)


def envelope_to_proto(envelope: Envelope) -> comm_pb2.Envelope:
    """An envelope as a message."""
    spec = envelope.called_with
    op = envelope.reduce_op
    return comm_pb2.Envelope(
        tag=envelope.tag,
        operation=envelope.operation,
        sequence=envelope.sequence,
        reduce_op=comm_pb2.REDUCE_OP_UNSPECIFIED if op is None else reduce_op_to_proto(op),
        called_with=None if spec is None else header_for(spec.dtype, spec.shape),
    )


def envelope_from_proto(message: comm_pb2.Envelope) -> Envelope:
    """An envelope out of a message, checked.

    Raises:
        ProtocolError: a field is out of range.
    """
    if len(message.operation) > MAX_OPERATION_CHARS:
        raise ProtocolError(f"operation of an envelope has {len(message.operation)} characters")
    has_op = message.reduce_op != comm_pb2.REDUCE_OP_UNSPECIFIED
    has_spec = message.HasField("called_with")
    return Envelope(
        tag=message.tag,
        operation=message.operation,
        sequence=message.sequence,
        reduce_op=reduce_op_from_proto(message.reduce_op) if has_op else None,
        called_with=spec_from_header(message.called_with) if has_spec else None,
    )


def abort_frame(cause: str) -> comm_pb2.ExchangeFrame:
    """The frame that tells a peer of an abort."""
    return comm_pb2.ExchangeFrame(
        envelope=comm_pb2.Envelope(
            operation="abort", abort_cause=cause[:MAX_CAUSE_CHARS] or "no cause was given"
        )
    )


async def frames_of(
    envelope: Envelope, tensor: torch.Tensor, *, chunk_bytes: int
) -> AsyncGenerator[comm_pb2.ExchangeFrame, None]:
    """The frames of one message; the first has the envelope."""
    head: comm_pb2.Envelope | None = envelope_to_proto(envelope)
    async for part in stream_parts(tensor, chunk_bytes=chunk_bytes):
        yield comm_pb2.ExchangeFrame(envelope=head, part=part)
        head = None


async def messages_of(
    frames: AsyncIterable[comm_pb2.ExchangeFrame], *, max_bytes: int
) -> AsyncIterator[tuple[Envelope, torch.Tensor]]:
    """The messages in a stream of frames.

    Raises:
        ProtocolError: frames are out of order or a tensor is wrong.
        CapacityExceeded: a tensor is larger than `max_bytes`.
        GroupAborted: the peer says so; with its cause.
    """
    assembler = TensorAssembler(max_bytes=max_bytes)
    envelope: Envelope | None = None
    async for frame in frames:
        if frame.HasField("envelope"):
            if frame.envelope.abort_cause:
                raise GroupAborted(frame.envelope.abort_cause[:MAX_CAUSE_CHARS])
            if envelope is not None:
                raise ProtocolError("an envelope came before the tensor of the last one was whole")
            envelope = envelope_from_proto(frame.envelope)
        if envelope is None:
            raise ProtocolError("a tensor came without an envelope")
        tensor = assembler.add(frame.part)
        if tensor is not None:
            yield envelope, tensor
            envelope = None
    assembler.finish()
