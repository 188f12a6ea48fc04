"""What each message between computing threads begins with: which call it is of.

[ number of the call: 8 bytes | the call as text: 112 bytes | bytes of the payload: 8 ]
"""

import struct

import torch

from stagemesh.errors import ConfigError

HEAD_BYTES = 128

_CALL_BYTES = HEAD_BYTES - 16
_HEAD = struct.Struct(f"<Q{_CALL_BYTES}sQ")
_NUMBER = struct.Struct("<Q")


def encode_call(text: str) -> bytes:
    """A call as heads have it.

    Raises:
        ConfigError: it does not fit.
    """
    raw = text.encode()
    if len(raw) > _CALL_BYTES:
        raise ConfigError(f"a tensor with so many dims cannot travel over direct links: {text}")
    return raw.ljust(_CALL_BYTES, b"\0")


def pack_head(sequence: int, call: bytes, num_bytes: int) -> bytearray:
    """A head; see the module's text."""
    head = bytearray(HEAD_BYTES)
    _HEAD.pack_into(head, 0, sequence, call, num_bytes)
    return head


def renumber(head: bytearray | memoryview, sequence: int) -> None:
    """Give a head another number."""
    _NUMBER.pack_into(head, 0, sequence)


def payload_bytes(head: bytes | bytearray | memoryview) -> int:
    """How long the payload behind a head is."""
    return int(_NUMBER.unpack_from(head, HEAD_BYTES - _NUMBER.size)[0])


def is_of(head: memoryview, sequence: int, call: bytes) -> bool:
    """Whether a head is of this call."""
    told_sequence, told_call, _ = _HEAD.unpack(head)
    return bool(told_call == call and told_sequence == sequence)


def describe(head: bytes | bytearray | memoryview) -> str:
    """A head for people, of whichever call."""
    sequence, call, _ = _HEAD.unpack(head)
    return f"{call.rstrip(bytes(1)).decode(errors='replace')} as its call {sequence}"


def byte_view(flat: torch.Tensor) -> memoryview:
    """The memory of flat bytes."""
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
