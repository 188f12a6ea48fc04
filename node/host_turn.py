"""Turns among the node daemons of one user on one host: who measures shall have the host alone."""

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on Windows, where daemons of one host measure at once
    _CAN_LOCK = False
else:
    _CAN_LOCK = True

_POLL_SECONDS = 0.05


@contextlib.asynccontextmanager
async def host_turn(path: Path | None = None) -> AsyncGenerator[None, None]:
    """Wait until no other daemon holds the turn, and hold it for the block.

    The kernel gives it back when a process ends, however it ends. There is no limit here: callers
    have a deadline of their own. A host without a place for the lock has no turns.

    Args:
        path: the lock's file; one per user by default.
    """
    lock = _open(path) if _CAN_LOCK else None
    if lock is None:
        yield
        return
    try:
        while not _try_lock(lock):  # noqa: ASYNC110 - who holds it is another process
            await asyncio.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(lock)


def _open(path: Path | None) -> int | None:
    path = path or Path(tempfile.gettempdir()) / f"stagemesh-measure-{os.getuid()}.lock"
    try:
        # Neither followed nor written to: the folder is everybody's.
        return os.open(path, os.O_CREAT | os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return None


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
