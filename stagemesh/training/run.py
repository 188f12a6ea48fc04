"""A whole training on one rank: build, resume, step, measure, save.

run/
  history.jsonl      each step
  step-00000100/     checkpoints, which a coordinator can serve
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import ConfigError
from stagemesh.model_spec import load_model_spec
from stagemesh.parallel.mesh import open_mesh
from stagemesh.training.checkpoint import Position, load_training_state, save_checkpoint
from stagemesh.training.config import TrainConfig
from stagemesh.training.data import TokenBatches
from stagemesh.training.failure import RankFailure
from stagemesh.training.history import History, HistoryEntry
from stagemesh.training.train_step import TrainStep
from stagemesh.training.weights import FileWeights, WeightSource

HISTORY_NAME = "history.jsonl"
_HELD_OUT_BATCHES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What is trained, on what, and what is kept of it; the same on all ranks."""

    run: Path
    """Folder of the run, which all ranks see."""
    train: TrainConfig
    """How."""
    model: Mapping[str, Any]
    """Content of a config.json."""
    weights: WeightSource
    """First values."""
    tokens: torch.Tensor
    """[N], to train on."""
    held_out: torch.Tensor | None = None
    """[M], to measure with; too short for a batch, it makes a smaller one."""
    resume: Path | None = None
    """A checkpoint to go on from; its model and weights are taken."""
    save_every: int = 100
    """Steps between checkpoints; there is one after the last step, too."""
    keep: int = 2
    """Checkpoints that stay."""
    measure_every: int = 50
    """Steps between measurements with `held_out`, also done after the last step."""
    files: Sequence[Path] = field(default_factory=tuple)
    """Copied into each checkpoint."""
    device: str = "cpu"
    """Where to compute."""

    def __post_init__(self) -> None:
        for name in ("save_every", "keep", "measure_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What is there at the end."""

    checkpoint: Path
    """The last one."""
    first_held_out_loss: float | None
    """Before the first step of this process; None where nothing is held out, or too little."""
    entries: Sequence[HistoryEntry]
    """All steps; only on rank 0."""


def run_training(
    world: ProcessGroup,
    config: RunConfig,
    *,
    on_step: Callable[[HistoryEntry], None],
    before_step: Callable[[], None] = lambda: None,
) -> RunResult:
    """Train to `total_steps`. All ranks call it.

    Args:
        world: all ranks.
        config: what to do.
        on_step: called on each rank after each step.
        before_step: called on each rank before each step; may raise to end the run.

    Raises:
        ConfigError: the checkpoint is further than `total_steps`, or a setting is wrong.
        PeerLost: a rank is gone; the checkpoints that were written are whole.
        CommError, StageFailed, CheckpointError: the run failed otherwise.
    """
    train = config.train
    model, weights = config.model, config.weights
    if config.resume is not None:
        spec = load_model_spec(config.resume)
        model, weights = spec.config, FileWeights(spec)
    with open_mesh(world, train.topology) as mesh, RankFailure(mesh):
        training = TrainStep(
            model, mesh=mesh, config=train, weights=weights, device=torch.device(config.device)
        )
        position = Position()
        if config.resume is not None:
            position = load_training_state(training, checkpoint=config.resume)
        if position.step >= train.total_steps:
            raise ConfigError(
                f"{config.resume} has {position.step} steps already; ask for more than that many"
            )
        loop = _Loop(training, config, position)
        result = loop.run(on_step=on_step, before_step=before_step)
        training.close()
        return result


class _Loop:
    def __init__(self, training: TrainStep, config: RunConfig, position: Position) -> None:
        self._training = training
        self._config = config
        self._position = position
        train = config.train
        self._batches = self._cut(config.tokens)
        self._held_out: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
        if config.held_out is not None:
            self._held_out = self._cut(config.held_out).first_batches(
                _HELD_OUT_BATCHES, multiple_of=train.topology.dp
            )
        self._history: History | None = None
        if training.mesh.world.rank == 0:
            self._history = History(config.run / HISTORY_NAME, num_steps=position.step)
        self._total = train.total_steps

    def run(
        self, *, on_step: Callable[[HistoryEntry], None], before_step: Callable[[], None]
    ) -> RunResult:
        before = self._measure()
        checkpoint = self._config.run
        while self._position.step < self._total:
            before_step()
            entry = self._step()
            if self._history is not None:
                self._history.add(entry)
            on_step(entry)
            if self._is_due(self._config.save_every):
                checkpoint = save_checkpoint(
                    self._training,
                    run=self._config.run,
                    position=self._position,
                    keep=self._config.keep,
                    files=self._config.files,
                )
        return RunResult(
            checkpoint=checkpoint,
            first_held_out_loss=before,
            entries=() if self._history is None else self._history.entries,
        )

    def _step(self) -> HistoryEntry:
        start = time.perf_counter()
        batch = self._batches.batch(self._position.num_sequences)
        report = self._training.step(*batch, step=self._position.step)
        seconds = time.perf_counter() - start
        self._position = Position(
            step=self._position.step + 1,
            num_sequences=self._position.num_sequences + self._config.train.batch_size,
        )
        return HistoryEntry(
            step=self._position.step,
            loss=report.loss,
            grad_norm=report.grad_norm,
            learning_rate=report.learning_rate,
            seconds=seconds,
            held_out_loss=self._measure() if self._is_due(self._config.measure_every) else None,
        )

    def _measure(self) -> float | None:
        losses = [self._training.evaluate(*batch) for batch in self._held_out]
        return sum(losses) / len(losses) if losses else None

    def _is_due(self, every: int) -> bool:
        return self._position.step % every == 0 or self._position.step == self._total

    def _cut(self, tokens: torch.Tensor) -> TokenBatches:
        train = self._config.train
        return TokenBatches(
            tokens,
            sequence_length=train.sequence_length,
            batch_size=train.batch_size,
            seed=train.seed,
        )
