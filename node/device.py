"""Which device a node computes on, and what it has to offer."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from stagemesh.errors import ConfigError

PROCESS_BYTES = 512 * 2**20
"""What a node takes with torch and transformers loaded, before its first weight; roughly."""

_FREE_SHARE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A resolved device."""

    torch_device: torch.device
    num_threads: int
    num_cores: int
    """Cores of the machine that this process may use."""
    memory_bytes: int
    """Memory offered for weights and KV cache."""
    memory_total_bytes: int
    """Memory the device has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Memory of a device, now."""

    total_bytes: int
    """What the device has."""
    free_bytes: int
    """What could be taken now, within the limit."""
    limit_bytes: int = 0
    """What a container allows; 0 for no limit."""


def resolve_device(name: str, *, num_threads: int | None, memory_bytes: int | None) -> Device:
    """Turn `auto|cpu|cuda:N|mps` into a device of this machine and set torch's thread count.

    Raises:
        ConfigError: the machine has no such device.
    """
    device = _torch_device(name)
    threads = num_threads or len(os.sched_getaffinity(0)) if _has_affinity() else num_threads
    threads = threads or os.cpu_count() or 1
    torch.set_num_threads(threads)
    memory = read_memory(device)
    if memory_bytes is None:
        # What the process will have taken before it holds a weight is not there for weights.
        growth = 0
        if device.type == "cpu":
            growth = max(0, PROCESS_BYTES - psutil.Process().memory_info().rss)
        memory_bytes = max(0, int(memory.free_bytes * _FREE_SHARE) - growth)
    return Device(
        torch_device=device,
        num_threads=threads,
        num_cores=len(os.sched_getaffinity(0)) if _has_affinity() else os.cpu_count() or 1,
        memory_bytes=memory_bytes,
        memory_total_bytes=memory.limit_bytes or memory.total_bytes,
    )


def _has_affinity() -> bool:
    return hasattr(os, "sched_getaffinity")


def _torch_device(name: str) -> torch.device:
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda:0")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device must be auto, cpu, cuda:N or mps, got {name!r}") from error
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ConfigError(
                f"device {name}: this machine has {count} CUDA devices; try --device cpu"
            )
    elif device.type == "mps":
        if not torch.backends.mps.is_available():
            raise ConfigError("device mps: this machine has none; try --device cpu")
    elif device.type != "cpu":
        raise ConfigError(f"device must be auto, cpu, cuda:N or mps, got {name!r}")
    return device


def read_memory(device: torch.device) -> DeviceMemory:
    """Memory of a device; a container's limit bounds what is free of the machine's."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(total_bytes=total, free_bytes=free)
    memory = psutil.virtual_memory()
    limit = _cgroup_limit()
    if limit is None or limit >= memory.total:
        return DeviceMemory(total_bytes=memory.total, free_bytes=memory.available)
    used = psutil.Process().memory_info().rss
    return DeviceMemory(
        total_bytes=memory.total,
        free_bytes=min(memory.available, max(limit - used, 0)),
        limit_bytes=limit,
    )


def _cgroup_limit() -> int | None:
    """Memory limit of this process's cgroup in bytes, where there is one."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            return int(text)
    return None


def platform_text() -> str:
    """Operating system and Python, for `status`."""
    return f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
