"""JSON values over a socket, each after its length: how a renderer and its parent speak."""

import json
import socket
import struct
import time
from typing import Any

_LENGTH = struct.Struct(">Q")


def pack_frame(value: object) -> bytes:
    """One value as a frame; text travels as ASCII escapes, so that any Python text survives.

    Raises:
        TypeError: the value is no JSON.
    """
    payload = json.dumps(value).encode("ascii")
    return _LENGTH.pack(len(payload)) + payload


def receive_frame(
    connection: socket.socket, *, max_bytes: int, deadline: float | None = None
) -> Any:
    """Receive one value.

    Args:
        connection: the socket.
        max_bytes: refuse a longer frame.
        deadline: on `time.monotonic`'s clock; None waits for ever.

    Raises:
        EOFError: the other side is gone.
        TimeoutError: the deadline passed.
        ValueError: the frame is too long or no JSON.
    """
    (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size, deadline=deadline))
    if length > max_bytes:
        raise ValueError(f"a frame of {length} bytes passes the limit of {max_bytes}")
    return json.loads(_receive(connection, length, deadline=deadline))


def _receive(connection: socket.socket, size: int, *, deadline: float | None) -> bytes:
    received = bytearray()
    while len(received) < size:
        if deadline is not None:
            # Never 0, which would mean non-blocking.
            connection.settimeout(max(1e-3, deadline - time.monotonic()))
        piece = connection.recv(min(size - len(received), 1 << 20))
        if not piece:
            raise EOFError("the connection ended inside a frame")
        received += piece
    return bytes(received)
