"""Where checkpoints lie, and how one gets there: whole, or not at all. Torch-free.

    run/
      step-00000100/         a checkpoint: a model folder, and the state to train on
      step-00000200/
      .step-00000300.part    one that is being written, or was when its writer died

A checkpoint is written under a hidden name and renamed when all of it is on the disk. One that is
removed gets a hidden name first. So a folder `step-N` is whole, however a process ends.
"""

import re
import shutil
from pathlib import Path
from typing import Any

from stagemesh.checkpoint.json_file import read_json_object
from stagemesh.errors import CheckpointError, ConfigError
from stagemesh.parallel.fsdp.manifest import sync_path

STATE_NAME = "training.json"
FORMAT = "stagemesh-training"
VERSION = 1

_NAME = re.compile(r"step-(\d{8,})")
_HIDDEN = re.compile(r"\.step-\d+\.(part|old)")


def list_checkpoints(run: Path) -> list[Path]:
    """The whole checkpoints of a run, the oldest first."""
    if not run.is_dir():
        return []
    found = [path for path in run.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def latest_checkpoint(run: Path) -> Path | None:
    """The last one; None where there is none."""
    return next(reversed(list_checkpoints(run)), None)


def step_of(path: Path) -> int:
    """The number in a checkpoint's name."""
    return int(path.name.removeprefix("step-"))


def checkpoint_path(run: Path, step: int) -> Path:
    """Where the checkpoint after so many steps belongs."""
    return run / f"step-{step:08}"


def part_path(run: Path, step: int) -> Path:
    """Where it is written."""
    return run / f".step-{step:08}.part"


def begin_checkpoint(run: Path, step: int) -> Path:
    """An empty folder to write to."""
    part = part_path(run, step)
    if part.exists():
        shutil.rmtree(part)
    part.mkdir(parents=True)
    return part


def commit_checkpoint(run: Path, step: int) -> Path:
    """Give what was written its name; in place of one of the same name."""
    part, final = part_path(run, step), checkpoint_path(run, step)
    for path in (*part.iterdir(), part):
        sync_path(path)
    if final.exists():
        _remove(final)
    part.rename(final)
    sync_path(run)
    return final


def remove_old(run: Path, *, keep: int) -> None:
    """Remove all but the last `keep` checkpoints, and what dead writers have left."""
    for path in list_checkpoints(run)[: -max(1, keep)]:
        _remove(path)
    for path in run.iterdir():
        if _HIDDEN.fullmatch(path.name):
            shutil.rmtree(path)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint's training.json says.

    Raises:
        CheckpointError: it is not there, or of another format.
    """
    state = read_json_object(checkpoint / STATE_NAME)
    if (state.get("format"), state.get("version")) != (FORMAT, VERSION):
        raise CheckpointError(
            f"{checkpoint / STATE_NAME}: must be {FORMAT} version {VERSION}, got "
            f"{state.get('format')!r} version {state.get('version')!r}"
        )
    for name in ("step", "num_sequences"):
        value = state.get(name)
        if not isinstance(value, int) or value < 0:
            raise CheckpointError(f"{checkpoint / STATE_NAME}: {name} must be a number >= 0")
    settings = state.setdefault("settings", {})
    if not isinstance(settings, dict) or not all(
        isinstance(value, int | float | str) for value in settings.values()
    ):
        raise CheckpointError(f"{checkpoint / STATE_NAME}: settings must be numbers and words")
    return state


def find_checkpoint(path: Path) -> Path:
    """A checkpoint, or the last one of a run.

    Raises:
        ConfigError: it is neither.
    """
    if (path / STATE_NAME).is_file():
        return path
    found = latest_checkpoint(path)
    if found is None:
        raise ConfigError(f"{path}: neither a checkpoint nor a folder with any (step-*)")
    return found


def _remove(path: Path) -> None:
    hidden = path.with_name(f".{path.name}.old")
    if hidden.exists():
        shutil.rmtree(hidden)
    path.rename(hidden)
    shutil.rmtree(hidden)
