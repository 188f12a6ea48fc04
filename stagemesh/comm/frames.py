"""Group messages to and from the frames of the Exchange stream, and reduce ops and specs too."""

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import TypeAlias

import grpc
import grpc.aio
import torch
from google.protobuf.message import DecodeError

from stagemesh.comm.echo import SentMessage
from stagemesh.comm.reduce import ReduceOp
from stagemesh.comm.transport import Envelope, TensorSpec
from stagemesh.errors import GroupAborted, ProtocolError
from stagemesh.rpc.codec import (
    Chunk,
    TensorAssembler,
    bytes_of,
    check_header,
    check_sendable,
    header_for,
    stream_chunks,
)
from stagemesh.rpc.v1 import comm_pb2, comm_pb2_grpc, tensor_pb2

# A string, as the class takes no parameters at run time.
ExchangeCall: TypeAlias = "grpc.aio.StreamStreamCall[bytes, comm_pb2.ExchangeAck]"

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

_SERVICE_NAME = comm_pb2.DESCRIPTOR.services_by_name["CommService"].full_name

# One byte each: field 3, length-delimited. ExchangeFrame.part and TensorPart.data.
_PART_TAG = _DATA_TAG = b"\x1a"
# Field 2: ExchangeFrame.envelope.
_ENVELOPE_TAG = b"\x12"
_WIRE_VARINT, _WIRE_BYTES = 0, 2

# Below it the generated parser is faster than walking the fields.
_BULK_BYTES = 32 * 1024

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


def envelope_to_bytes(envelope: Envelope) -> bytes:
    """An envelope for a carrier that knows no messages of ours."""
    return envelope_to_proto(envelope).SerializeToString()


def envelope_from_bytes(data: bytes) -> Envelope:
    """An envelope out of bytes, checked.

    Raises:
        ProtocolError: they are none, or a field is out of range.
    """
    try:
        return envelope_from_proto(comm_pb2.Envelope.FromString(data))
    except DecodeError as error:
        raise ProtocolError(f"{len(data)} bytes are no envelope: {error}") from error


def abort_frame(cause: str) -> bytes:
    """The frame that tells a peer of an abort."""
    envelope = comm_pb2.Envelope(
        operation="abort", abort_cause=cause[:MAX_CAUSE_CHARS] or "no cause was given"
    )
    return comm_pb2.ExchangeFrame(envelope=envelope).SerializeToString()


@dataclass(frozen=True, slots=True)
class BulkFrame:
    """An ExchangeFrame whose tensor bytes were left where they arrived."""

    head: comm_pb2.ExchangeFrame
    """The frame without its data."""
    data: memoryview

    def HasField(self, name: str) -> bool:  # noqa: N802
        """As a generated message has it."""
        return self.head.HasField(name)  # type: ignore[arg-type]

    @property
    def hello(self) -> comm_pb2.ExchangeHello:
        """As a generated message has it."""
        return self.head.hello

    @property
    def envelope(self) -> comm_pb2.Envelope:
        """As a generated message has it."""
        return self.head.envelope


Frame: TypeAlias = comm_pb2.ExchangeFrame | BulkFrame


def encode_frame(envelope: Envelope | None, chunk: Chunk) -> bytes:
    """The bytes of an ExchangeFrame, with one copy of the tensor's.

    The generated class would copy them four times: into `data`, into the part, into the frame, and
    into the result. The bytes are the same (a test compares them).
    """
    head = b"" if envelope is None else _envelope_field(envelope)
    part = tensor_pb2.TensorPart(header=chunk.header, offset=chunk.offset).SerializeToString()
    return _join_frame(head, part, chunk.data)


def encode_message(envelope: Envelope, tensor: torch.Tensor) -> tuple[bytes, SentMessage | None]:
    """The one frame of a small message. As `encode_frame` of its whole chunk, in half the time.

    Returns:
        The frame, and how to know a message that equals it up to the data, if it is of bytes.

    Raises:
        ConfigError: the tensor cannot travel.
    """
    check_sendable(tensor)
    part = _header_field(tensor.dtype, tuple(tensor.shape))
    frame = _join_frame(_envelope_field(envelope), part, bytes_of(tensor))
    num_bytes = tensor.numel()
    # Other types are checked, or shaped, as they are read.
    if tensor.dtype != torch.uint8 or tensor.ndim != 1 or not num_bytes:
        return frame, None
    return frame, SentMessage(frame[: len(frame) - num_bytes], num_bytes, envelope)


def _join_frame(head: bytes, part: bytes, data: memoryview | bytes) -> bytes:
    """A frame of an envelope's field, a part without its data, and the data."""
    if not len(data):
        return b"".join((head, _PART_TAG, _varint(len(part)), part))
    length = _varint(len(data))
    part_length = _varint(len(part) + len(_DATA_TAG) + len(length) + len(data))
    return b"".join((head, _PART_TAG, part_length, part, _DATA_TAG, length, data))


def _envelope_field(envelope: Envelope) -> bytes:
    """ExchangeFrame.envelope, in the order of its fields' numbers."""
    operation, rest = _constant_fields(envelope.operation, envelope.reduce_op, envelope.called_with)
    tag = b"\x08" + _varint(envelope.tag) if envelope.tag else b""
    sequence = b"\x18" + _varint(envelope.sequence) if envelope.sequence else b""
    length = _varint(len(tag) + len(operation) + len(sequence) + len(rest))
    return b"".join((_ENVELOPE_TAG, length, tag, operation, sequence, rest))


