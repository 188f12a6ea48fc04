"""Folders for what lives as long as a process: sockets, logs of child processes. Torch-free.

A process that is killed leaves its folders behind. So the maker of one holds a lock on a file in it
for as long as it lives, and the next process to make one removes those whose lock is free.
"""

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Self

from stagemesh.errors import ConfigError

if sys.platform != "win32":
    import fcntl

_PREFIX = "stagemesh-"
_LOCK = "lock"
# What we put there. A folder with anything else in it is left where it is.
_CONTENTS = ("*.sock", "*.log")
_ATTEMPTS = 5


class PrivateFolder:
    """A folder of this process (mode 0700) among the temporary files."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def make(cls) -> Self:
        """A new one; removes those of killed processes.

        Raises:
            ConfigError: none can be made there.
        """
        remove_stale(Path(tempfile.gettempdir()))
        for _ in range(_ATTEMPTS):
            path = Path(tempfile.mkdtemp(prefix=_PREFIX))
            lock = _lock(path, flags=os.O_CREAT)
            if lock is not None:
                return cls(path, lock)
            # Somebody took it for a stale one, in the moment before it was locked.
            with contextlib.suppress(OSError):
                path.rmdir()
        raise ConfigError(
            f"cannot keep a folder in {tempfile.gettempdir()}: others remove it; let TMPDIR name "
            "another folder"
        )

    def remove(self) -> None:
        """Remove it with its sockets and logs. May be called again."""
        if self._lock < 0:
            return
        _remove(self.path)
        # Last: until then nobody else touches the folder.
        os.close(self._lock)
        self._lock = -1


def remove_stale(parent: Path) -> None:
    """Remove the folders that killed processes of this user left in `parent`."""
    if sys.platform == "win32":
        return
    for folder in parent.glob(f"{_PREFIX}*"):
        # Whatever is wrong with it, it is not one of ours or somebody else removes it.
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = _lock(folder, flags=0)
            if lock is None:
                continue
            try:
                _remove(folder)
            finally:
                os.close(lock)


def _lock(folder: Path, *, flags: int) -> int | None:
    """Lock the folder, if it is there and nobody has.

    None also when it was removed between opening and locking: then the lock is that of a file that
    is no more.
    """
    path = folder / _LOCK
    if sys.platform == "win32":
        return os.open(path, os.O_RDWR | flags)
    try:
        lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
    except OSError:
        return None
    # Another has the lock, or has removed the file.
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), path.stat()):
            return lock
    os.close(lock)
    return None


def _remove(folder: Path) -> None:
    for pattern in (*_CONTENTS, _LOCK):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)
    # Gone already, or somebody has put files of their own there.
    with contextlib.suppress(OSError):
        folder.rmdir()
