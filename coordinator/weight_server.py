"""What the coordinator sends to nodes without files: the tensors of the models that it serves."""

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from stagemesh.checkpoint.weight_part import WeightPart
from stagemesh.model_spec import ModelSpec, TensorInfo
from stagemesh.weight_transfer.blobs import Blob
from stagemesh.weight_transfer.content_hash import HashBook, HashedTensor
from stagemesh.weight_transfer.disk_threads import DiskThreads

_Key = tuple[Path, int, int, WeightPart | None]
"""File, offset, length and part of a tensor."""


class DeployedWeights:
    """The models of the deployments, by fingerprint, and their tensors, by hash.

    A tensor, or a part of one, can be fetched once somebody has had it hashed. One is hashed at a
    time, on a thread: a coordinator has other work, too.

    Args:
        models: the served models, now.
        disk: threads for files.
        book: remembers hashes.
    """

    def __init__(
        self,
        models: Callable[[], Iterable[ModelSpec]],
        *,
        disk: DiskThreads,
        book: HashBook,
    ) -> None:
        self._models = models
        self._disk = disk
        self._book = book
        self._blobs: dict[bytes, Blob] = {}
        self._turn = asyncio.Semaphore(1)
        self._hashing: dict[_Key, asyncio.Task[HashedTensor]] = {}

    @property
    def hashed_bytes(self) -> int:
        """Bytes that were read to hash them since the start."""
        return self._book.hashed_bytes

    def model(self, fingerprint: str) -> ModelSpec | None:
        """The model with this fingerprint, where it is served here."""
        return next((spec for spec in self._models() if spec.fingerprint == fingerprint), None)

    def find(self, content_hash: bytes) -> Blob | None:
        """The tensor or part with this hash, where it was hashed here."""
        return self._blobs.get(content_hash)

    async def hash_of(self, info: TensorInfo, part: WeightPart | None = None) -> HashedTensor:
        """The hash of a tensor's data; who asks for one that is being hashed waits for that.

        Args:
            info: which.
            part: which part of it; None for all.

        Raises:
            CheckpointError: its file is gone, truncated, or changes.
        """
        key = (info.file, info.offset, info.num_bytes, part)
        task = self._hashing.get(key)
        if task is None:
            task = asyncio.create_task(self._hash(info, part), name=f"hash-{info.name}")
            self._hashing[key] = task
            task.add_done_callback(partial(self._hashed, key))
        # A caller that goes away does not end it: the thread would go on in any case.
        return await asyncio.shield(task)

    async def _hash(self, info: TensorInfo, part: WeightPart | None) -> HashedTensor:
        async with self._turn:
            hashed = await self._disk.run(partial(self._book.look_up, info, part))
        self._blobs[hashed.content_hash] = Blob(
            path=info.file,
            offset=info.offset,
            num_bytes=info.num_bytes if part is None else part.num_bytes,
            part=part,
            identity=hashed.identity,
        )
        return hashed

    def _hashed(self, key: _Key, task: "asyncio.Task[HashedTensor]") -> None:
        del self._hashing[key]
        if not task.cancelled():
            task.exception()  # whoever waits gets it; nobody may

    async def close(self) -> None:
        """Hash no more."""
        tasks = list(self._hashing.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
