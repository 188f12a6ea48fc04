"""Room in the weight cache: what is in use, what may go, and whether more fits."""

import contextlib
import fcntl
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from stagemesh.errors import CapacityExceeded, ConfigError

logger = logging.getLogger(__name__)

_LOCK_SECONDS = 30.0
_POLL_SECONDS = 0.02
_SPARE_SHARE = 0.02
"""Of what is fetched, so much stays free on top: nothing shall fill a disk to its last byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    name: str
    path: Path
    num_bytes: int
    used_nanos: int
    """When it was last used."""


class Use:
    """Tensors that a load needs: nobody evicts them until it is closed.

    It is a file that lists them, and on which this process holds a lock: the kernel lets go of it
    when the process dies, and the next one to make room removes the file.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    def close(self) -> None:
        """Let go. May be called again."""
        if self._descriptor >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class CacheRoom:
    """Makes room in a cache's folder by evicting what was not used for longest.

    Args:
        folder: the cache's.
        limit_bytes: most bytes to keep; None leaves it to the disk.
        free_bytes: free room of a folder's disk.
    """

    def __init__(
        self,
        folder: Path,
        *,
        limit_bytes: int | None,
        free_bytes: Callable[[Path], int] | None,
    ) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._free_bytes = free_bytes or _free_bytes

    def reserve(self, sizes: Mapping[bytes, int], *, what: str) -> Use:
        """See `WeightCache.reserve`."""
        wanted = {content_hash.hex(): size for content_hash, size in sizes.items()}
        try:
            with self._locked():
                others = self._others()
                files = list(self._files())
                self._make_room(wanted, others, files, what=what)
                return self._new_use(wanted)
        except OSError as error:
            raise ConfigError(
                f"the weight cache {self._folder} cannot be used: {error.strerror}; "
                "name another folder with --cache-dir"
            ) from error

    def _make_room(
        self,
        wanted: Mapping[str, int],
        others: Mapping[str, int],
        files: list[_File],
        *,
        what: str,
    ) -> None:
        """Evict what must go; nothing is evicted when that would not do."""
        held: dict[str, int] = {}
        for file in files:
            held[file.name] = max(held.get(file.name, 0), file.num_bytes)
        needed = _missing(wanted, held)
        if needed == 0:
            return
        promised = _missing({k: v for k, v in others.items() if k not in wanted}, held)
        evictable = [f for f in files if f.name not in wanted and f.name not in others]
        room = sum(file.num_bytes for file in evictable)
        free = self._free_bytes(self._folder)
        excess = needed + promised + int(_SPARE_SHARE * needed) - free
        if excess > room:
            raise CapacityExceeded(
                f"{what} needs {_size(needed)} more in the weight cache, and {self._folder} has "
                f"{_size(max(0, free + room - promised))} free; free some space there, or name a "
                "folder on another disk with --cache-dir"
            )
        if self._limit_bytes is not None:
            used = sum(file.num_bytes for file in files)
            over = used + needed + promised - self._limit_bytes
            if over > room:
                raise CapacityExceeded(
                    f"{what} needs {_size(sum(wanted.values()))} in the weight cache "
                    f"{self._folder}, whose limit is {_size(self._limit_bytes)}"
                    + (f", {_size(used - room)} of it in use" if used > room else "")
                    + "; raise --cache-limit"
                )
            excess = max(excess, over)
        self._evict(evictable, excess)

    def _evict(self, files: list[_File], num_bytes: int) -> None:
        gone = 0
        for file in sorted(files, key=lambda f: f.used_nanos):
            if gone >= num_bytes:
                break
            file.path.unlink(missing_ok=True)
            gone += file.num_bytes
        if gone:
            logger.info("weight cache: %s evicted", _size(gone), extra={"path": str(self._folder)})

    def _files(self) -> Iterator[_File]:
        folders = [self._folder / "partial", *(self._folder / "blobs").iterdir()]
        for folder in folders:
            for entry in os.scandir(folder):
                # It may go or be renamed meanwhile.
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    yield _File(
                        name=entry.name,
                        path=Path(entry.path),
                        num_bytes=status.st_size,
                        used_nanos=status.st_atime_ns,
                    )

    def _others(self) -> dict[str, int]:
        """What living processes use; what dead ones left is removed."""
        found: dict[str, int] = {}
        for path in (self._folder / "uses").iterdir():
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                found |= json.loads(path.read_text())
            else:
                path.unlink(missing_ok=True)
            finally:
                os.close(descriptor)
        return found

    def _new_use(self, wanted: Mapping[str, int]) -> Use:
        descriptor, name = tempfile.mkstemp(dir=self._folder / "uses")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        Path(name).write_text(json.dumps(dict(wanted)))
        return Use(Path(name), descriptor)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(
            self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        try:
            deadline = time.monotonic() + _LOCK_SECONDS
            while True:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"another process has held {self._folder / 'lock'} for "
                        f"{_LOCK_SECONDS:.0f} s; end it, or name another folder with --cache-dir"
                    )
                time.sleep(_POLL_SECONDS)
            yield
        finally:
            os.close(descriptor)


def _missing(sizes: Mapping[str, int], held: Mapping[str, int]) -> int:
    return sum(max(0, size - held.get(name, 0)) for name, size in sizes.items())


def _free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _size(num_bytes: int) -> str:
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.4g} {unit}"
