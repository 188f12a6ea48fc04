"""Where compiled code is kept, under which names, and what making it needs."""

import hashlib
import os
import platform
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

from stagemesh.errors import ConfigError
from stagemesh.models.draft import DTYPES
from stagemesh.version import SOFTWARE_VERSION

_FORMAT = 2
"""Raised when the same key would mean other code."""

_COMPILERS = ("g++", "clang++", "c++")


def package_path(folder: Path, key: str) -> Path:
    """The file of one form of one kind."""
    return folder / f"{key}.pt2"


def make_private(folder: Path) -> None:
    """Make the folder, or see that nobody else can write to it: what lies there is run.

    Raises:
        ConfigError: somebody else can.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ConfigError(
            f"others can write to {folder}, where compiled code is kept; make it yours alone "
            "(chown, chmod 700)"
        )


def environment(
    config: dict[str, Any], *, dtype: torch.dtype, device: torch.device, num_threads: int
) -> dict[str, Any]:
    """All that compiled code depends on beside the layer itself.

    Args:
        config: the family's configuration.
        dtype: the run dtype.
        device: where it runs.
        num_threads: loops are cut for so many.
    """
    return {
        "format": _FORMAT,
        "stagemesh": SOFTWARE_VERSION,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": _machine(device),
        "device": device.type,
        "dtype": next(name for name, value in DTYPES.items() if value == dtype),
        "num_threads": num_threads,
        "config": config,
    }


def compiler() -> str | None:
    """The C++ compiler that torch would use, if there is one."""
    chosen = os.environ.get("CXX")
    names = (chosen,) if chosen else _COMPILERS
    return next((found for name in names if (found := shutil.which(name))), None)


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"
    # Code is made for exactly this CPU's instructions.
    flags = _cpu_flags()
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {flags}"


def _cpu_flags() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return platform.processor()
    lines = [line for line in text.splitlines() if line.startswith(("flags", "Features"))]
    return hashlib.sha256((lines[0] if lines else "").encode()).hexdigest()[:16]
