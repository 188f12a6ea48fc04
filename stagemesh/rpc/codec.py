"""Tensors to and from the wire, bit for bit. The only place where torch meets tensor messages.

A tensor becomes a header and its raw bytes in chunks; nothing is interpreted, so NaN payloads and
negative zeros survive. What arrives is checked before memory is taken: a header that lies, a chunk
out of order or a length that does not fit is a ProtocolError, a tensor over the bound is a
CapacityExceeded, and neither costs more memory than the message itself.
"""

import asyncio
import math
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import numpy as np
import torch

from stagemesh.errors import CapacityExceeded, ConfigError, ProtocolError
from stagemesh.rpc.v1 import tensor_pb2

DEFAULT_CHUNK_BYTES = 2**20
"""Bytes of one chunk: large enough for speed, small enough that the loop stays free between two."""

DEFAULT_MAX_TENSOR_BYTES = 4 * 2**30
"""Bound of one received tensor."""

MAX_RANK = 64
"""Most dims of a tensor; torch itself stops at 64."""

_INT64_MAX = 2**63 - 1

# Below it packing takes less time than handing it to a thread.
_OFF_LOOP_BYTES = 4 * 2**20

DTYPES: Mapping["tensor_pb2.DType.ValueType", torch.dtype] = MappingProxyType(
    {
        tensor_pb2.DTYPE_FLOAT32: torch.float32,
        tensor_pb2.DTYPE_FLOAT64: torch.float64,
        tensor_pb2.DTYPE_FLOAT16: torch.float16,
        tensor_pb2.DTYPE_BFLOAT16: torch.bfloat16,
        tensor_pb2.DTYPE_FLOAT8_E4M3FN: torch.float8_e4m3fn,
        tensor_pb2.DTYPE_FLOAT8_E4M3FNUZ: torch.float8_e4m3fnuz,
        tensor_pb2.DTYPE_FLOAT8_E5M2: torch.float8_e5m2,
        tensor_pb2.DTYPE_FLOAT8_E5M2FNUZ: torch.float8_e5m2fnuz,
        tensor_pb2.DTYPE_FLOAT8_E8M0FNU: torch.float8_e8m0fnu,
        tensor_pb2.DTYPE_FLOAT4_E2M1FN_X2: torch.float4_e2m1fn_x2,
        tensor_pb2.DTYPE_UINT8: torch.uint8,
        tensor_pb2.DTYPE_UINT16: torch.uint16,
        tensor_pb2.DTYPE_UINT32: torch.uint32,
        tensor_pb2.DTYPE_UINT64: torch.uint64,
        tensor_pb2.DTYPE_INT8: torch.int8,
        tensor_pb2.DTYPE_INT16: torch.int16,
        tensor_pb2.DTYPE_INT32: torch.int32,
        tensor_pb2.DTYPE_INT64: torch.int64,
        tensor_pb2.DTYPE_BOOL: torch.bool,
        tensor_pb2.DTYPE_COMPLEX32: torch.complex32,
        tensor_pb2.DTYPE_COMPLEX64: torch.complex64,
        tensor_pb2.DTYPE_COMPLEX128: torch.complex128,
    }
)
"""Each wire dtype but UNSPECIFIED."""

