"""The tensor codec alone: what goes in comes out, bit for bit, and what lies is refused."""

import gc
import time
import warnings

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stagemesh.errors import CapacityExceeded, ConfigError, ProtocolError
from stagemesh.rpc.codec import (
    DTYPES,
    TensorAssembler,
    decode_tensor,
    encode_parts,
    encode_tensor,
    header_of,
    stream_parts,
)
from stagemesh.rpc.v1 import tensor_pb2

ALL_DTYPES = list(DTYPES.values())
FLOAT32 = tensor_pb2.DTYPE_FLOAT32


@pytest.fixture(autouse=True)
def _no_complex32_warning():
    # Torch warns whenever a test itself allocates complex32.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ComplexHalf")
        yield


def _bits(tensor: torch.Tensor) -> bytes:
    return b"".join(
        element.clone().reshape(1).view(torch.uint8).numpy().tobytes()
        for element in tensor.reshape(-1)
    )


def _of_random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    numel = torch.Size(shape).numel()
    high = 2 if dtype == torch.bool else 256
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, high, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def _assemble(parts) -> torch.Tensor:
    assembler = TensorAssembler()
    results = [assembler.add(part) for part in parts]
    assembler.finish()
    assert all(result is None for result in results[:-1])
    return results[-1]


@st.composite
def views(draw):
    """A tensor of any dtype and rank, often a strided view into a larger one."""
    dtype = draw(st.sampled_from(ALL_DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    tensor = _of_random_bits(dtype, shape, draw(st.integers(0, 2**31)))
    if shape:
        tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
        steps = draw(st.lists(st.integers(1, 3), min_size=len(shape), max_size=len(shape)))
        starts = [draw(st.integers(0, max(0, size - 1))) for size in tensor.shape]
        spans = zip(starts, steps, strict=True)
        tensor = tensor[tuple(slice(start, None, step) for start, step in spans)]
    return tensor


@settings(max_examples=300, deadline=None)
@given(tensor=views(), chunk_bytes=st.sampled_from([1, 3, 8, 2**20]))
def test_every_dtype_shape_and_stride_round_trips_bit_for_bit(tensor, chunk_bytes):
    result = _assemble(encode_parts(tensor, chunk_bytes=chunk_bytes))
    assert result.dtype == tensor.dtype
    assert result.shape == tensor.shape
    assert _bits(result) == _bits(tensor)
    assert result.is_contiguous()


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_each_dtype_by_itself_and_a_flipped_bit_is_noticed(dtype):
    tensor = _of_random_bits(dtype, (3, 5), seed=1)
    part = encode_tensor(tensor)
    assert _bits(decode_tensor(part)) == _bits(tensor)
    flipped = tensor_pb2.TensorPart()
    flipped.CopyFrom(part)
    flipped.data = bytes([part.data[0] ^ 1]) + part.data[1:]
    assert _bits(decode_tensor(flipped)) != _bits(tensor)


def test_each_enum_value_but_unspecified_has_a_dtype():
    assert set(DTYPES) == set(tensor_pb2.DType.values()) - {tensor_pb2.DTYPE_UNSPECIFIED}
    assert len(set(DTYPES.values())) == len(DTYPES)


@pytest.mark.parametrize(
    "view",
    [torch.arange(2.0)[::2], torch.arange(4.0).as_strided((1, 1), (3, 2), 1), torch.empty(0)[::2]],
    ids=str,
)
def test_one_element_or_none_with_an_odd_stride(view):
    assert torch.equal(decode_tensor(encode_tensor(view)), view)


@pytest.mark.parametrize("shape", [(2, 0, 8), (0,)])
def test_empty_bfloat16(shape):
    result = decode_tensor(encode_tensor(torch.empty(shape, dtype=torch.bfloat16)))
    assert (result.dtype, result.shape, result.numel()) == (torch.bfloat16, shape, 0)


def test_bfloat16_keeps_its_bits_and_its_size():
    values = [1.0, -0.0, 3.140625, 1e38, float("inf"), float("-inf"), float("nan")]
    tensor = torch.tensor(values, dtype=torch.bfloat16)
    result = decode_tensor(encode_tensor(tensor))
    assert result.dtype == torch.bfloat16
    assert torch.equal(result.view(torch.int16), tensor.view(torch.int16))
    parts = list(encode_parts(torch.ones(1024, 1024, dtype=torch.bfloat16)))
    assert sum(len(part.data) for part in parts) == 2_097_152
    assert sum(part.ByteSize() for part in parts) <= 2_097_152 + 4096


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1, 70000, 2**53 + 1]),
        torch.tensor([True, False, True]),
        torch.tensor([1e6, 3.0, 3.0, 3.0]),
        torch.tensor(3.5),
        torch.tensor(7),
    ],
    ids=str,
)
def test_exact_values_stay_exact(tensor):
    result = decode_tensor(encode_tensor(tensor))
    assert (result.dtype, result.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(result, tensor)


def test_conjugate_and_negative_views_send_their_values():
    tensor = torch.randn(5, dtype=torch.complex64)
    for view in (tensor.conj(), tensor.conj().imag, tensor.conj()[::2]):
        assert torch.equal(decode_tensor(encode_tensor(view)), view)


def test_the_result_owns_its_memory_and_can_be_written():
    tensor = torch.ones(4)
    result = decode_tensor(encode_tensor(tensor))
    result.add_(1)
    tensor.zero_()
    assert result.tolist() == [2.0] * 4


def test_a_small_tensor_is_one_part_and_a_large_one_is_chunked():
    assert len(list(encode_parts(torch.zeros(2**18)))) == 1
    parts = list(encode_parts(torch.zeros(2**18 + 1)))
    assert [part.offset for part in parts] == [0, 2**20]
    assert [part.HasField("header") for part in parts] == [True, False]


@pytest.mark.parametrize("strided", [False, True])
async def test_the_async_encoder_makes_the_same_parts(strided):
    tensor = torch.randn(2**20 + 3, 2)
    tensor = tensor[:, 0] if strided else tensor
    streamed = [part async for part in stream_parts(tensor)]
    assert streamed == list(encode_parts(tensor))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8), "quint8"),
        (lambda: torch.ones(2).to_sparse(), "sparse_coo"),
        (lambda: torch.ones(2, device="meta"), "meta"),
        (lambda: torch.empty(2, dtype=torch.uint4), "uint4"),
    ],
    ids=["quint8", "sparse_coo", "meta", "uint4"],
)
@pytest.mark.filterwarnings("ignore:.*quantize")
def test_what_cannot_travel_is_refused_by_name(make, name):
    with pytest.raises(ConfigError, match=name):
        header_of(make())


