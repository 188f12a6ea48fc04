"""Calls and small payloads in blocks of one size, as torch.distributed's collectives need them.

bytes of the call (int16) | bytes of the payload (int16) | call | payload | nothing, up to the end
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from stagemesh.comm.frames import envelope_from_bytes, envelope_to_bytes
from stagemesh.comm.transport import Envelope
from stagemesh.errors import ConfigError, ProtocolError

BLOCK_BYTES = 4096
MAX_PAYLOAD_BYTES = 3072
"""What fits into a block beside any call."""

_LENGTH_BYTES = 2
_HEAD_BYTES = 2 * _LENGTH_BYTES
_MAX_CALL_BYTES = BLOCK_BYTES - MAX_PAYLOAD_BYTES - _HEAD_BYTES
"""One with a tensor of 64 dims needs less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a block holds."""

    envelope: Envelope
    payload: torch.Tensor
    """[bytes]"""


def encode_call(envelope: Envelope) -> bytes:
    """A call as bytes.

    Raises:
        ConfigError: a tensor of so many dims that it does not fit.
    """
    data = envelope_to_bytes(replace(envelope, tag=0))
    if len(data) > _MAX_CALL_BYTES:
        raise ConfigError("a tensor with so many dims cannot travel over torch.distributed")
    return data


def write_block(block: torch.Tensor, call: bytes, payload: torch.Tensor | None) -> None:
    """Put a call and a payload of at most MAX_PAYLOAD_BYTES into a block."""
    num_bytes = 0 if payload is None else payload.numel()
    head = len(call).to_bytes(_LENGTH_BYTES, "little") + num_bytes.to_bytes(_LENGTH_BYTES, "little")
    start = _HEAD_BYTES + len(call)
    view = _view(block)
    view[:start] = head + call
    if payload is not None:
        block[start : start + num_bytes] = payload.view(torch.uint8)


def read_block(block: torch.Tensor) -> Told:
    """What `write_block` was given; the payload is a view.

    Raises:
        ProtocolError: the bytes are not what it makes.
    """
    view = _view(block)
    start = _HEAD_BYTES + int.from_bytes(view[:_LENGTH_BYTES], "little")
    end = start + int.from_bytes(view[_LENGTH_BYTES:_HEAD_BYTES], "little")
    if end > len(view):
        raise ProtocolError(f"a block tells of {end} bytes and has {len(view)}")
    envelope = envelope_from_bytes(bytes(view[_HEAD_BYTES:start]))
    return Told(envelope=envelope, payload=block[start:end])


def _view(block: torch.Tensor) -> memoryview:
    array: Any = block.numpy()  # numpy's stubs for 3.11 do not say that it is a buffer
    return memoryview(array)
