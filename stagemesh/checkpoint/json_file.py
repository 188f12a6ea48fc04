"""Reading the small JSON files of a model folder. Torch-free."""

import json
import stat
from pathlib import Path
from typing import Any

from stagemesh.errors import CheckpointError

MAX_JSON_BYTES = 64 << 20
"""Largest JSON file that is read; the index of a model with 10**5 tensors has about 10 MB."""


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads a JSON file whose top level must be an object.

    Raises:
        CheckpointError: the file is missing, too large, no JSON, or no object.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: not a regular file")
        if status.st_size > MAX_JSON_BYTES:
            raise CheckpointError(
                f"{path}: {status.st_size} bytes, over the limit of {MAX_JSON_BYTES}"
            )
        parsed = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, got {type(parsed).__name__}")
    return parsed
