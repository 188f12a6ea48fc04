"""Fetches tensors into the cache: from peers that have them, else from the coordinator.

A few batches of tensors are under way at once. Whatever breaks, what has come stays in the cache,
and the rest is asked for from there, of whoever is left.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from node.weight_cache import OpenPartials, WeightCache
from node.weight_progress import FetchProgress
from node.weight_source import Chunk, WeightSource
from stagemesh.errors import (
    CapacityExceeded,
    CheckpointError,
    CommError,
    PeerLost,
    ProtocolError,
    StagemeshError,
)
from stagemesh.weight_transfer.disk_threads import DiskThreads

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A tensor to fetch."""

    content_hash: bytes
    num_bytes: int
    name: str
    """For errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchLimits:
    """Bounds of a fetch."""

    num_streams: int = 3
    """Batches under way at once."""
    batch_bytes: int = 32 * 2**20
    """Bytes after which a batch is full; a larger tensor is a batch of its own."""
    batch_tensors: int = 64
    """Tensors after which it is full: each is an open file."""
    silence_seconds: float = 20.0
    """A source that sends nothing for so long is lost."""
    stall_seconds: float = 45.0
    """A batch of which no byte has come for so long is given up, whoever was asked."""
    first_retry_seconds: float = 0.2
    """Pause before the coordinator is asked again; doubled each time."""
    last_retry_seconds: float = 5.0
    """Longest pause."""
    max_wrong: int = 2
    """A tensor that came with wrong content so often is given up."""


class _BadSource(Exception):
    """What a source sent cannot be used, or nothing came."""

    def __init__(self, source: WeightSource, error: StagemeshError) -> None:
        super().__init__(str(error))
        self.source = source
        self.error = error


class WeightFetcher:
    """One fetch.

    Args:
        cache: where to.
        disk: threads for writing and hashing.
        coordinator: who has everything.
        peers: who else may have something, and which hashes.
        fellows: nodes that fetch the same now; each is asked again before each batch.
        progress: counts.
        limits: bounds.
    """

    def __init__(
        self,
        cache: WeightCache,
        *,
        disk: DiskThreads,
        coordinator: WeightSource,
        peers: Mapping[WeightSource, frozenset[bytes]],
        progress: FetchProgress,
        limits: FetchLimits,
        fellows: Sequence[WeightSource] = (),
    ) -> None:
        self._cache = cache
        self._disk = disk
        self._coordinator = coordinator
        self._peers = dict(peers)
        self._fellows = list(fellows)
        self._progress = progress
        self._limits = limits
        self._busy: Counter[WeightSource] = Counter()
        self._wrong: Counter[bytes] = Counter()

    async def fetch(self, wanted: Sequence[Wanted]) -> None:
        """Fetch tensors that are missing.

        Raises:
            PeerLost: nobody has sent anything for too long.
            CheckpointError: the coordinator sends other content than it says.
            CapacityExceeded: the disk is full.
        """
        batches = deque(_batches(wanted, self._limits))

        async def work() -> None:
            while batches:
                await self._fetch_batch(batches.popleft())

        try:
            async with asyncio.TaskGroup() as tasks:
                for index in range(min(self._limits.num_streams, len(batches))):
                    tasks.create_task(work(), name=f"fetch-weights-{index}")
        except ExceptionGroup as group:
            ours, rest = group.split(StagemeshError)
            if rest is not None or ours is None:
                raise
            raise ours.exceptions[0] from group

    async def _fetch_batch(self, batch: list[Wanted]) -> None:
        await self._ask_fellows([item.content_hash for item in batch])
        left = {item.content_hash: item for item in batch}
        pause = self._limits.first_retry_seconds
        moved_at, had = time.monotonic(), (-1, -1)
        cause: StagemeshError | None = None
        while left:
            try:
                is_stuck = not await self._go_on(left)
            except _BadSource as bad:
                cause = bad.error
                is_stuck = self._blame(bad)
            has = (len(left), sum(await self._disk.run(partial(self._sizes, tuple(left)))))
            if has != had:
                moved_at, had, pause = time.monotonic(), has, self._limits.first_retry_seconds
            elif time.monotonic() - moved_at > self._limits.stall_seconds:
                raise self._stalled(left, cause)
            if is_stuck and left:
                await asyncio.sleep(pause)
                pause = min(2 * pause, self._limits.last_retry_seconds)

    async def _ask_fellows(self, hashes: Sequence[bytes]) -> None:
        """What a node that fetches the same has by now need not come from the coordinator."""
        for fellow, has in zip(
            tuple(self._fellows),
            await asyncio.gather(*(ask(fellow, hashes) for fellow in self._fellows)),
            strict=True,
        ):
            self._peers[fellow] = self._peers.get(fellow, frozenset()) | has

    def _blame(self, bad: _BadSource) -> bool:
        """Leave a peer out from now on; returns whether to wait before the next attempt.

        Raises:
            StagemeshError: it is the coordinator, and asking again would change nothing.
        """
        if bad.source is not self._coordinator:
            self._peers.pop(bad.source, None)
            self._fellows = [fellow for fellow in self._fellows if fellow is not bad.source]
            logger.warning("weights are taken from elsewhere, since %s", bad.error)
            return False
        if not isinstance(bad.error, CommError | CapacityExceeded | _WrongContent):
            raise bad.error
        logger.warning("weights are asked for again, since %s", bad.error)
        return True

    def _sizes(self, hashes: Sequence[bytes]) -> list[int]:
        return [self._cache.partial_bytes(content_hash) for content_hash in hashes]

    def _stalled(self, left: Mapping[bytes, Wanted], cause: StagemeshError | None) -> PeerLost:
        reason = "another process writes it, or held it" if cause is None else str(cause)
        name = next(iter(left.values())).name
        return PeerLost(
            f"no byte of {name} and {len(left) - 1} more tensors has come for "
            f"{self._limits.stall_seconds:.0f} s: {reason}",
            node_id=self._coordinator.name,
        )

    async def _go_on(self, left: dict[bytes, Wanted]) -> bool:
        """Take from one source what it has; what is done leaves `left`.

        Returns:
            False when there was nothing to do but to wait for another process.

        Raises:
            _BadSource: the source is at fault.
            CheckpointError: wrong content came too often.
        """
        partials = self._cache.partials()
        try:
            ready: list[tuple[Wanted, int]] = []
            for item in list(left.values()):
                begin = partial(partials.open, item.content_hash, item.num_bytes)
                size = await self._disk.run(begin)
                if size is None:
                    await self._see_other(left, item)
                    continue
                if size == item.num_bytes:
                    if await self._finish(left, partials, item):
                        continue
                    size = 0
                self._progress.set_present(item.content_hash, size)
                ready.append((item, size))
            if not ready:
                return not left
            source = self._choose([item.content_hash for item, _ in ready])
            has = self._peers.get(source)
            mine = [pair for pair in ready if has is None or pair[0].content_hash in has]
            self._busy[source] += 1
            try:
                await self._receive(left, partials, mine, source)
            finally:
                self._busy[source] -= 1
            return True
        finally:
            # Not on the loop: a write that is under way must end first. Nor given up when this
            # task is cancelled again.
            await asyncio.shield(self._disk.run(partials.close))

    async def _see_other(self, left: dict[bytes, Wanted], item: Wanted) -> None:
        """Another process writes a tensor, or has just made it whole."""
        has = partial(self._cache.has, item.content_hash, item.num_bytes)
        if await self._disk.run(has):
            self._progress.set_present(item.content_hash, item.num_bytes)
            del left[item.content_hash]
        else:
            size = await self._disk.run(partial(self._cache.partial_bytes, item.content_hash))
            self._progress.set_present(item.content_hash, min(size, item.num_bytes))

    def _choose(self, hashes: Sequence[bytes]) -> WeightSource:
        """The least busy peer that has one of them, else the coordinator."""
        having = [p for p, has in self._peers.items() if any(h in has for h in hashes)]
        return min(having, key=lambda p: self._busy[p], default=self._coordinator)

    async def _receive(
        self,
        left: dict[bytes, Wanted],
        partials: OpenPartials,
        mine: Sequence[tuple[Wanted, int]],
        source: WeightSource,
    ) -> None:
        """Take a stream of chunks in."""
        sizes = [size for _, size in mine]
        current = 0
        asked = [(item.content_hash, size) for item, size in mine]
        async with aclosing(_remote(source, asked)) as chunks:
            async for chunk in chunks:
                is_next = current <= chunk.index < len(mine)
                current = chunk.index if is_next else current
                item = mine[current][0]
                room = item.num_bytes - sizes[current]
                if not (is_next and chunk.offset == sizes[current] and 0 < len(chunk.data) <= room):
                    raise _BadSource(
                        source,
                        ProtocolError(
                            f"{source} sent {len(chunk.data)} bytes for offset {chunk.offset} of "
                            f"tensor {chunk.index}, which were not asked for"
                        ),
                    )
                write = partial(partials.write, item.content_hash, chunk.data)
                sizes[current] = await self._disk.run(write)
                self._progress.received[source.name] += len(chunk.data)
                self._progress.set_present(item.content_hash, sizes[current])
                if sizes[current] == item.num_bytes and not await self._finish(
                    left, partials, item
                ):
                    raise _BadSource(source, _WrongContent(f"{source} sent a wrong {item.name}"))
        if any(item.content_hash in left for item, _ in mine):
            raise _BadSource(source, PeerLost(f"{source} did not send all", node_id=source.name))

    async def _finish(
        self, left: dict[bytes, Wanted], partials: OpenPartials, item: Wanted
    ) -> bool:
        """Whether a tensor is right now that it is whole; a wrong one is begun anew."""
        if await self._disk.run(partial(partials.finish, item.content_hash)):
            self._progress.set_present(item.content_hash, item.num_bytes)
            del left[item.content_hash]
            return True
        self._progress.set_present(item.content_hash, 0)
        self._wrong[item.content_hash] += 1
        if self._wrong[item.content_hash] > self._limits.max_wrong:
            raise CheckpointError(
                f"tensor {item.name} came {self._wrong[item.content_hash]} times with another "
                f"content than its hash {item.content_hash.hex()[:12]} says; check the files and "
                "the memory of the coordinator's host, and this host's disk"
            )
        logger.warning("%s has not the content that its hash says; it is fetched again", item.name)
        return False


class _WrongContent(StagemeshError):
    """A tensor is not what its hash says."""


async def _remote(
    source: WeightSource, asked: Sequence[tuple[bytes, int]]
) -> AsyncGenerator[Chunk, None]:
    """What a source sends; its errors become `_BadSource`, unlike those of this host's disk."""
    try:
        async with aclosing(source.chunks(asked)) as chunks:
            async for chunk in chunks:
                yield chunk
    except StagemeshError as error:
        raise _BadSource(source, error) from error


async def ask(peer: WeightSource, hashes: Sequence[bytes]) -> frozenset[bytes]:
    """What a peer has; nothing when it does not answer, as others have it too."""
    try:
        return await peer.have(hashes)
    except StagemeshError as error:
        logger.info("no weights from %s: %s", peer, error)
        return frozenset()


def _batches(wanted: Sequence[Wanted], limits: FetchLimits) -> list[list[Wanted]]:
    """Tensors in their order, cut into parts of bounded size; equal ones count once."""
    batches: list[list[Wanted]] = []
    room = 0
    for item in {item.content_hash: item for item in wanted}.values():
        if not batches or len(batches[-1]) == limits.batch_tensors or room < item.num_bytes:
            batches.append([])
            room = limits.batch_bytes
        batches[-1].append(item)
        room -= item.num_bytes
    return batches
