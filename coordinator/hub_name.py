"""How a model on the Hugging Face hub is named, and which of its files are needed.

    [hf:]org/name[@revision][:file.gguf]

A name without an organisation needs "hf:", or it would be a typing error in a path.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import PurePosixPath

from stagemesh.checkpoint.folder import INDEX_NAME, SINGLE_NAME
from stagemesh.errors import ModelNotFound, UnsupportedModel

_PREFIX = "hf:"
_PART = r"[A-Za-z0-9](?:[\w.-]{0,94}[\w])?"
_NAME = re.compile(
    rf"(?P<repo>{_PART}(?:/{_PART})?)"
    r"(?:@(?P<revision>[\w.-]+(?:/[\w.-]+){0,3}))?"
    r"(?::(?P<file>[\w.-]+(?:/[\w.-]+){0,3}\.gguf))?",
    re.ASCII,
)
_MAX_NAME = 96
_MAX_REFERENCE = 500

SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
"""What is fetched besides the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """A model on the hub."""

    repo: str
    """Organisation and name."""
    revision: str | None = None
    """Branch, tag or commit; None for the default branch."""
    file: str | None = None
    """One GGUF file of several."""

    @property
    def short(self) -> str:
        """What clients call the model where nobody says otherwise."""
        return PurePosixPath(self.file).stem if self.file else self.repo.rpartition("/")[2]

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.repo}{revision}{f':{self.file}' if self.file else ''}"


def parse_hub_name(reference: str) -> HubName | None:
    """The hub name that a reference is; None when it is none.

    Raises:
        ModelNotFound: it begins with "hf:" and is none.
    """
    text = reference.removeprefix(_PREFIX)
    is_marked = text != reference
    match = _NAME.fullmatch(text) if len(text) <= _MAX_REFERENCE else None
    if match is not None:
        repo, revision, file = match["repo"], match["revision"], match["file"]
        segments = f"{revision or ''}/{file or ''}".split("/")
        is_plain = len(repo) <= _MAX_NAME and ".." not in repo and "--" not in repo
        # A segment of dots would climb out of the cache's folder.
        is_plain = is_plain and not any(segment and not segment.strip(".") for segment in segments)
        if is_plain and (is_marked or "/" in repo):
            return HubName(repo=repo, revision=revision, file=file)
    if is_marked:
        raise ModelNotFound(
            f"model {reference!r:.200}: not a name on the hub; "
            "write hf:org/name, hf:org/name@revision or hf:org/name:file.gguf"
        )
    return None


def choose_weights(files: Collection[str], name: HubName) -> str:
    """Which file to begin with: an index, the only safetensors file, or a GGUF file.

    Args:
        files: all files of the repository.
        name: what was asked for.

    Raises:
        ModelNotFound: the file that was asked for is not there, or there are several.
        UnsupportedModel: the repository has no format that is read.
    """
    ggufs = sorted(file for file in files if file.endswith(".gguf"))
    listed = ", ".join(ggufs[:20]) or "none"
    if name.file is not None:
        if name.file not in files:
            raise ModelNotFound(f"model {name}: the repository has no such file; it has {listed}")
        return name.file
    for candidate in (INDEX_NAME, SINGLE_NAME):
        if candidate in files:
            return candidate
    if len(ggufs) == 1:
        return ggufs[0]
    if ggufs:
        raise ModelNotFound(
            f"model {name}: the repository has several GGUF files; say which, for example "
            f"{name}:{ggufs[0]}; it has {listed}"
        )
    pickles = sorted(file for file in files if file.endswith((".bin", ".pt", ".pth", ".ckpt")))
    reason = (
        f"{pickles[0]} holds pickled weights, which are never loaded because they can run code; "
        "convert the model to safetensors"
        if pickles
        else f"it has neither {INDEX_NAME} nor {SINGLE_NAME} nor a .gguf file"
    )
    raise UnsupportedModel(f"model {name}: {reason}")
