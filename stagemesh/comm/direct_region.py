"""Memory that the ranks of one host share: one file below /dev/shm, mapped by each of them.

    region    [ secret ]  then a channel for each ordered pair of ranks
    channel   two slots, used in turn
    slot      [ number of the message in it: 64 | head: 128 | payload: SLOT_BYTES ]

The file has a name only until all ranks have mapped it. Its pages are reserved when it is made, so
that a full /dev/shm is an error there and not a signal in the middle of a step.
"""

import contextlib
import hashlib
import mmap
import os
import platform
import sys
from pathlib import Path

from stagemesh.comm.direct_message import HEAD_BYTES

SLOT_BYTES = 256 * 1024
"""Payload of one slot."""

# The file in it has a random name, is made anew, and is for its owner only.
_FOLDER = Path("/dev/shm")
_LINE = 64
_SECRET_BYTES = 64
_SLOT_TOTAL = _LINE + HEAD_BYTES + SLOT_BYTES
_MAX_BYTES = 64 * 2**20


class Slot:
    """Room for one message."""

    __slots__ = ("head", "number", "offset", "payload")

    def __init__(self, memory: memoryview, start: int) -> None:
        self.number = memory[start : start + 8].cast("Q")
        """[1]: of the message that lies here; written last."""
        head = start + _LINE
        self.head = memory[head : head + HEAD_BYTES]
        self.offset = head + HEAD_BYTES
        """Of the payload in the region."""
        self.payload = memory[self.offset : self.offset + SLOT_BYTES]


class SharedRegion:
    """A mapped region. It lives as long as something refers to its memory."""

    def __init__(self, memory: mmap.mmap, num_ranks: int) -> None:
        self.memory = memory
        self._num_ranks = num_ranks

    def slots(self, source: int, target: int) -> tuple[Slot, Slot]:
        """Of the channel from one rank to another."""
        index = source * (self._num_ranks - 1) + target - (target > source)
        start = _SECRET_BYTES + 2 * index * _SLOT_TOTAL
        view = memoryview(self.memory)
        return Slot(view, start), Slot(view, start + _SLOT_TOTAL)


def can_share(num_ranks: int) -> bool:
    """Whether so many ranks on this machine could share memory.

    A reader must see a payload before the number that is written after it. Python has no fences;
    x86 needs none, as it lets no store overtake another.
    """
    return (
        sys.platform == "linux"
        and platform.machine() == "x86_64"
        and _region_bytes(num_ranks) <= _MAX_BYTES
        and os.access(_FOLDER, os.W_OK)
    )


def make_region(secret: str, num_ranks: int) -> SharedRegion | None:
    """Make and map the region that `open_region` finds; None where there is no room.

    Args:
        secret: only the ranks know it.
        num_ranks: how many share the region.
    """
    size = _region_bytes(num_ranks)
    try:
        file = os.open(_path(secret), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        os.posix_fallocate(file, 0, size)
        memory = mmap.mmap(file, size)
    except OSError:
        remove_name(secret)
        return None
    finally:
        os.close(file)
    memory[:_SECRET_BYTES] = _proof(secret)
    return SharedRegion(memory, num_ranks)


def open_region(secret: str, num_ranks: int) -> SharedRegion | None:
    """Map the region that another rank has made; None where this process cannot see it."""
    size = _region_bytes(num_ranks)
    try:
        file = os.open(_path(secret), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(file).st_size != size:
            return None
        memory = mmap.mmap(file, size)
    except OSError:
        return None
    finally:
        os.close(file)
    if memory[:_SECRET_BYTES] != _proof(secret):
        return None
    return SharedRegion(memory, num_ranks)


def remove_name(secret: str) -> None:
    """Nobody else can map the region from now on; the kernel frees it with its last user."""
    with contextlib.suppress(FileNotFoundError):
        _path(secret).unlink()


def _region_bytes(num_ranks: int) -> int:
    return _SECRET_BYTES + 2 * num_ranks * (num_ranks - 1) * _SLOT_TOTAL


def _path(secret: str) -> Path:
    # Anybody may list the folder, so the name tells nothing of the secret.
    name = hashlib.blake2b(secret.encode(), digest_size=16, person=b"name").hexdigest()
    return _FOLDER / f"stagemesh-{name}"


def _proof(secret: str) -> bytes:
    return hashlib.blake2b(secret.encode(), digest_size=_SECRET_BYTES, person=b"proof").digest()
