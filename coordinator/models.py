"""From what a user calls a model to where its files are: on this machine, or from the hub."""

import importlib
import time
from dataclasses import replace
from threading import Lock

from rich.console import Console

from coordinator.config import DeploymentConfig
from coordinator.hub_name import parse_hub_name
from stagemesh.checkpoint.resolve import resolve_model
from stagemesh.errors import ModelNotFound

_SHOW_EVERY_SECONDS = 2.0


def locate_model(config: DeploymentConfig, *, console: Console) -> DeploymentConfig:
    """The same deployment with a model that is on this machine; downloads one that is not.

    What is here wins: a folder that is called org/name hides the hub's.

    Args:
        config: its model is a folder, a file, a known name, or a name on the hub.
        console: where the download is shown.

    Raises:
        ModelNotFound: it is nowhere.
        UnsupportedModel: the hub has it in no format that is read.
    """
    marked = parse_hub_name(config.model) if config.model.startswith("hf:") else None
    if marked is None:
        try:
            resolve_model(config.model)
        except ModelNotFound:
            marked = parse_hub_name(config.model)
            if marked is None:
                raise
        else:
            return config
    shown = _Shown(str(marked), console)
    # Only where a model comes from the hub: its library takes 0.2 s to import.
    path = importlib.import_module("coordinator.hub").fetch_model(marked, on_bytes=shown.add)
    shown.end()
    return replace(config, model=str(path), name=config.name or marked.short)


class _Shown:
    """A line about a download every few seconds, whatever the terminal."""

    def __init__(self, name: str, console: Console) -> None:
        self._name = name
        self._console = console
        self._lock = Lock()
        self._num_bytes = 0
        self._next = time.monotonic() + _SHOW_EVERY_SECONDS

    def add(self, num_bytes: int) -> None:
        """Count what has arrived; any thread."""
        with self._lock:
            self._num_bytes += num_bytes
            is_due = time.monotonic() >= self._next
            if is_due:
                self._next = time.monotonic() + _SHOW_EVERY_SECONDS
        if is_due:
            self._say("so far")

    def end(self) -> None:
        """Say how much it was in all."""
        if self._num_bytes:
            self._say("in all")

    def _say(self, when: str) -> None:
        size = self._num_bytes / 1e6
        self._console.print(f"{self._name}: downloaded {size:.1f} MB {when}", style="dim")
