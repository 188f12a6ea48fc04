"""Where a node finds a model: files of its own, else its cache, filled over the network.

the coordinator's path -> the reference -> cache and network
`---- files with the same fingerprint ----'   `-- exactly the stage's tensors, or a rank's parts
"""

import contextlib
import logging
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path

from node.model_wanted import ModelWanted, SourceConfig
from node.stage_fetch import PartPlan, StageFetch
from node.weight_cache import WeightCache
from node.weight_progress import FetchProgress
from stagemesh.errors import CheckpointError, ModelError, ModelNotFound
from stagemesh.model_spec import ModelSpec, load_model_spec
from stagemesh.weight_transfer.disk_threads import DiskThreads

logger = logging.getLogger(__name__)


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
        self, wanted: ModelWanted, progress: FetchProgress, *, plan: PartPlan | None = None
    ) -> AsyncGenerator[ModelSpec, None]:
        """A model whose stage can be read, for the length of the block.

        Args:
            wanted: which model, and which of its layers.
            progress: counts.
            plan: says what of it is read, where that is not all of the layers' tensors.

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
        fetch = StageFetch(
            wanted, config=self._config, cache=self._cache, disk=self._disk, progress=progress
        )
        async with fetch.open(address, plan) as spec:
            yield spec

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
