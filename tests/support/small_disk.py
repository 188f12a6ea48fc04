"""A disk of a given size: a tmpfs, which only root may mount."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Mount a disk at `folder` for the length of the block; skips the test where that is not ours.

    Yields:
        A function that gives the disk another size, in bytes.
    """
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a tmpfs needs root and mount")
    folder.mkdir()
    mounted = _run("mount", "-t", "tmpfs", "-o", f"size={num_bytes},mode=700", "tmpfs", folder)
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")

    def resize(size: int) -> None:
        done = _run("mount", "-o", f"remount,size={size}", folder)
        assert done.returncode == 0, done.stderr

    try:
        yield resize
    finally:
        # Lazily: a daemon's thread may still have a file open.
        _run("umount", "--lazy", folder)


def _run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=10, check=False)
