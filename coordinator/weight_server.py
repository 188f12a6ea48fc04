"""What the coordinator sends to nodes without files: the tensors of the models that it serves."""

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from stagemesh.model_spec import ModelSpec, TensorInfo
from stagemesh.weight_transfer.blobs import Blob
from stagemesh.weight_transfer.content_hash import HashBook
from stagemesh.weight_transfer.disk_threads import DiskThreads


class DeployedWeights:
    """The models of the deployments, by fingerprint, and their tensors, by hash.

    A tensor can be fetched once somebody has had its model described, which hashes it. One is
    hashed at a time, on a thread: a coordinator has other work, too.

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
        self._hashing: dict[tuple[Path, int, int], asyncio.Task[bytes]] = {}

    @property
    def hashed_bytes(self) -> int:
        """Bytes that were read to hash them since the start."""
        return self._book.hashed_bytes

    def model(self, fingerprint: str) -> ModelSpec | None:
        """The model with this fingerprint, where it is served here."""
        return next((spec for spec in self._models() if spec.fingerprint == fingerprint), None)

    def find(self, content_hash: bytes) -> Blob | None:
        """The tensor with this hash, where its model was described."""
        return self._blobs.get(content_hash)

    async def hash_of(self, info: TensorInfo) -> bytes:
        """The hash of a tensor's data; who asks for one that is being hashed waits for that.

        Raises:
            CheckpointError: its file is gone, truncated, or changes.
        """
        key = (info.file, info.offset, info.num_bytes)
        task = self._hashing.get(key)
        if task is None:
            task = asyncio.create_task(self._hash(info), name=f"hash-{info.name}")
            self._hashing[key] = task
            task.add_done_callback(partial(self._hashed, key))
        # A caller that goes away does not end it: the thread would go on in any case.
        return await asyncio.shield(task)

    async def _hash(self, info: TensorInfo) -> bytes:
        async with self._turn:
            hashed = await self._disk.run(partial(self._book.look_up, info))
        self._blobs[hashed.content_hash] = Blob(
            path=info.file,
            offset=info.offset,
            num_bytes=info.num_bytes,
            identity=hashed.identity,
        )
        return hashed.content_hash

    def _hashed(self, key: tuple[Path, int, int], task: "asyncio.Task[bytes]") -> None:
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