def _part(shape, data: bytes, *, dtype=FLOAT32, num_bytes=None, offset=0) -> tensor_pb2.TensorPart:
    num_bytes = len(data) if num_bytes is None else num_bytes
    header = tensor_pb2.TensorHeader(dtype=dtype, shape=shape, num_bytes=num_bytes)
    return tensor_pb2.TensorPart(header=header, data=data, offset=offset)


@pytest.mark.parametrize("dtype", [0, 23, 999, -1])
def test_an_unknown_dtype_is_named(dtype):
    with pytest.raises(ProtocolError, match=f"unknown dtype {dtype};"):
        decode_tensor(_part([2, 2], bytes(16), dtype=dtype))
    assert decode_tensor(_part([2, 2], bytes(16))).shape == (2, 2)


@pytest.mark.parametrize("is_honest", [True, False], ids=["honest header", "lying header"])
@pytest.mark.parametrize("length", [60, 63, 0, 68])
def test_a_wrong_length_gives_expected_and_actual(length, is_honest):
    part = _part([4, 4], bytes(length), num_bytes=length if is_honest else 64)
    with pytest.raises(ProtocolError) as caught:
        decode_tensor(part)
    assert "64" in str(caught.value)
    assert str(length) in str(caught.value)
    assert decode_tensor(_part([4, 4], bytes(64))).shape == (4, 4)


@pytest.mark.parametrize(
    ("shape", "num_bytes"),
    [
        ([2**32, 2**32], 0),
        ([2**62 + 1, 4], 16),
        ([2**62 + 1, 4], 2**64 - 1),
        ([1] * 65, 4),
        ([-1], 4),
        ([-2, -2], 16),
        ([0, 2**62, 2**62], 0),
        ([2**40], 2**42),
    ],
    ids=str,
)
def test_a_hostile_shape_is_refused_fast_and_takes_no_memory(shape, num_bytes):
    gc.collect()
    before = psutil.Process().memory_info().rss
    start = time.monotonic()
    with pytest.raises((ProtocolError, CapacityExceeded)):
        decode_tensor(_part(shape, bytes(min(num_bytes, 16)), num_bytes=num_bytes))
    assert time.monotonic() - start < 0.1
    assert psutil.Process().memory_info().rss - before < 16 * 2**20


def test_rank_64_is_accepted_and_zero_dims_are_fine():
    assert decode_tensor(_part([1] * 64, bytes(4))).dim() == 64
    assert decode_tensor(_part([3, 0, 5], b"")).shape == (3, 0, 5)


def test_a_tensor_over_the_bound_names_limit_and_size():
    with pytest.raises(CapacityExceeded, match=r"has 1024 bytes; the limit is 1023"):
        TensorAssembler(max_bytes=1023).add(_part([256], bytes(1024)))
    assert TensorAssembler(max_bytes=1024).add(_part([256], bytes(1024))) is not None


@pytest.mark.parametrize("value", [2, 255])
def test_a_bool_byte_other_than_0_and_1_is_refused(value):
    part = _part([3], bytes([0, 1, value]), dtype=tensor_pb2.DTYPE_BOOL)
    with pytest.raises(ProtocolError, match="bool"):
        decode_tensor(part)


def _chunks() -> list[tensor_pb2.TensorPart]:
    return list(encode_parts(torch.arange(6.0), chunk_bytes=8))


BROKEN_STREAMS = {
    "no header": lambda parts: parts[1:],
    "chunk missing": lambda parts: [parts[0], parts[2]],
    "chunk twice": lambda parts: [parts[0], parts[1], parts[1]],
    "order": lambda parts: [parts[0], parts[2], parts[1]],
    "header twice": lambda parts: [parts[0], parts[0]],
    "ends early": lambda parts: parts[:2],
    "empty chunk": lambda parts: [parts[0], tensor_pb2.TensorPart(offset=8)],
    "too much": lambda parts: [parts[0], tensor_pb2.TensorPart(offset=8, data=bytes(17))],
    "first not at 0": lambda parts: [_part([2], bytes(4), num_bytes=8, offset=4)],
}


@pytest.mark.parametrize("name", BROKEN_STREAMS)
def test_a_broken_stream_is_refused_and_the_assembler_is_clean_after_it(name):
    assembler = TensorAssembler()

    def feed() -> None:
        for part in BROKEN_STREAMS[name](_chunks()):
            assembler.add(part)
        assembler.finish()

    with pytest.raises(ProtocolError):
        feed()
    results = [assembler.add(part) for part in _chunks()]
    assert torch.equal(results[-1], torch.arange(6.0))


def test_tensors_follow_each_other_in_one_assembler():
    assembler = TensorAssembler()
    for number in range(3):
        for part in encode_parts(torch.full((5,), float(number)), chunk_bytes=8):
            result = assembler.add(part)
        assert result.tolist() == [float(number)] * 5
