"""The node's cache of weights: each tensor is a file that is named by the hash of its content.

    FOLDER/blobs/ab/abcd...   whole tensors, checked against their hash
           partial/abcd...    what a transfer has brought so far; whoever writes holds a lock on it
           uses/...           what loads of living processes need; see `node.cache_room`
           lock               held for a moment by who makes room

Any number of processes may share a folder. A whole tensor carries a seal: its time of modification
is a number made from its hash. A file that was written to since has lost it, and is hashed again
before it is used. All methods block; call them on disk threads.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from node.cache_room import CacheRoom, Use
from stagemesh.errors import CapacityExceeded, ConfigError
from stagemesh.weight_transfer.blobs import Blob
from stagemesh.weight_transfer.content_hash import new_hash

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 20
_ATTEMPTS = 10
# Seconds from 1970 until 2004: every file system can store them, and none would by itself.
_SEAL_SECONDS = 2**30


class WeightCache:
    """Tensors on disk.

    Args:
        folder: where; made on first use, for this user alone.
        limit_bytes: most bytes to keep; by default what the disk has room for.
        free_bytes: free room of a folder's disk; for tests.
    """

    def __init__(
        self,
        folder: Path,
        *,
        limit_bytes: int | None = None,
        free_bytes: Callable[[Path], int] | None = None,
    ) -> None:
        self.folder = folder
        self._room = CacheRoom(folder, limit_bytes=limit_bytes, free_bytes=free_bytes)

    def blob_path(self, content_hash: bytes) -> Path:
        """Where a whole tensor lies or would lie."""
        name = content_hash.hex()
        return self.folder / "blobs" / name[:2] / name

    def find(self, content_hash: bytes) -> Blob | None:
        """A whole tensor, to be sent to somebody."""
        path = self.blob_path(content_hash)
        try:
            status = path.stat()
        except OSError:
            return None
        if status.st_mtime_ns != _seal_nanos(content_hash):
            return None
        return Blob(path=path, offset=0, num_bytes=status.st_size)

    def has(self, content_hash: bytes, num_bytes: int) -> bool:
        """Whether a tensor is here and right; one that is not is thrown away.

        Raises:
            ConfigError: the file cannot be read.
        """
        path = self.blob_path(content_hash)
        try:
            status = path.stat()
            is_right = status.st_size == num_bytes
            if is_right and status.st_mtime_ns != _seal_nanos(content_hash):
                with path.open("rb") as file:
                    is_right = _hash_of(file.fileno(), num_bytes).digest() == content_hash
            if is_right:
                # The time of access says when it was last used: see `CacheRoom`.
                os.utime(path, ns=(time.time_ns(), _seal_nanos(content_hash)))
                return True
            path.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise ConfigError(f"the weight cache at {path} cannot be used: {error}") from error
        logger.warning("%s is damaged; it is thrown away and fetched again", path)
        return False

    def partial_bytes(self, content_hash: bytes) -> int:
        """How much of a tensor a transfer, ours or another process's, has brought."""
        try:
            return self._partial_path(content_hash).stat().st_size
        except FileNotFoundError:
            return 0

    def reserve(self, sizes: Mapping[bytes, int], *, what: str) -> Use:
        """Protect tensors from eviction, and make room for those that are missing.

        Args:
            sizes: bytes by hash.
            what: named in errors.

        Raises:
            CapacityExceeded: the disk or the limit has no room for them.
            ConfigError: the folder cannot be used, or others may write to it.
        """
        self._make_folders()
        return self._room.reserve(sizes, what=what)

    def partials(self) -> "OpenPartials":
        """For writing tensors."""
        return OpenPartials(self)

    def _partial_path(self, content_hash: bytes) -> Path:
        return self.folder / "partial" / content_hash.hex()

    def _make_folders(self) -> None:
        try:
            for folder in (self.folder, *(self.folder / n for n in ("blobs", "partial", "uses"))):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            status = self.folder.stat()
        except OSError as error:
            raise ConfigError(
                f"the weight cache {self.folder} cannot be made: {error.strerror}; "
                "name another folder with --cache-dir"
            ) from error
        if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o022:
            raise ConfigError(
                f"others may write to the weight cache {self.folder}, and what is in it is "
                f"trusted; make it yours alone (chmod 700) or name another with --cache-dir"
            )


