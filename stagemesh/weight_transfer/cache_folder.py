"""Where a user's caches lie."""

import os
import sys
from pathlib import Path


def default_cache_folder() -> Path:
    """The folder "stagemesh" in the user's folder for caches; it need not exist.

    That is `XDG_CACHE_HOME` where it is set to an absolute path, as its specification asks, else
    what the platform has: ~/.cache, ~/Library/Caches or %LOCALAPPDATA%.
    """
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    if chosen and Path(chosen).is_absolute():
        return Path(chosen) / "stagemesh"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "stagemesh"
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "stagemesh"
    return Path.home() / ".cache" / "stagemesh"


def compiled_code_folder() -> Path:
    """Where compiled stages keep their code; it need not exist."""
    return default_cache_folder() / "compiled"
