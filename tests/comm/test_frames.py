"""The frames written and read by hand, against the generated classes."""

import pytest
import torch

from stagemesh.comm.frames import (
    BulkFrame,
    decode_frame,
    encode_frame,
    encode_message,
    envelope_to_proto,
    messages_of,
)
from stagemesh.comm.reduce import ReduceOp
from stagemesh.comm.transport import Envelope, TensorSpec
from stagemesh.errors import ProtocolError
from stagemesh.rpc.codec import Chunk, header_of, whole_chunk
from stagemesh.rpc.v1 import comm_pb2, tensor_pb2

ENVELOPE = Envelope(
    tag=2**63 + 5,
    operation="all_reduce",
    sequence=300,
    reduce_op=ReduceOp.SUM,
    called_with=TensorSpec(dtype=torch.bfloat16, shape=(3, 0, 2**40)),
)


def _generated(envelope: Envelope | None, chunk: Chunk) -> comm_pb2.ExchangeFrame:
    return comm_pb2.ExchangeFrame(
        envelope=None if envelope is None else envelope_to_proto(envelope), part=chunk.to_part()
    )


@pytest.mark.parametrize("num_bytes", [0, 1, 127, 128, 16383, 16384, 2**21, 2**21 + 1])
@pytest.mark.parametrize("envelope", [ENVELOPE, None], ids=["first", "later"])
def test_a_frame_is_the_bytes_that_the_generated_class_makes(envelope, num_bytes):
    tensor = torch.arange(num_bytes, dtype=torch.int64).to(torch.uint8)
    chunk = whole_chunk(tensor)
    if envelope is None:
        chunk = Chunk(header=None, offset=2**35 + num_bytes, data=chunk.data)
    expected = _generated(envelope, chunk)
    message = encode_frame(envelope, chunk)
    assert message == expected.SerializeToString()
    frame = decode_frame(message)
    # Control: without it the large ones would only show that the generated parser works.
    assert isinstance(frame, BulkFrame) == (num_bytes >= 2**21)
    if isinstance(frame, BulkFrame):
        assert frame.HasField("envelope") == (envelope is not None)
        assert frame.envelope == expected.envelope
        assert not frame.head.part.data
        assert frame.data == expected.part.data
        frame.head.part.data = bytes(frame.data)
        assert frame.head == expected
    else:
        assert frame == expected


@pytest.mark.parametrize(
    "envelope",
    [ENVELOPE, Envelope(tag=0, operation="send"), Envelope(tag=7, operation="b", sequence=300)],
    ids=["all fields", "fewest", "no spec"],
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bool], ids=str)
def test_a_small_message_is_the_bytes_that_the_generated_class_makes(envelope, shape, dtype):
    tensor = torch.ones(shape, dtype=dtype)
    expected = _generated(envelope, whole_chunk(tensor))
    frame, sent = encode_message(envelope, tensor)
    assert frame == expected.SerializeToString()
    is_bytes = dtype == torch.uint8 and len(shape) == 1 and shape[0] > 0
    assert (sent is not None) is is_bytes
    if sent is not None:
        assert torch.equal(sent.data_of(frame), tensor)


def test_fields_in_another_order_are_read_all_the_same():
    data = bytes(range(256)) * 400
    head = comm_pb2.ExchangeFrame(envelope=comm_pb2.Envelope(tag=3)).SerializeToString()
    part = comm_pb2.ExchangeFrame(part=tensor_pb2.TensorPart(offset=9, data=data))
    frame = decode_frame(part.SerializeToString() + head)
    assert isinstance(frame, comm_pb2.ExchangeFrame)
    assert (frame.envelope.tag, frame.part.offset, frame.part.data) == (3, 9, data)


@pytest.mark.parametrize("cut", [1, 40_000, 99_990])
def test_a_frame_that_was_cut_is_refused(cut):
    chunk = whole_chunk(torch.zeros(100_000, dtype=torch.uint8))
    with pytest.raises(ProtocolError):
        decode_frame(encode_frame(ENVELOPE, chunk)[:-cut])


@pytest.mark.parametrize("noise", [b"\xff", b"\x1a\xff", b"\x00", b"\x1a\x05\x1a"], ids=repr)
def test_noise_is_refused(noise):
    with pytest.raises(ProtocolError):
        decode_frame(noise * 40_000)


async def test_a_hello_in_the_place_of_a_tensor_is_refused():
    header = header_of(torch.zeros(100_000, dtype=torch.uint8))
    chunk = Chunk(header=header, offset=0, data=bytes(100_000))
    frame = encode_frame(None, chunk)

    async def stream():
        yield frame

    with pytest.raises(ProtocolError, match="without an envelope"):
        [message async for message in messages_of(stream(), max_bytes=2**20)]


OTHER_CALLS = [
    Envelope(tag=8, operation="b", sequence=300),
    Envelope(tag=7, operation="c", sequence=300),
    Envelope(tag=7, operation="b", sequence=301),
    Envelope(tag=7, operation="b", sequence=300, reduce_op=ReduceOp.MAX),
    Envelope(
        tag=7,
        operation="b",
        sequence=300,
        called_with=TensorSpec(dtype=torch.float32, shape=(1,)),
    ),
]


@pytest.mark.parametrize("num_bytes", [1, 127, 128, 70_000])
async def test_what_begins_as_the_own_message_is_known_without_parsing(num_bytes):
    """And what does not is parsed: to the same messages, whatever this rank has sent last."""
    call = Envelope(tag=7, operation="b", sequence=300)
    own = torch.zeros(num_bytes, dtype=torch.uint8)
    theirs = torch.arange(num_bytes).to(torch.uint8)
    _, sent = encode_message(call, own)
    assert sent is not None
    same, _ = encode_message(call, theirs)
    assert torch.equal(sent.data_of(same), theirs)
    others = [encode_message(other, theirs)[0] for other in OTHER_CALLS]
    longer, _ = encode_message(call, torch.zeros(num_bytes + 1, dtype=torch.uint8))
    flags, _ = encode_message(call, torch.ones(num_bytes, dtype=torch.bool))
    for frame in (*others, longer, flags, same[:-1], same + b"x"):
        assert sent.data_of(frame) is None

    async def stream():
        for frame in (same, *others, longer, flags, same):
            yield frame

    for last in (None, sent):
        messages = messages_of(stream(), max_bytes=2**20, sent=lambda last=last: last)
        envelopes = [(envelope, tensor.numel()) async for envelope, tensor in messages]
        plain = [(each, num_bytes) for each in OTHER_CALLS]
        assert envelopes == [
            (call, num_bytes),
            *plain,
            (call, num_bytes + 1),
            (call, num_bytes),
            (call, num_bytes),
        ]


async def test_a_known_beginning_inside_another_message_is_not_taken_for_one():
    """Between the frames of one tensor nothing is compared with what this rank has sent."""
    call = Envelope(tag=7, operation="b")
    data = torch.arange(100, dtype=torch.uint8)
    frame, sent = encode_message(call, data)
    header = header_of(torch.zeros(200, dtype=torch.uint8))
    first = encode_frame(call, Chunk(header=header, offset=0, data=bytes(100)))

    async def stream():
        yield first
        yield frame

    with pytest.raises(ProtocolError, match="an envelope came before"):
        [each async for each in messages_of(stream(), max_bytes=2**20, sent=lambda: sent)]
