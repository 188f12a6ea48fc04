"""Checkpoints that one topology writes and another trains on with; and broken ones."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import CheckpointError, ConfigError
from stagemesh.model_spec import load_model_spec
from stagemesh.parallel.mesh import open_mesh
from stagemesh.training import checkpoint_folder
from stagemesh.training.checkpoint import Position, load_training_state, save_checkpoint
from stagemesh.training.checkpoint_folder import (
    begin_checkpoint,
    find_checkpoint,
    latest_checkpoint,
    list_checkpoints,
    part_path,
)
from stagemesh.training.config import TrainConfig
from stagemesh.training.train_step import TrainStep
from stagemesh.training.weights import FileWeights, FreshWeights
from tests.support.ranks import run_ranks
from tests.training.support import (
    FP32,
    MODEL,
    TIED,
    batch_of,
    make_config,
    relative_error,
    run_steps,
    sgd,
    train_alone,
)

HALF, WHOLE = 6, 12


def adamw(parameters: Any) -> torch.optim.Optimizer:
    # A large eps: what is left of a gradient near 0 is a small step, not a full one.
    return torch.optim.AdamW(parameters, eps=1e-2)


def write_half(
    run: Path,
    config: TrainConfig,
    *,
    model: dict[str, Any] = TIED,
    make_optimizer: Any = adamw,
) -> None:
    """Train the first half on a topology, and save."""

    def work(world: ProcessGroup) -> None:
        with open_mesh(world, config.topology) as mesh:
            step = TrainStep(
                model,
                mesh=mesh,
                config=config,
                weights=FreshWeights(model, seed=0),
                make_optimizer=make_optimizer,
            )
            run_steps(step, first=0, last=HALF)
            save_checkpoint(step, run=run, position=Position(step=HALF, num_sequences=99))
            step.close()

    run_ranks(config.topology.world_size, work)


def finish(run: Path, config: TrainConfig, *, make_optimizer: Any = adamw) -> list[float]:
    """Load what is there on a topology, and train the other half; its losses."""

    def work(world: ProcessGroup) -> list[float]:
        checkpoint = latest_checkpoint(run)
        assert checkpoint is not None
        spec = load_model_spec(checkpoint)
        with open_mesh(world, config.topology) as mesh:
            step = TrainStep(
                spec.config,
                mesh=mesh,
                config=config,
                weights=FileWeights(spec),
                make_optimizer=make_optimizer,
            )
            position = load_training_state(step, checkpoint=checkpoint)
            assert position == Position(step=HALF, num_sequences=99)
            reports = run_steps(step, first=HALF, last=WHOLE)
            step.close()
            return [report.loss for report in reports]

    ranks: list[list[float]] = run_ranks(config.topology.world_size, work)
    assert all(losses == ranks[0] for losses in ranks)
    return ranks[0]


def assert_undisturbed(losses: list[float], *, model: Any = TIED, optimizer: Any = adamw) -> None:
    alone = train_alone(model, num_steps=WHOLE, make_optimizer=optimizer).losses[HALF:]
    assert relative_error(torch.tensor(losses), torch.tensor(alone)) < FP32, (losses, alone)


PAIRS = [
    # written by (dp, pp, tp, fsdp), loaded by
    ((1, 1, 1, False), (2, 1, 1, True)),
    ((2, 1, 1, True), (1, 2, 1, False)),
    ((1, 2, 2, False), (1, 1, 1, False)),
    ((2, 1, 2, True), (2, 2, 1, True)),
    ((2, 2, 1, True), (1, 2, 2, False)),
]
MORE_PAIRS = [
    ((4, 1, 1, True), (1, 1, 2, False)),
    ((1, 4, 1, False), (2, 1, 2, True)),
    ((1, 1, 2, False), (2, 1, 1, True)),
    ((2, 1, 1, False), (4, 1, 1, True)),
]


@pytest.mark.parametrize(
    ("wrote", "loads"),
    [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in MORE_PAIRS)],
)
def test_training_goes_on_as_if_undisturbed(wrote: Any, loads: Any, tmp_path: Path) -> None:
    write_half(tmp_path, config_of(wrote))
    assert_undisturbed(finish(tmp_path, config_of(loads)))


def config_of(shape: tuple[int, int, int, bool], **changes: Any) -> TrainConfig:
    dp, pp, tp, fsdp = shape
    return make_config(dp, pp, tp, fsdp=fsdp, **changes)


@pytest.mark.parametrize(("wrote", "loads"), [((2, 2, 1, True), (1, 2, 1, False))])
def test_with_an_untied_head_interleaving_and_momentum(
    wrote: Any, loads: Any, tmp_path: Path
) -> None:
    write_half(tmp_path, config_of(wrote, schedule="interleaved"), model=MODEL, make_optimizer=sgd)
    losses = finish(tmp_path, config_of(loads), make_optimizer=sgd)
    assert_undisturbed(losses, model=MODEL, optimizer=sgd)


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_a_run_in_bfloat16_goes_on_so_or_in_float32(precision: str, tmp_path: Path) -> None:
    write_half(tmp_path, config_of((1, 2, 1, False), precision="bfloat16"))
    checkpoint = latest_checkpoint(tmp_path)
    assert checkpoint is not None
    assert load_model_spec(checkpoint).config["dtype"] == "bfloat16"
    losses = finish(tmp_path, config_of((2, 1, 1, True), precision=precision))
    alone = train_alone(TIED, num_steps=WHOLE, make_optimizer=adamw, dtype=torch.bfloat16)
    assert losses == pytest.approx(alone.losses[HALF:], rel=0.03)


def test_without_the_optimizers_state_it_is_another_run(tmp_path: Path) -> None:
    """Negative control: a loader that forgot the moments would be seen."""
    write_half(tmp_path, make_config())

    def forgetful(parameters: Any) -> torch.optim.Optimizer:
        optimizer = adamw(parameters)
        original = optimizer.step

        def step() -> None:
            if not forgot:
                optimizer.state.clear()
                forgot.append(True)
            original()

        forgot: list[bool] = []
        optimizer.step = step  # type: ignore[assignment, method-assign]
        return optimizer

    losses = finish(tmp_path, make_config(), make_optimizer=forgetful)
    with pytest.raises(AssertionError):
        assert_undisturbed(losses)


def test_transformers_reads_what_was_written(tmp_path: Path) -> None:
    write_half(tmp_path, make_config(2, 2, 1, fsdp=True))
    checkpoint = latest_checkpoint(tmp_path)
    assert checkpoint is not None
    assert json.loads((checkpoint / "config.json").read_text())["tie_word_embeddings"]
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    config = make_config()
    inputs, targets = batch_of(HALF, config)
    with torch.no_grad():
        logits = model(inputs).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    alone = train_alone(TIED, num_steps=HALF + 1, make_optimizer=adamw)
    assert loss.item() == pytest.approx(alone.losses[HALF], rel=FP32)


def test_the_random_state_moves_too(tmp_path: Path) -> None:
    torch.manual_seed(5)
    write_half(tmp_path, make_config())
    expected = torch.rand(3)
    torch.manual_seed(6)
    finish(tmp_path, make_config())
    assert torch.equal(torch.rand(3), expected)


def begin_only(run: Path) -> None:
    """As a writer that died before the end leaves it."""
    write_half(run, make_config())
    whole = latest_checkpoint(run)
    assert whole is not None
    part = begin_checkpoint(run, HALF + 1)
    for path in whole.iterdir():
        shutil.copyfile(path, part / path.name)


def test_what_was_half_written_is_no_checkpoint_and_goes(tmp_path: Path) -> None:
    begin_only(tmp_path)
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.name == "step-00000006"
    write_half(tmp_path, make_config())
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000006"]


def test_a_write_that_fails_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_half(tmp_path, make_config())

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stagemesh.training.checkpoint.save_file", full)
    with pytest.raises(CheckpointError, match=r"was not written: rank 0: .*No space left"):
        write_half(tmp_path, make_config(2, 1, 1))
    assert len(list_checkpoints(tmp_path)) == 1
    assert part_path(tmp_path, HALF).exists()
    monkeypatch.undo()
    assert_undisturbed(finish(tmp_path, make_config()))


def test_only_the_last_ones_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        (begin_checkpoint(tmp_path, step) / "file").write_text("x")
        checkpoint_folder.commit_checkpoint(tmp_path, step)
    checkpoint_folder.remove_old(tmp_path, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000003", "step-00000004"]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "training.json").write_text("{}"), "must be stagemesh-training"),
        (lambda folder: next(folder.glob("optimizer-*")).write_bytes(b"\0" * 20), "optimizer-0"),
        (lambda folder: next(folder.glob("optimizer-*")).unlink(), "optimizer-0"),
        (lambda folder: (folder / "rng.safetensors").unlink(), "rng"),
    ],
)
def test_a_damaged_checkpoint_is_refused_on_all_ranks(
    damage: Any, message: str, tmp_path: Path
) -> None:
    write_half(tmp_path, make_config())
    folder = latest_checkpoint(tmp_path)
    assert folder is not None
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        finish(tmp_path, make_config(2, 1, 1))


def test_where_there_is_no_checkpoint_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a checkpoint nor a folder with any"):
        find_checkpoint(tmp_path)
