"""Unix sockets between processes of one host: who may use one, and where it lies. Torch-free.

A host is known by its boot id, its network namespace and its name together. Containers of one
machine that differ in one of these count as different hosts and stay on TCP; so do all processes
where the kernel tells no boot id. Equal ids do not promise a common file system, so a socket is
only used when it is there and may be written to.
"""

import contextlib
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Self

from stagemesh.errors import ConfigError

if sys.platform != "win32":
    import fcntl

_PREFIX = "stagemesh-"
_SOCKET = "rpc.sock"
_LOCK = "lock"
_ATTEMPTS = 5

# Of sun_path, with its closing zero; the system refuses longer ones.
_MAX_PATH_BYTES = 107

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


def host_id() -> str:
    """The host of this process; empty where it cannot be told."""
    try:
        boot = _BOOT_ID.read_text().strip()
        network = _NETWORK.stat().st_ino
    except OSError:
        return ""
    return f"{boot}/{network}/{socket.gethostname()}"


def is_reachable(path: str, *, host: str) -> bool:
    """Whether a socket that a process on `host` made can be used from here."""
    if not path or not host or host != host_id():
        return False
    # access first: a folder of another user would make is_socket raise.
    return os.access(path, os.R_OK | os.W_OK) and Path(path).is_socket()


def target_of(path: str) -> str:
    """A socket's path as gRPC spells it."""
    return f"unix:{path}"


class SocketFolder:
    """A private folder (mode 0700) for one socket, removed with it.

    Its maker holds a lock on a file in it for as long as it lives. A folder whose lock is free was
    left by a process that was killed; the next one to make a folder removes it.
    """

    def __init__(self, folder: Path, lock: int) -> None:
        self._folder = folder
        self._lock = lock

    @classmethod
    def make(cls) -> Self | None:
        """A new one in the folder for temporary files; None when paths there are too long.

        Raises:
            ConfigError: none can be made there.
        """
        if sys.platform == "win32":
            return None
        remove_stale(Path(tempfile.gettempdir()))
        for _ in range(_ATTEMPTS):
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
            lock = _lock(folder, flags=os.O_CREAT)
            if lock is None:
                # Somebody took it for a stale one, in the moment before it was locked.
                with contextlib.suppress(OSError):
                    folder.rmdir()
                continue
            made = cls(folder, lock)
            if len(os.fsencode(made.path)) <= _MAX_PATH_BYTES:
                return made
            made.remove()
            return None
        raise ConfigError(
            f"cannot keep a folder for a unix socket in {tempfile.gettempdir()}: others remove it; "
            "let TMPDIR name another folder, or go without unix sockets"
        )

    @property
    def path(self) -> str:
        """Path of the socket."""
        return str(self._folder / _SOCKET)

    def remove(self) -> None:
        """Remove socket and folder. May be called again."""
        if self._lock < 0:
            return
        _remove(self._folder)
        # Last: until then nobody else touches the folder.
        os.close(self._lock)
        self._lock = -1


def remove_stale(parent: Path) -> None:
    """Remove the folders that killed processes of this user left in `parent`."""
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
    for name in (_SOCKET, _LOCK):
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        folder.rmdir()
