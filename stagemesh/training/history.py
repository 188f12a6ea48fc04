"""What each step of a training was like, as lines of JSON that outlive the process."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stagemesh.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEntry:
    """One optimizer step."""

    step: int
    """Its number, from 1."""
    loss: float
    """Mean over the tokens of its batch, before the update."""
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    """What it was."""
    seconds: float
    """How long the step took."""
    held_out_loss: float | None = None
    """After the update, on text that is not trained on; None where it was not measured."""


class History:
    """The entries of a run, in a file; a run that goes on from a step forgets what came after."""

    def __init__(self, path: Path, *, num_steps: int = 0) -> None:
        """Keep the first `num_steps` entries of the file, if there is one.

        Raises:
            CheckpointError: the file is no history.
        """
        self._path = path
        self.entries = [entry for entry in read_history(path) if entry.step <= num_steps]
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps(dataclasses.asdict(entry)) + "\n" for entry in self.entries)
        path.write_text("".join(lines), encoding="utf-8")

    def add(self, entry: HistoryEntry) -> None:
        """Note a step."""
        self.entries.append(entry)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(entry)) + "\n")


def read_history(path: Path) -> Sequence[HistoryEntry]:
    """The entries of a file; none where there is no file. A last line that is cut off is left out.

    Raises:
        CheckpointError: it is no history.
    """
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    try:
        return [HistoryEntry(**json.loads(line)) for line in whole]
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is no history of a training: {error}") from error
