"""Models from the Hugging Face hub, by huggingface_hub and its cache on this machine.

The hub is asked first. Where it is not reachable, what an earlier download left in the cache is
taken, and the log says so. Nothing but configs, tokenizers, safetensors and one GGUF file is
fetched; pickles never are.

Files are fetched one by one and not by the library's snapshot_download, whose questions (which
commit, which files) have no deadline: a hub that fell silent between two of them would never be
noticed.
"""

import logging
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import (
    HfApi,
    constants,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    snapshot_download,
)

# HTTPError is httpx's or its successor's, whichever the library uses.
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    GatedRepoError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.tqdm import tqdm

from coordinator.hub_name import SIDE_FILES, HubName, choose_weights
from stagemesh.checkpoint.folder import INDEX_NAME, read_weight_map
from stagemesh.errors import CheckpointError, ModelError, ModelNotFound

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 10.0
"""Longest wait for the hub to answer a question."""

_MAX_DOWNLOADS = 8
"""Files that are fetched at a time."""

Progress = Callable[[int], None]
"""Called with numbers of bytes as they arrive, from several threads."""


def fetch_model(
    name: HubName,
    *,
    cache: Path | None = None,
    endpoint: str | None = None,
    answer_seconds: float = ANSWER_SECONDS,
    on_bytes: Progress | None = None,
) -> Path:
    """Download what is missing of a model and return its folder or GGUF file.

    Args:
        name: which.
        cache: folder of the cache; by default the hub library's (`HF_HUB_CACHE`).
        endpoint: of the hub; by default the hub library's (`HF_ENDPOINT`).
        answer_seconds: deadline of each question to the hub: what it has, and where the first file
            is. Once downloads have begun the library repeats what fails: a question six times with
            60 s each, a download six times with `HF_HUB_DOWNLOAD_TIMEOUT` (10 s) without a byte.
        on_bytes: told how much has arrived.

    Raises:
        ModelNotFound: there is no such model, revision or file; it is gated; or the hub is not
            reachable and the cache lacks it.
        UnsupportedModel: the repository holds no format that is read.
        CheckpointError: its index is no index, or names files that the repository lacks.
    """
    hub = _Hub(
        name, cache=cache, endpoint=endpoint, answer_seconds=answer_seconds, on_bytes=on_bytes
    )
    try:
        return hub.download()
    except (GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise ModelNotFound(f"model {name}: {_refusal(error)}") from error
    except (HTTPError, OSError) as error:
        return hub.cached(error)


def _refusal(error: Exception) -> str:
    if isinstance(error, GatedRepoError):
        return (
            "access is gated: accept its terms on the hub, and give a token of that account in "
            "HF_TOKEN"
        )
    if isinstance(error, RevisionNotFoundError):
        return "the repository has no such revision"
    return (
        "there is no such folder or file here, and no such repository on the hub (or a private "
        "one: give a token in HF_TOKEN)"
    )


class _Hub:
    """One model's files on the hub and in the cache."""

    def __init__(
        self,
        name: HubName,
        *,
        cache: Path | None,
        endpoint: str | None,
        answer_seconds: float,
        on_bytes: Progress | None,
    ) -> None:
        self._name = name
        self._cache = cache if cache is not None else Path(constants.HF_HUB_CACHE)
        self._endpoint = endpoint or constants.ENDPOINT
        self._answer_seconds = answer_seconds
        self._bars = _bar_class(on_bytes)

    def download(self) -> Path:
        """Fetch what is missing."""
        info = HfApi(endpoint=self._endpoint).model_info(
            self._name.repo, revision=self._name.revision, timeout=self._answer_seconds
        )
        files = {sibling.rfilename for sibling in info.siblings or ()}
        first = choose_weights(files, self._name)
        self._expect_answer(first)
        # The first by the name of the revision, so that the cache keeps what that was; the others
        # by the commit of the first, so that all are of one.
        folder = _snapshot_of(self._fetch(first, self._name.revision), first)
        self._fetch_all((name for name in SIDE_FILES if name in files), folder.name)
        if first == INDEX_NAME:
            shards = _shards(folder, files, where=f"model {self._name}: the repository")
            self._fetch_all(shards, folder.name)
        return folder / first if first.endswith(".gguf") else folder

    def _expect_answer(self, file: str) -> None:
        """Ask for one file's place once; the library's own question is repeated for minutes."""
        url = hf_hub_url(
            self._name.repo, file, revision=self._name.revision, endpoint=self._endpoint
        )
        get_hf_file_metadata(url, timeout=self._answer_seconds, endpoint=self._endpoint)

    def _fetch(self, file: str, revision: str | None) -> Path:
        path = hf_hub_download(
            self._name.repo,
            file,
            revision=revision,
            cache_dir=self._cache,
            endpoint=self._endpoint,
            etag_timeout=self._answer_seconds,
            tqdm_class=self._bars,
        )
        return Path(path)

    def _fetch_all(self, files: Iterable[str], commit: str) -> None:
        with ThreadPoolExecutor(_MAX_DOWNLOADS) as pool:
            futures = [pool.submit(self._fetch, file, commit) for file in files]
            try:
                for future in futures:
                    future.result()
            finally:  # where one failed, those that have not begun do not begin
                pool.shutdown(wait=False, cancel_futures=True)

    def cached(self, error: BaseException) -> Path:
        """What is in the cache already."""
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        nowhere = (
            f"model {self._name}: no such folder or file here, the hub at {self._endpoint} cannot "
            f"be asked ({reason:.300}), and the cache {self._cache} lacks it"
        )
        try:
            folder = Path(
                snapshot_download(
                    self._name.repo,
                    revision=self._name.revision,
                    cache_dir=self._cache,
                    local_files_only=True,
                    allow_patterns=[],  # whatever is in it
                )
            )
        except LocalEntryNotFoundError as missing:
            raise ModelNotFound(nowhere) from missing
        names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        try:
            first = choose_weights(names, self._name)
            if first == INDEX_NAME:
                _shards(folder, names, where="the folder")
        except ModelError as missing:  # a download that was cut
            raise ModelNotFound(f"{nowhere}: {folder}: {missing}") from missing
        logger.warning(
            "model %s: the hub at %s cannot be asked (%.300s); taken from the cache, which may "
            "hold an older revision: %s",
            self._name,
            self._endpoint,
            reason,
            folder,
        )
        return folder / first if first.endswith(".gguf") else folder


def _snapshot_of(path: Path, file: str) -> Path:
    """The folder of a commit in the cache, from the place of one of its files."""
    return path.parents[len(PurePosixPath(file).parts) - 1]


def _shards(folder: Path, files: Collection[str], *, where: str) -> list[str]:
    """The files that a fetched index names, all of which must be among `files`."""
    shards = sorted(set(read_weight_map(folder / INDEX_NAME).values()))
    missing = [file for file in shards if file not in files]
    if missing:
        raise CheckpointError(f"{where} lacks {', '.join(missing[:5])}, which {INDEX_NAME} names")
    return shards


def _bar_class(on_bytes: Progress | None) -> type[Any]:
    """A progress bar for the hub library that draws nothing and tells `on_bytes`."""

    class _SilentBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # Of its two bars in bytes one counts what the network carries, the other what is there.
            name = str(kwargs.get("name") or "")
            self._counts = kwargs.get("unit") == "B" and not name.endswith(".transfer")
            super().__init__(  # type: ignore[no-untyped-call]
                *args, **{**kwargs, "disable": True}
            )

        def update(self, n: float | None = 1) -> bool | None:
            if on_bytes is not None and self._counts and n:
                on_bytes(int(n))
            return None

    return _SilentBar
