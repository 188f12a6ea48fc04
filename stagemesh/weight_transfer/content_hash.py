"""Hashes of tensors' data, and remembering them beside the identity of the file they came from.

A hash is BLAKE2b with 32 bytes (RFC 7693) of the data as it is in the file, or of a part of it.
Equal tensors of two models or files therefore have one hash, and are sent and kept once.
"""

import hashlib
import json
import logging
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from stagemesh.checkpoint.tensor_info import TensorInfo, open_for_reading, pread_into
from stagemesh.checkpoint.weight_part import WeightPart, read_part
from stagemesh.errors import CheckpointError

logger = logging.getLogger(__name__)

HASH_BYTES = 32
"""Length of a hash."""

_CHUNK_BYTES = 1 << 20


def new_hash() -> "hashlib.blake2b":
    """A hash of nothing yet."""
    return hashlib.blake2b(digest_size=HASH_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileIdentity:
    """What changes when a file's content does."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, descriptor: int) -> "FileIdentity":
        """Of an open file."""
        status = os.fstat(descriptor)
        return cls(size=status.st_size, mtime_ns=status.st_mtime_ns, inode=status.st_ino)


@dataclass(frozen=True, slots=True, kw_only=True)
class HashedTensor:
    """The hash of a tensor or of a part of it, and the file as it was when it was hashed."""

    content_hash: bytes
    identity: FileIdentity
    whole_hash: bytes | None
    """That of all of the tensor, where it is known."""


_Key = tuple[int, int, str]
"""Offset and length of a tensor's data, and the part; the text is empty for all of it."""


class HashBook:
    """Hashes tensors, each once: what is known is kept in a file for each file of a model.

    Such a file is a line with the identity of what was hashed, then a line for each tensor or part.
    It is only appended to, so two processes may share it. One thread at a time.

    Args:
        folder: where to keep them; created when it is needed. None keeps them in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self.hashed_bytes = 0
        """Bytes of files read to hash them."""
        self._folder = folder
        self._known: dict[Path, tuple[FileIdentity, dict[_Key, bytes]]] = {}

    def look_up(self, info: TensorInfo, part: WeightPart | None = None) -> HashedTensor:
        """The hash of a tensor; its data is read when nobody has hashed it before.

        Args:
            info: which.
            part: which part of it; None for all.

        Raises:
            CheckpointError: the file is gone, truncated, or changes while it is read.
        """
        descriptor = open_for_reading(info)
        try:
            identity = FileIdentity.of(descriptor)
            known = self._of_file(info.file, identity)
            whole = (info.offset, info.num_bytes, "")
            key = whole if part is None else (info.offset, info.num_bytes, str(part))
            if key not in known:
                known[key] = (
                    _hash_whole(descriptor, info)
                    if part is None
                    else _hash_part(descriptor, info, part)
                )
                self.hashed_bytes += info.num_bytes if part is None else part.num_bytes
                if FileIdentity.of(descriptor) != identity:
                    del known[key]
                    raise CheckpointError(
                        f"{info.file} changed while tensor {info.source_name} was read; "
                        "serve a model from files that nobody writes to"
                    )
                self._append(info.file, key, known[key])
            return HashedTensor(
                content_hash=known[key], identity=identity, whole_hash=known.get(whole)
            )
        finally:
            os.close(descriptor)

    def _of_file(self, file: Path, identity: FileIdentity) -> dict[_Key, bytes]:
        if file in self._known and self._known[file][0] == identity:
            return self._known[file][1]
        hashes = self._read(file, identity)
        if hashes is None:
            hashes = {}
            self._begin(file, identity)
        self._known[file] = (identity, hashes)
        return hashes

    def _page(self, file: Path) -> Path | None:
        if self._folder is None:
            return None
        return self._folder / f"{hashlib.sha256(os.fsencode(file.resolve())).hexdigest()[:40]}.txt"

    def _read(self, file: Path, identity: FileIdentity) -> dict[_Key, bytes] | None:
        """What is written about the file; None when that is nothing, or is about an older one."""
        page = self._page(file)
        if page is None:
            return None
        try:
            lines = page.read_text().splitlines()
            if not lines or json.loads(lines[0]) != asdict(identity):
                return None
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning(
                "hashes of %s are computed anew: %s cannot be read: %s", file, page, error
            )
            return None
        hashes = {}
        for line in lines[1:]:
            # A line that a killed process left half written counts for nothing: the hash is last.
            words = line.split(" ")
            if len(words) in (3, 4) and len(words[-1]) == 2 * HASH_BYTES:
                part = words[2] if len(words) == 4 else ""
                hashes[int(words[0]), int(words[1]), part] = bytes.fromhex(words[-1])
        return hashes

    def _begin(self, file: Path, identity: FileIdentity) -> None:
        page = self._page(file)
        if page is None:
            return
        try:
            page.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor, name = tempfile.mkstemp(dir=page.parent)
            with os.fdopen(descriptor, "w") as new:
                new.write(json.dumps(asdict(identity)))
            Path(name).replace(page)
        except OSError as error:
            self._forget_folder(error)

    def _append(self, file: Path, key: _Key, content_hash: bytes) -> None:
        page = self._page(file)
        if page is None:
            return
        try:
            with page.open("a") as existing:
                words = (*(str(word) for word in key if word != ""), content_hash.hex())
                # The break before it ends what a killed process left half written.
                existing.write("\n" + " ".join(words))
        except OSError as error:
            self._forget_folder(error)

    def _forget_folder(self, error: OSError) -> None:
        logger.warning(
            "hashes of model files are not remembered, and computed again at the next start: %s",
            error,
        )
        self._folder = None


def _hash_whole(descriptor: int, info: TensorInfo) -> bytes:
    content_hash = new_hash()
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, info.num_bytes)))
    for start in range(0, info.num_bytes, _CHUNK_BYTES):
        chunk = buffer[: min(_CHUNK_BYTES, info.num_bytes - start)]
        pread_into(descriptor, chunk, start=start, info=info)
        content_hash.update(chunk)
    return content_hash.digest()


def _hash_part(descriptor: int, info: TensorInfo, part: WeightPart) -> bytes:
    content_hash = new_hash()
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, part.num_bytes)))
    for start in range(0, part.num_bytes, _CHUNK_BYTES):
        chunk = buffer[: min(_CHUNK_BYTES, part.num_bytes - start)]
        if not read_part(descriptor, chunk, part=part, offset=info.offset, start=start):
            raise CheckpointError(f"{info.file} is truncated: tensor {info.source_name} ends early")
        content_hash.update(chunk)
    return content_hash.digest()
