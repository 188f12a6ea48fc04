"""Brings the weights of a stage into the cache: what, then room for it, then what is missing."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

from node.cache_room import Use
from node.model_wanted import ModelWanted, SourceConfig
from node.weight_cache import WeightCache
from node.weight_fetch import Wanted, WeightFetcher, ask
from node.weight_progress import FetchProgress
from node.weight_source import KnownHash, WeightSource
from stagemesh.checkpoint.weight_part import WeightPart
from stagemesh.model_spec import ModelSpec, TensorInfo
from stagemesh.weight_transfer.disk_threads import DiskThreads
from stagemesh.weight_transfer.manifest import relocated

logger = logging.getLogger(__name__)

COORDINATOR = "coordinator"
"""The coordinator's name among the sources."""

Parts = Mapping[str, WeightPart | None]
"""Tensors by name, and which part of each; None for all of it."""

PartPlan = Callable[[ModelSpec], Awaitable[Parts]]
"""From a model without data to what of it a rank reads."""


class StageFetch:
    """One load of a stage without files.

    Args:
        wanted: which model, and which of its layers.
        config: who this node is.
        cache: where to.
        disk: threads for files.
        progress: counts.
    """

    def __init__(
        self,
        wanted: ModelWanted,
        *,
        config: SourceConfig,
        cache: WeightCache,
        disk: DiskThreads,
        progress: FetchProgress,
    ) -> None:
        self._wanted = wanted
        self._config = config
        self._cache = cache
        self._disk = disk
        self._progress = progress

    @contextlib.asynccontextmanager
    async def open(self, address: str, plan: PartPlan | None) -> AsyncGenerator[ModelSpec, None]:
        """The model with the stage's weights in the cache, which stay there within the block.

        Args:
            address: of the coordinator that serves the model.
            plan: says what is read, where that is not all of the layers' tensors.

        Raises:
            StagemeshError: see `ModelSource.open`.
        """
        wanted = self._wanted
        async with contextlib.AsyncExitStack() as stack:
            coordinator = self._source(stack, COORDINATOR, address)
            # Stands for the file of each tensor that is not fetched; it does not exist.
            nowhere = self._cache.folder / "not-fetched"
            spec = await coordinator.describe(wanted.fingerprint, where=nowhere)
            if plan is None:
                infos = spec.tensors_for_stage(wanted.start_layer, wanted.end_layer)
                parts: Parts = dict.fromkeys(info.name for info in infos)
            else:
                parts = await plan(spec)
            stage = await self._find_hashes(coordinator, spec, parts)
            items = [item for item, _ in stage.values()]
            sizes = {item.content_hash: item.num_bytes for item in items}
            self._progress.total_bytes = sum(sizes.values())
            # What is damaged goes; then there is room for it; then nobody evicts the rest.
            await self._missing(items)
            stack.enter_context(await self._reserve(sizes, what=wanted.name))
            missing = await self._missing(items)
            if missing:
                await self._fetch(stack, coordinator, missing)
            else:
                logger.info("all weights are cached", extra={"model": wanted.name})
            yield relocated(spec, lambda info: self._place(info, stage.get(info.name)))

    def _source(self, stack: contextlib.AsyncExitStack, name: str, address: str) -> WeightSource:
        source = WeightSource(
            name,
            address,
            token=self._config.token,
            node_id=self._config.node_id,
            stall_seconds=self._config.limits.silence_seconds,
        )
        stack.push_async_callback(source.close)
        return source

    async def _find_hashes(
        self, coordinator: WeightSource, spec: ModelSpec, parts: Parts
    ) -> dict[str, tuple[Wanted, WeightPart | None]]:
        """What to have in the cache of each tensor: the part that is read, or all of it."""
        known: Sequence[KnownHash] = ()
        hashing = coordinator.hashes(spec.fingerprint, list(parts.items()))
        async with contextlib.aclosing(hashing) as steps:
            async for step in steps:
                known, self._progress.hashed_bytes = step.hashes, step.hashed_bytes
        stage = {}
        for (name, part), found in zip(parts.items(), known, strict=True):
            info = replace(spec.tensors[name], part=part)
            item = Wanted(content_hash=found.content_hash, num_bytes=info.held_bytes, name=name)
            if found.whole_hash is not None and not await self._has(item):
                # From a time when this node had other parts.
                whole = replace(item, content_hash=found.whole_hash, num_bytes=info.num_bytes)
                if await self._has(whole):
                    item, part = whole, None
            stage[name] = (item, part)
        return stage

    async def _reserve(self, sizes: Mapping[bytes, int], *, what: str) -> Use:
        task = asyncio.ensure_future(self._disk.run(partial(self._cache.reserve, sizes, what=what)))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            # The thread goes on, and nobody else would let go of what it reserves.
            task.add_done_callback(_let_go)
            raise

    async def _missing(self, stage: Iterable[Wanted]) -> list[Wanted]:
        missing = []
        for item in stage:
            if await self._has(item):
                self._progress.set_present(item.content_hash, item.num_bytes)
            else:
                missing.append(item)
        return missing

    async def _has(self, item: Wanted) -> bool:
        return await self._disk.run(partial(self._cache.has, item.content_hash, item.num_bytes))

    async def _fetch(
        self,
        stack: contextlib.AsyncExitStack,
        coordinator: WeightSource,
        missing: Sequence[Wanted],
    ) -> None:
        wanted = self._wanted
        peers = [
            self._source(stack, node_id, address)
            for node_id, address in wanted.peers
            if node_id != self._config.node_id
        ]
        hashes = [item.content_hash for item in missing]
        answers = await asyncio.gather(*(ask(peer, hashes) for peer in peers))
        fetcher = WeightFetcher(
            self._cache,
            disk=self._disk,
            coordinator=coordinator,
            peers={peer: has for peer, has in zip(peers, answers, strict=True) if has},
            progress=self._progress,
            limits=self._config.limits,
            fellows=[peer for peer in peers if peer.name in wanted.ranks],
        )
        await fetcher.fetch(self._in_order(missing, wanted.ranks))
        logger.info(
            "weights fetched",
            extra={"model": wanted.name, "bytes_from": dict(self._progress.received)},
        )

    def _in_order(self, missing: Sequence[Wanted], ranks: Sequence[str]) -> list[Wanted]:
        """Nodes that share a stage each begin elsewhere, and take the rest from each other."""
        if self._config.node_id not in ranks:
            return list(missing)
        first = sum(item.num_bytes for item in missing) * ranks.index(self._config.node_id)
        before = accumulate((item.num_bytes for item in missing), initial=0)
        start = next(i for i, size in enumerate(before) if size * len(ranks) >= first)
        return [*missing[start:], *missing[:start]]

    def _place(
        self, info: TensorInfo, found: tuple[Wanted, WeightPart | None] | None
    ) -> TensorInfo:
        if found is None:
            return info
        item, part = found
        return replace(info, file=self._cache.blob_path(item.content_hash), offset=0, part=part)


def _let_go(task: "asyncio.Future[Use]") -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()
