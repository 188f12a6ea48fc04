"""Checkpoints of a training: written from any topology, loaded into any other.

    config.json, model-0000P-of-0000N.safetensors, model.safetensors.index.json
                      the model as transformers and our coordinator load it
    optimizer-0000P-of-0000N.safetensors
                      the optimizer's state as KEY/NAME, in the shapes of the whole parameters
    training.json     step, position in the data, settings, files of the optimizer
    rng.safetensors   torch's random state

There are as many files as pipeline ranks wrote; nothing else tells of the topology. A tied head is
there once, as the embedding. The folder must be one that all ranks see.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from stagemesh.errors import CheckpointError
from stagemesh.parallel.fsdp.checkpoint import together
from stagemesh.training.checkpoint_folder import (
    FORMAT,
    STATE_NAME,
    VERSION,
    begin_checkpoint,
    checkpoint_path,
    commit_checkpoint,
    part_path,
    read_state,
    remove_old,
)
from stagemesh.training.train_step import TrainStep
from stagemesh.training.weights import EMBEDDING, HEAD

_RNG_NAME = "rng.safetensors"
_INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far a training has come."""

    step: int = 0
    """Optimizer steps that were made."""
    num_sequences: int = 0
    """Sequences that were taken from the data."""


def save_checkpoint(
    training: TrainStep,
    *,
    run: Path,
    position: Position,
    keep: int = 2,
    files: Sequence[Path] = (),
) -> Path:
    """Write a checkpoint, and remove old ones. All ranks call it.

    Args:
        training: what to write.
        run: folder of the run's checkpoints, seen by all ranks.
        position: where it stands.
        keep: checkpoints that stay, this one among them.
        files: copied into it, as those of a tokenizer.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: on all ranks, if one could not write. Earlier checkpoints are untouched.
    """
    world, step = training.mesh.world, position.step
    tensors, optimizer = _gather(training)
    name = f"{training.mesh.pp.rank + 1:05}-of-{training.mesh.pp.size:05}.safetensors"
    part = part_path(run, step)

    def begin() -> None:
        begin_checkpoint(run, step)

    def write() -> None:
        # Copies: safetensors refuses views that share memory.
        save_file(_copies(tensors), part / f"model-{name}", {"format": "pt"})
        save_file(_copies(optimizer), part / f"optimizer-{name}", {"format": "pt"})

    def finish() -> None:
        _write_rest(part, training, position)
        for path in files:
            shutil.copyfile(path, part / path.name)
        commit_checkpoint(run, step)
        remove_old(run, keep=keep)

    is_first = world.rank == 0
    failure = f"{checkpoint_path(run, step)}: the checkpoint was not written"
    together(world, failure, begin if is_first else None)
    together(world, failure, write if training.replicas[0].is_writer else None)
    together(world, failure, finish if is_first else None)
    return checkpoint_path(run, step)


def load_training_state(training: TrainStep, *, checkpoint: Path) -> Position:
    """Take optimizer and random state out of a checkpoint. All ranks call it.

    The weights come with the TrainStep itself: `FileWeights(load_model_spec(checkpoint))`.

    Raises:
        CheckpointError: on all ranks, if one cannot load it.
    """
    found: list[Position] = []

    def load() -> None:
        state = read_state(checkpoint)
        reader = _OptimizerReader(checkpoint, state, is_tied=_is_tied(training))
        for replica in training.replicas:
            replica.load_optimizer_state(reader.read)
        rng = _open(checkpoint / _RNG_NAME).get_tensor("cpu")
        torch.set_rng_state(rng)
        found.append(Position(step=state["step"], num_sequences=state["num_sequences"]))

    together(training.mesh.world, f"{checkpoint}: the checkpoint was not loaded", load)
    return found[0]


class _OptimizerReader:
    """The optimizer's state by name of parameter."""

    def __init__(self, checkpoint: Path, state: Mapping[str, Any], *, is_tied: bool) -> None:
        names = state.get("optimizer_files")
        if not isinstance(names, list) or any(Path(str(n)).name != n for n in names):
            raise CheckpointError(f"{checkpoint / STATE_NAME}: optimizer_files must be file names")
        self._is_tied = is_tied
        self._path = checkpoint
        self._places: dict[str, dict[str, Any]] = {}
        for name in names:
            file = _open(checkpoint / name)
            for key in file.keys():  # noqa: SIM118 -- no mapping
                kind, _, parameter = key.partition("/")
                self._places.setdefault(parameter, {})[kind] = file

    def read(self, name: str) -> dict[str, torch.Tensor]:
        """What there is for a parameter; a tied head has the embedding's."""
        if name == HEAD and self._is_tied:
            name = EMBEDDING
        places = self._places.get(name)
        if places is None:
            raise CheckpointError(f"{self._path}: no optimizer state of {name}")
        return {kind: file.get_tensor(f"{kind}/{name}") for kind, file in places.items()}


def _gather(training: TrainStep) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Whole tensors of this pipeline rank, on its writer: of the model, and of the optimizer."""
    tensors: dict[str, torch.Tensor] = {}
    optimizer: dict[str, torch.Tensor] = {}
    for replica in training.replicas:
        tensors |= replica.gather_parameters()
        for name, state in replica.gather_optimizer_state().items():
            optimizer |= {f"{key}/{name}": value for key, value in state.items()}
    if _is_tied(training):
        tensors.pop(HEAD, None)
        for key in [key for key in optimizer if key.endswith(f"/{HEAD}")]:
            del optimizer[key]
    return tensors, optimizer


def _write_rest(part: Path, training: TrainStep, position: Position) -> None:
    """What is there once: config, index, state."""
    weight_map: dict[str, str] = {}
    size = 0
    for path in sorted(part.glob("model-*.safetensors")):
        size += path.stat().st_size
        file = _open(path)
        weight_map |= dict.fromkeys(file.keys(), path.name)
    topology = training.config.topology
    state = {
        "format": FORMAT,
        "version": VERSION,
        "step": position.step,
        "num_sequences": position.num_sequences,
        "optimizer_files": sorted(path.name for path in part.glob("optimizer-*.safetensors")),
        "written_by": {"dp": topology.dp, "pp": topology.pp, "tp": topology.tp},
        "settings": training.config.settings,
    }
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    for name, content in (
        ("config.json", {**training.model, "dtype": training.config.parameter_dtype}),
        (_INDEX_NAME, index),
        (STATE_NAME, state),
    ):
        (part / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    save_file({"cpu": torch.get_rng_state()}, part / _RNG_NAME)
    for path in part.glob("*.safetensors"):
        # safetensors makes files for their owner alone; whoever serves it may be another user.
        path.chmod((part / STATE_NAME).stat().st_mode)


def _is_tied(training: TrainStep) -> bool:
    return bool(training.model.get("tie_word_embeddings"))


def _copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().clone() for name, value in tensors.items()}


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: {error}") from error