_WIRE_DTYPES: Mapping[torch.dtype, "tensor_pb2.DType.ValueType"] = MappingProxyType(
    {dtype: number for number, dtype in DTYPES.items()}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A TensorPart whose bytes are still where they were: nothing is copied yet."""

    header: tensor_pb2.TensorHeader | None
    """Set on the first chunk of a tensor."""
    offset: int
    data: memoryview | bytes

    def to_part(self) -> tensor_pb2.TensorPart:
        """As a message, with a copy of the bytes."""
        return tensor_pb2.TensorPart(header=self.header, offset=self.offset, data=bytes(self.data))


def _check_platform() -> None:
    if sys.byteorder != "little":
        raise ImportError("stagemesh sends tensors as little-endian bytes; this machine is not")
    missing = set(tensor_pb2.DType.values()) - {tensor_pb2.DTYPE_UNSPECIFIED} - set(DTYPES)
    if missing:
        names = ", ".join(tensor_pb2.DType.Name(number) for number in sorted(missing))
        raise ImportError(f"wire dtypes without a torch dtype: {names}")


_check_platform()


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype as users write it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def check_sendable(tensor: torch.Tensor) -> None:
    """Refuse a tensor that cannot travel.

    Raises:
        ConfigError: a quantised or sub-byte dtype, sparse, or meta.
    """
    if tensor.layout != torch.strided or tensor.is_meta:
        kind = "meta" if tensor.is_meta else str(tensor.layout).removeprefix("torch.")
        raise ConfigError(f"a {kind} tensor cannot be sent; make it dense first")
    if tensor.dtype not in _WIRE_DTYPES:
        allowed = ", ".join(dtype_name(known) for known in DTYPES.values())
        raise ConfigError(f"dtype {dtype_name(tensor.dtype)} cannot be sent; use one of {allowed}")


def header_of(tensor: torch.Tensor) -> tensor_pb2.TensorHeader:
    """The header of a tensor.

    Raises:
        ConfigError: the tensor cannot travel (see `check_sendable`).
    """
    check_sendable(tensor)
    return header_for(tensor.dtype, tuple(tensor.shape))


def header_for(dtype: torch.dtype, shape: tuple[int, ...]) -> tensor_pb2.TensorHeader:
    """The header of a tensor with that dtype, one of DTYPES, and shape."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return tensor_pb2.TensorHeader(dtype=_WIRE_DTYPES[dtype], shape=shape, num_bytes=num_bytes)


def check_header(
    header: tensor_pb2.TensorHeader, *, max_bytes: int
) -> tuple[torch.dtype, tuple[int, ...]]:
    """Dtype and shape of a header from the wire, all of it checked.

    Raises:
        ProtocolError: unknown dtype, a rank or dim out of range, or a length that does not fit.
        CapacityExceeded: the tensor is larger than `max_bytes`.
    """
    shape = tuple(header.shape)
    return _check_header(header.dtype, shape, num_bytes=header.num_bytes, max_bytes=max_bytes)


# The same few headers come again and again. Errors are not remembered.
@lru_cache(maxsize=1024)
def _check_header(
    number: "tensor_pb2.DType.ValueType", shape: tuple[int, ...], *, num_bytes: int, max_bytes: int
) -> tuple[torch.dtype, tuple[int, ...]]:
    dtype = DTYPES.get(number)
    if dtype is None:
        raise ProtocolError(
            f"tensor has unknown dtype {number}; known are 1 to {max(DTYPES)} "
            "(enum DType of tensor.proto)"
        )
    if len(shape) > MAX_RANK:
        raise ProtocolError(f"tensor has {len(shape)} dims; at most {MAX_RANK} are allowed")
    if any(dim < 0 for dim in shape):
        raise ProtocolError(f"tensor shape {list(shape)} has a negative dim")
    # Python integers do not wrap. The product without zeros counts too: torch derives strides.
    if math.prod(dim for dim in shape if dim) * dtype.itemsize > _INT64_MAX:
        raise ProtocolError(f"tensor shape {list(shape)} is too large to address")
    expected = math.prod(shape) * dtype.itemsize
    if num_bytes != expected:
        raise ProtocolError(
            f"tensor of {dtype_name(dtype)} {list(shape)}: expected {expected} bytes, "
            f"the header says {num_bytes}"
        )
    if expected > max_bytes:
        raise CapacityExceeded(
            f"tensor of {dtype_name(dtype)} {list(shape)} has {expected} bytes; "
            f"the limit is {max_bytes}"
        )
    return dtype, shape


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The C-contiguous bytes of a tensor; a view of its memory where that is possible."""
    if tensor.dtype == torch.uint8 and tensor.is_cpu and tensor.dim() == 1:
        # What collectives send; the general way takes four times as long.
        return _memory(tensor.contiguous())
    dense = tensor.detach()
    if not dense.is_cpu or dense.is_complex() or dense.is_neg():
        dense = dense.resolve_conj().resolve_neg().cpu()
    if dense.element_size() == 1:
        # Raw before the copy to contiguous: not each 1-byte dtype has all kernels.
        dense = dense.view(torch.uint8)
    elif dense.is_complex():
        # Same bytes; torch warns whenever it allocates complex32.
        dense = torch.view_as_real(dense)
    dense = dense.contiguous()
    # Not reshape: with one element or none any stride counts as contiguous, and then no byte view
    # exists.
    flat = dense.as_strided((dense.numel(),), (1,))
    return _memory(flat.view(torch.uint8))


def _memory(raw: torch.Tensor) -> memoryview:
    """The memory of a flat uint8 tensor."""
    return raw.numpy().data


def _chunks(header: tensor_pb2.TensorHeader, raw: memoryview, chunk_bytes: int) -> Iterator[Chunk]:
    yield Chunk(header=header, offset=0, data=raw[:chunk_bytes])
    for offset in range(chunk_bytes, len(raw), chunk_bytes):
        yield Chunk(header=None, offset=offset, data=raw[offset : offset + chunk_bytes])


def _check_chunk(chunk_bytes: int) -> None:
    if chunk_bytes < 1:
        raise ConfigError(f"chunk_bytes must be at least 1, got {chunk_bytes}")


def encode_parts(
    tensor: torch.Tensor, *, chunk_bytes: int = DEFAULT_CHUNK_BYTES
) -> Iterator[tensor_pb2.TensorPart]:
    """The messages of a tensor: the first has header and first chunk, a small tensor is one.

    The tensor must not be written to until the iterator is used up.

    Raises:
        ConfigError: the tensor cannot travel (see `header_of`).
    """
    _check_chunk(chunk_bytes)
    return (chunk.to_part() for chunk in _chunks(header_of(tensor), bytes_of(tensor), chunk_bytes))


def whole_chunk(tensor: torch.Tensor) -> Chunk:
    """A tensor as one chunk; meant for small ones. Valid until the tensor is written to.

    Raises:
        ConfigError: the tensor cannot travel.
    """
    return Chunk(header=header_of(tensor), offset=0, data=bytes_of(tensor))


async def stream_parts(
    tensor: torch.Tensor, *, chunk_bytes: int = DEFAULT_CHUNK_BYTES
) -> AsyncIterator[tensor_pb2.TensorPart]:
    """As `encode_parts`, for an event loop that must stay responsive."""
    async for chunk in stream_chunks(tensor, chunk_bytes=chunk_bytes):
        yield chunk.to_part()


async def stream_chunks(
    tensor: torch.Tensor, *, chunk_bytes: int = DEFAULT_CHUNK_BYTES
) -> AsyncIterator[Chunk]:
    """The chunks of a tensor, for an event loop that must stay responsive.

    A large tensor that needs a copy (strided, or on a device) is packed on a thread, and the loop
    runs between two chunks.
    """
    _check_chunk(chunk_bytes)
    header = header_of(tensor)
    if header.num_bytes <= chunk_bytes:
        yield whole_chunk(tensor)
        return
    needs_copy = not tensor.is_contiguous() or not tensor.is_cpu
    if needs_copy and header.num_bytes > _OFF_LOOP_BYTES:
        raw = await asyncio.get_running_loop().run_in_executor(None, bytes_of, tensor)
    else:
        raw = bytes_of(tensor)
    for chunk in _chunks(header, raw, chunk_bytes):
        yield chunk
        await asyncio.sleep(0)


def encode_tensor(tensor: torch.Tensor) -> tensor_pb2.TensorPart:
    """A tensor as one message; meant for small ones."""
    return next(encode_parts(tensor, chunk_bytes=max(1, tensor.numel() * tensor.element_size())))


def decode_tensor(
    part: tensor_pb2.TensorPart, *, max_bytes: int = DEFAULT_MAX_TENSOR_BYTES
) -> torch.Tensor:
    """The tensor of a single message.

    Raises:
        ProtocolError: the message is wrong, or not the whole tensor.
        CapacityExceeded: the tensor is larger than `max_bytes`.
    """
    assembler = TensorAssembler(max_bytes=max_bytes)
    tensor = assembler.add(part)
    assembler.finish()
    assert tensor is not None
    return tensor


def _too_much(*, expected: int, actual: int) -> ProtocolError:
    return ProtocolError(f"tensor has too much data: expected {expected} bytes, got {actual}")


def _is_whole(chunk: Chunk) -> bool:
    header = chunk.header
    return header is not None and not chunk.offset and header.num_bytes == len(chunk.data)


def _check_bools(data: memoryview | bytes) -> None:
    if np.frombuffer(data, dtype=np.uint8).max() > 1:
        raise ProtocolError("a bool tensor has bytes other than 0 and 1")


def _shaped(raw: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    flat = raw if dtype == torch.uint8 else raw.view(dtype)
    return flat if len(shape) == 1 else flat.reshape(shape)


class TensorAssembler:
    """Puts the chunks of one tensor after another together.

    After an error it is empty again, but the stream that the chunks came from is out of step.
    """

    def __init__(self, *, max_bytes: int = DEFAULT_MAX_TENSOR_BYTES) -> None:
        self._max_bytes = max_bytes
        self._reset()

    def _reset(self) -> None:
        self._raw: torch.Tensor | None = None
        self._dtype: torch.dtype = torch.uint8
        self._shape: tuple[int, ...] = ()
        self._received = 0

    def add(self, part: tensor_pb2.TensorPart) -> torch.Tensor | None:
        """Take one message; the tensor when it was the last of one, else None.

        Raises:
            ProtocolError: the message does not follow the contract.
            CapacityExceeded: the tensor is larger than the bound; nothing was allocated.
        """
        header = part.header if part.HasField("header") else None
        return self.add_chunk(Chunk(header=header, offset=part.offset, data=part.data))

    def add_chunk(self, chunk: Chunk) -> torch.Tensor | None:
        """As `add`, of bytes that are not in a message; they are copied out of the chunk.

        Raises:
            ProtocolError, CapacityExceeded: see `add`.
        """
        try:
            return self._add(chunk)
        except (ProtocolError, CapacityExceeded):
            self._reset()
            raise

    def finish(self) -> None:
        """Say that no message follows.

        Raises:
            ProtocolError: a tensor is incomplete.
        """
        if self._raw is None:
            return
        expected, received = self._raw.numel(), self._received
        self._reset()
        raise ProtocolError(f"tensor ended early: expected {expected} bytes, got {received}")

    def _add(self, chunk: Chunk) -> torch.Tensor | None:
        data = chunk.data
        if self._raw is None and data and _is_whole(chunk):
            return self._add_whole(chunk)
        if self._raw is None:
            raw = self._begin(chunk)
        elif chunk.header is not None:
            raise ProtocolError(
                f"a header came after {self._received} of {self._raw.numel()} bytes of a tensor"
            )
        else:
            raw = self._raw
        if chunk.offset != self._received:
            raise ProtocolError(f"chunk at offset {chunk.offset}, expected {self._received}")
        end = self._received + len(data)
        if end > raw.numel():
            raise _too_much(expected=raw.numel(), actual=end)
        if not data and end < raw.numel():
            raise ProtocolError(
                f"empty chunk at offset {end}: expected {raw.numel()} bytes, got {end}"
            )
        if self._dtype == torch.bool and data:
            _check_bools(data)
        _memory(raw)[self._received : end] = data
        self._received = end
        if end < raw.numel():
            return None
        tensor = _shaped(raw, self._dtype, self._shape)
        self._reset()
        return tensor

    def _add_whole(self, chunk: Chunk) -> torch.Tensor:
        """A tensor of one chunk, which most are; leaves no state."""
        assert chunk.header is not None
        dtype, shape = check_header(chunk.header, max_bytes=self._max_bytes)
        if dtype == torch.bool:
            _check_bools(chunk.data)
        return _shaped(torch.frombuffer(bytearray(chunk.data), dtype=torch.uint8), dtype, shape)

    def _begin(self, chunk: Chunk) -> torch.Tensor:
        if chunk.header is None:
            raise ProtocolError("a tensor begins without a header")
        self._dtype, self._shape = check_header(chunk.header, max_bytes=self._max_bytes)
        if chunk.header.num_bytes < len(chunk.data):
            raise _too_much(expected=chunk.header.num_bytes, actual=len(chunk.data))
        # Memory of a large tensor is taken by the system as chunks are written, not here.
        self._raw = torch.empty(chunk.header.num_bytes, dtype=torch.uint8)
        return self._raw
