"""Where a node finds a model: files of its own, else its cache, filled over the network.

the coordinator's path -> the reference -> cache and network
`---- files with the same fingerprint ----'   `-- exactly the stage's tensors
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path

from node.cache_room import Use
from node.weight_cache import WeightCache
from node.weight_fetch import FetchLimits, Wanted, WeightFetcher, ask
from node.weight_progress import FetchProgress
from node.weight_source import Description, WeightSource
from stagemesh.errors import (
    CheckpointError,
    ModelError,
    ModelNotFound,
    ProtocolError,
)
from stagemesh.model_spec import ModelSpec, load_model_spec
from stagemesh.weight_transfer.disk_threads import DiskThreads
from stagemesh.weight_transfer.manifest import relocated

logger = logging.getLogger(__name__)

COORDINATOR = "coordinator"
"""The coordinator's name among the sources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWanted:
    """What part of which model a node needs."""

    name: str
    """What clients call it."""
    path: str
    """Where the coordinator has it."""
    reference: str
    """What the user asked for."""
    fingerprint: str
    """Of the model that was planned with."""
    start_layer: int
    end_layer: int
    weights_address: str = ""
    """Who sends its weights; empty for the coordinator that the node registered at."""
    peers: tuple[tuple[str, str], ...] = ()
    """(id, address) of nodes that may have some."""
    ranks: tuple[str, ...] = ()
    """Ids of the nodes that share the stage, in the order of their ranks; empty for one alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceConfig:
    """Where to look."""

    node_id: str
    coordinator: str | None
    """host:port of the coordinator that the node registered at."""
    token: str | None
    has_local_files: bool = True
    """Whether paths and references are tried."""
    is_streaming: bool = True
    """Whether weights are taken from the network."""
    limits: FetchLimits = field(default_factory=FetchLimits)
    """Bounds of a fetch."""


class ModelSource:
    """Finds models.

    Args:
        config: where to look.
        cache: where fetched weights are kept.
        disk: threads for files.
    """

    def __init__(self, config: SourceConfig, *, cache: WeightCache, disk: DiskThreads) -> None:
        self._config = config
        self._cache = cache
        self._disk = disk

    @contextlib.asynccontextmanager
    async def open(
        self, wanted: ModelWanted, progress: FetchProgress
    ) -> AsyncGenerator[ModelSpec, None]:
        """A model whose stage can be read, for the length of the block.

        Raises:
            ModelNotFound: it is not here and cannot be fetched.
            CheckpointError: files here are another model's and it cannot be fetched, or what is
                fetched is not what the coordinator says.
            CapacityExceeded: the cache has no room.
            PeerLost: nobody sends it.
        """
        address = wanted.weights_address or self._config.coordinator or ""
        can_stream = self._config.is_streaming and bool(address)
        try:
            spec = await self._disk.run(partial(self._find_local, wanted))
        except ModelError as error:
            if not can_stream:
                raise
            # Files that do not fit are a surprise; none at all is what streaming is for.
            level = logging.INFO if isinstance(error, ModelNotFound) else logging.WARNING
            logger.log(
                level,
                "%s comes from the weight cache, and what that lacks from %s: %s",
                wanted.name,
                address,
                error if level == logging.WARNING else self._no_files,
            )
        else:
            yield spec
            return
        async with contextlib.AsyncExitStack() as stack:
            coordinator = self._source(stack, COORDINATOR, address)
            spec, hashes = await self._describe(coordinator, wanted, progress)
            stage = {
                info.name: Wanted(
                    content_hash=hashes[info.name], num_bytes=info.num_bytes, name=info.name
                )
                for info in spec.tensors_for_stage(wanted.start_layer, wanted.end_layer)
            }
            sizes = {item.content_hash: item.num_bytes for item in stage.values()}
            progress.total_bytes = sum(sizes.values())
            # What is damaged goes; then there is room for it; then nobody evicts the rest.
            await self._missing(stage.values(), progress)
            stack.enter_context(await self._reserve(sizes, what=wanted.name))
            missing = await self._missing(stage.values(), progress)
            if missing:
                await self._fetch(stack, coordinator, wanted, missing, progress)
            else:
                logger.info("all weights are cached", extra={"model": wanted.name})
            yield relocated(spec, lambda info: self._place(stage.get(info.name)))

    @property
    def _no_files(self) -> str:
        here = self._config.has_local_files
        return "there are no files of it here" if here else "files here are not used"

    def _find_local(self, wanted: ModelWanted) -> ModelSpec:
        if not self._config.has_local_files:
            raise ModelNotFound(
                f"this node uses no files of its own (--no-local-files) for {wanted.name}; "
                "to have them sent it needs a --coordinator"
            )
        return find_local(wanted)

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

    async def _describe(
        self, coordinator: WeightSource, wanted: ModelWanted, progress: FetchProgress
    ) -> tuple[ModelSpec, Mapping[str, bytes]]:
        found = Description()
        # Stands for the file of each tensor that is not fetched; it does not exist.
        nowhere = self._cache.folder / "not-fetched"
        parts = coordinator.describe(
            wanted.fingerprint, wanted.start_layer, wanted.end_layer, where=nowhere
        )
        async with contextlib.aclosing(parts) as descriptions:
            async for found in descriptions:
                progress.hashed_bytes = found.hashed_bytes
        if found.spec is None or found.spec.fingerprint != wanted.fingerprint:
            raise ProtocolError(f"{coordinator} did not describe {wanted.name}")
        stage = found.spec.tensors_for_stage(wanted.start_layer, wanted.end_layer)
        lacking = [info.name for info in stage if info.name not in found.hashes]
        if lacking:
            raise ProtocolError(f"{coordinator} told no hash of {', '.join(lacking[:3])}")
        return found.spec, found.hashes

    async def _reserve(self, sizes: Mapping[bytes, int], *, what: str) -> Use:
        task = asyncio.ensure_future(self._disk.run(partial(self._cache.reserve, sizes, what=what)))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            # The thread goes on, and nobody else would let go of what it reserves.
            task.add_done_callback(_let_go)
            raise

    async def _missing(self, stage: Iterable[Wanted], progress: FetchProgress) -> list[Wanted]:
        missing = []
        for item in stage:
            has = partial(self._cache.has, item.content_hash, item.num_bytes)
            if await self._disk.run(has):
                progress.set_present(item.content_hash, item.num_bytes)
            else:
                missing.append(item)
        return missing

    async def _fetch(
        self,
        stack: contextlib.AsyncExitStack,
        coordinator: WeightSource,
        wanted: ModelWanted,
        missing: Sequence[Wanted],
        progress: FetchProgress,
    ) -> None:
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
            progress=progress,
            limits=self._config.limits,
            fellows=[peer for peer in peers if peer.name in wanted.ranks],
        )
        await fetcher.fetch(self._in_order(missing, wanted.ranks))
        logger.info(
            "weights fetched",
            extra={"model": wanted.name, "bytes_from": dict(progress.received)},
        )

    def _in_order(self, missing: Sequence[Wanted], ranks: Sequence[str]) -> list[Wanted]:
        """Nodes that share a stage each begin elsewhere, and take the rest from each other."""
        if self._config.node_id not in ranks:
            return list(missing)
        first = sum(item.num_bytes for item in missing) * ranks.index(self._config.node_id)
        before = accumulate((item.num_bytes for item in missing), initial=0)
        start = next(i for i, size in enumerate(before) if size * len(ranks) >= first)
        return [*missing[start:], *missing[:start]]

    def _place(self, item: Wanted | None) -> Path | None:
        return None if item is None else self._cache.blob_path(item.content_hash)


def _let_go(task: "asyncio.Future[Use]") -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()


def find_local(wanted: ModelWanted) -> ModelSpec:
    """Find files at the coordinator's path or by the reference, and check that they are the same.

    Raises:
        ModelNotFound: neither leads to a model here.
        CheckpointError: the files differ from those that the coordinator planned with.
    """
    tried = []
    for place in dict.fromkeys((wanted.path, wanted.reference)):
        if not place:
            continue
        is_path = place == wanted.path
        if is_path and not Path(place).exists():
            tried.append(place)
            continue
        try:
            spec = load_model_spec(place, name=wanted.name)
        except ModelNotFound:
            tried.append(place)
            continue
        if spec.fingerprint != wanted.fingerprint:
            raise CheckpointError(
                f"the files of {wanted.name} at {spec.path} are not those that the "
                f"coordinator planned with (fingerprint {spec.fingerprint[:12]}, expected "
                f"{wanted.fingerprint[:12]}); give all hosts the same files"
            )
        return spec
    raise ModelNotFound(
        f"this node has no files of {wanted.name}; tried {', '.join(tried)}. Put the "
        "model at the same path on each host, or on a shared folder, or let the node fetch it: "
        "start it with a coordinator and without --local-only"
    )