class _Partial:
    """One that is open, with the hash of what it holds."""

    def __init__(self, path: Path, descriptor: int, num_bytes: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self.num_bytes = num_bytes
        self.size = os.fstat(descriptor).st_size
        if self.size > num_bytes:
            self.clear()
        self.hash = _hash_of(descriptor, self.size)

    def clear(self) -> None:
        os.ftruncate(self.descriptor, 0)
        self.size, self.hash = 0, new_hash()


class OpenPartials:
    """Tensors that are being written, each by one process at a time.

    A thread may still be at work here when the load that it worked for is cancelled, so each step
    holds a lock, and `close` waits for it.

    Args:
        cache: whose.
    """

    def __init__(self, cache: WeightCache) -> None:
        self._cache = cache
        self._lock = threading.Lock()
        self._open: dict[bytes, _Partial] = {}
        self._is_closed = False

    def open(self, content_hash: bytes, num_bytes: int) -> int | None:
        """Begin or go on with a tensor.

        Returns:
            The bytes that are there already; None while another writes it, or just has.
        """
        with self._lock, _disk_errors(self._cache.folder):
            path = self._cache._partial_path(content_hash)
            descriptor = None if self._is_closed else _open_locked(path)
            if descriptor is None:
                return None
            if self._cache.blob_path(content_hash).exists():
                path.unlink(missing_ok=True)
                os.close(descriptor)
                return None
            self._open[content_hash] = _Partial(path, descriptor, num_bytes)
            return self._open[content_hash].size

    def write(self, content_hash: bytes, data: bytes) -> int:
        """Append to a tensor; returns its bytes so far.

        Raises:
            CapacityExceeded: the disk is full.
        """
        with self._lock, _disk_errors(self._cache.folder):
            partial = self._open.get(content_hash)
            if partial is None:  # closed meanwhile
                return 0
            view = memoryview(data)
            while view:
                count = os.pwrite(partial.descriptor, view, partial.size)
                partial.hash.update(view[:count])
                partial.size += count
                view = view[count:]
            return partial.size

    def finish(self, content_hash: bytes) -> bool:
        """Make a tensor whole.

        Returns:
            Whether it has the right content; a wrong one is emptied, to begin again.
        """
        with self._lock, _disk_errors(self._cache.folder):
            partial = self._open.get(content_hash)
            if partial is None:
                return False
            if partial.hash.digest() != content_hash or partial.size != partial.num_bytes:
                partial.clear()
                return False
            os.fsync(partial.descriptor)
            os.utime(partial.descriptor, ns=(time.time_ns(), _seal_nanos(content_hash)))
            target = self._cache.blob_path(content_hash)
            target.parent.mkdir(exist_ok=True, mode=0o700)
            partial.path.replace(target)
            os.close(partial.descriptor)
            del self._open[content_hash]
            return True

    def close(self) -> None:
        """Let others go on with what is not whole; it stays on disk."""
        with self._lock:
            self._is_closed = True
            for partial in self._open.values():
                os.close(partial.descriptor)
            self._open.clear()


@contextlib.contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CapacityExceeded(
            f"the weight cache {folder} cannot be written: {error.strerror}; free some space there "
            "or name another folder with --cache-dir"
        ) from error


def _open_locked(path: Path) -> int | None:
    """Open a file for writing, if nobody else has it."""
    for _ in range(_ATTEMPTS):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # It may have become a whole tensor between the two calls.
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except FileNotFoundError:
            pass
        os.close(descriptor)
    return None


def _seal_nanos(content_hash: bytes) -> int:
    return int.from_bytes(content_hash[:4], "big") % _SEAL_SECONDS * 10**9


def _hash_of(descriptor: int, num_bytes: int) -> "hashlib.blake2b":
    content_hash = new_hash()
    for start in range(0, num_bytes, _CHUNK_BYTES):
        content_hash.update(os.pread(descriptor, min(_CHUNK_BYTES, num_bytes - start), start))
    return content_hash