# What differs between two calls of an operation is its tag and its sequence number.
@lru_cache(maxsize=1024)
def _constant_fields(
    operation: str, reduce_op: ReduceOp | None, called_with: TensorSpec | None
) -> tuple[bytes, bytes]:
    """The fields between tag and sequence, and those after it."""
    spec = Envelope(tag=0, operation="", reduce_op=reduce_op, called_with=called_with)
    return (
        comm_pb2.Envelope(operation=operation).SerializeToString(),
        envelope_to_proto(spec).SerializeToString(),
    )


@lru_cache(maxsize=1024)
def _header_field(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """TensorPart.header."""
    return tensor_pb2.TensorPart(header=header_for(dtype, shape)).SerializeToString()


def decode_frame(message: bytes) -> Frame:
    """A frame out of its bytes; the data of a large one is not copied.

    Only frames with part and data last, which is how serializers order them, can be left in place;
    any other is parsed whole.

    Raises:
        ProtocolError: it is no frame.
    """
    try:
        return _decode_frame(message)
    except DecodeError as error:
        raise ProtocolError(f"{len(message)} bytes are no frame: {error}") from error


def _decode_frame(message: bytes) -> Frame:
    if len(message) >= _BULK_BYTES:
        part = _last_field(message, 0, _PART_TAG[0])
        data = part and _last_field(message, part[1], _DATA_TAG[0])
        if part and data:
            head = comm_pb2.ExchangeFrame.FromString(message[: part[0]])
            # Merging what stands before the data leaves a part without it.
            head.part.MergeFromString(message[part[1] : data[0]])
            return BulkFrame(head, memoryview(message)[data[1] :])
    return comm_pb2.ExchangeFrame.FromString(message)


def _varint(value: int) -> bytes:
    result = bytearray()
    while value > 0x7F:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    result.append(value)
    return bytes(result)


def _read_varint(message: bytes, at: int) -> tuple[int, int] | None:
    """Value and end of a varint; None when it is cut off or too long."""
    value = shift = 0
    while at < len(message) and shift < 64:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
    return None


def _last_field(message: bytes, at: int, tag: int) -> tuple[int, int] | None:
    """Where the field with a one-byte tag and its content begin, if it reaches to the end.

    Fields before it are stepped over; None when something else is found.
    """
    while at < len(message):
        found = message[at]
        number = _read_varint(message, at + 1)
        if number is None or found & 7 not in (_WIRE_VARINT, _WIRE_BYTES) or found > 0x7F:
            return None
        value, end = number
        if found == tag:
            return (at, end) if end + value == len(message) else None
        at = end + value if found & 7 == _WIRE_BYTES else end
    return None


def add_comm_service(servicer: comm_pb2_grpc.CommServiceServicer, server: grpc.aio.Server) -> None:
    """Serve CommService, with the frames of Exchange as the bytes that they came as."""
    exchange: grpc.RpcMethodHandler[bytes, comm_pb2.ExchangeAck] = (
        grpc.stream_stream_rpc_method_handler(
            servicer.Exchange,
            request_deserializer=None,
            response_serializer=comm_pb2.ExchangeAck.SerializeToString,
        )
    )
    own = {"Exchange": exchange}
    # Of generic handlers the first that knows a method takes it, of registered ones the last. Those
    # go before the generic ones where grpc.aio looks at them, which it did not always.
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE_NAME, own),))
    comm_pb2_grpc.add_CommServiceServicer_to_server(servicer, server)
    server.add_registered_method_handlers(_SERVICE_NAME, own)


def open_exchange(channel: grpc.aio.Channel) -> "ExchangeCall":
    """Call Exchange with frames that are bytes already."""
    return channel.stream_stream(
        f"/{_SERVICE_NAME}/Exchange",
        request_serializer=None,
        response_deserializer=comm_pb2.ExchangeAck.FromString,
    )()


async def frames_of(
    envelope: Envelope, tensor: torch.Tensor, *, chunk_bytes: int
) -> AsyncGenerator[bytes, None]:
    """The frames of one message; the first has the envelope."""
    head: Envelope | None = envelope
    async for chunk in stream_chunks(tensor, chunk_bytes=chunk_bytes):
        yield encode_frame(head, chunk)
        head = None


def _chunk_of(frame: Frame) -> Chunk:
    part = frame.head.part if isinstance(frame, BulkFrame) else frame.part
    return Chunk(
        header=part.header if part.HasField("header") else None,
        offset=part.offset,
        data=frame.data if isinstance(frame, BulkFrame) else part.data,
    )


async def messages_of(
    frames: AsyncIterable[bytes],
    *,
    max_bytes: int,
    sent: Callable[[], SentMessage | None] = lambda: None,
) -> AsyncIterator[tuple[Envelope, torch.Tensor]]:
    """The messages in a stream of frames.

    Args:
        frames: as bytes.
        max_bytes: limit of a tensor.
        sent: what this rank sent last to whom the frames are from.

    Raises:
        ProtocolError: frames are out of order or a tensor is wrong.
        CapacityExceeded: a tensor is larger than `max_bytes`.
        GroupAborted: the peer says so; with its cause.
    """
    assembler = TensorAssembler(max_bytes=max_bytes)
    envelope: Envelope | None = None
    async for data in frames:
        if envelope is None:
            last = sent()
            echoed = None if last is None else last.data_of(data)
            if last is not None and echoed is not None:
                yield last.envelope, echoed
                continue
        frame = decode_frame(data)
        if frame.HasField("envelope"):
            if frame.envelope.abort_cause:
                raise GroupAborted(frame.envelope.abort_cause[:MAX_CAUSE_CHARS])
            if envelope is not None:
                raise ProtocolError("an envelope came before the tensor of the last one was whole")
            envelope = envelope_from_proto(frame.envelope)
        if envelope is None:
            raise ProtocolError("a tensor came without an envelope")
        tensor = assembler.add_chunk(_chunk_of(frame))
        if tensor is not None:
            yield envelope, tensor
            envelope = None
    assembler.finish()
