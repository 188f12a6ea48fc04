"""Saved by some ranks, loaded by others; at any time one whole checkpoint in the folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import CheckpointError
from stagemesh.parallel.fsdp import checkpoint as checkpoint_module
from stagemesh.parallel.fsdp.checkpoint import save_checkpoint, save_full_model
from stagemesh.parallel.fsdp.config import ShardingStrategy
from stagemesh.parallel.fsdp.fsdp import Fsdp
from stagemesh.parallel.fsdp.full_state import full_state_dict, load_full_state_dict
from stagemesh.parallel.fsdp.manifest import MANIFEST_NAME
from stagemesh.parallel.fsdp.resume import load_checkpoint
from tests.parallel.fsdp.training import (
    NUM_STEPS,
    OPTIMIZERS,
    batches,
    distance,
    make_model,
    train,
    trained_alone,
    wrap,
)
from tests.support.ranks import run_ranks

HALF = NUM_STEPS // 2


def make(
    group: ProcessGroup, name: str = "adamw", **changes: Any
) -> tuple[Fsdp, torch.optim.Optimizer]:
    model = wrap(group, **changes)
    return model, OPTIMIZERS[name](model.parameters())


def save_half(
    folder: Path, world_size: int, *, name: str = "adamw", kind: Any = "sharded", **changes: Any
) -> None:
    def on_rank(group: ProcessGroup) -> None:
        model, optimizer = make(group, name, **changes)
        train(model, optimizer, data=batches()[:HALF], rank=group.rank, size=group.size)
        save_checkpoint(model, folder=folder, optimizer=optimizer, kind=kind, extra={"step": HALF})

    run_ranks(world_size, on_rank)


def go_on(
    folder: Path, world_size: int, *, name: str = "adamw", **changes: Any
) -> list[dict[str, torch.Tensor]]:
    def on_rank(group: ProcessGroup) -> dict[str, torch.Tensor]:
        model, optimizer = make(group, name, **changes)
        # Other settings: those of the checkpoint must come back.
        optimizer.param_groups[0]["lr"] = 77.0
        extra = load_checkpoint(model, folder=folder, optimizer=optimizer)
        train(model, optimizer, data=batches()[extra["step"] :], rank=group.rank, size=group.size)
        return full_state_dict(model)

    return run_ranks(world_size, on_rank)


@pytest.mark.parametrize("kind", ["sharded", "full"])
@pytest.mark.parametrize(
    ("before", "after", "name"),
    [(4, 2, "adamw"), (2, 3, "adamw"), (1, 2, "sgd"), (2, 1, "sgd")],
)
def test_training_goes_on_with_other_ranks(
    tmp_path: Path, kind: str, before: int, after: int, name: str
) -> None:
    save_half(tmp_path, before, name=name, kind=kind)
    for state in go_on(tmp_path, after, name=name):
        assert distance(state, trained_alone(name)) < 1e-5


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"flatten_parameters": False}, {"sharding_strategy": ShardingStrategy.NO_SHARD}),
        ({"sharding_strategy": ShardingStrategy.NO_SHARD}, {"min_param_size": 10**6}),
        ({"min_param_size": 10**6}, {"flatten_parameters": False}),
    ],
)
def test_training_goes_on_with_other_settings(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    save_half(tmp_path, 2, **before)
    for state in go_on(tmp_path, 2, **after):
        assert distance(state, trained_alone("adamw")) < 1e-5


def test_without_the_optimizer_training_goes_elsewhere(tmp_path: Path) -> None:
    """Negative control: moments and steps are what makes the difference."""
    save_half(tmp_path, 2)

    def on_rank(group: ProcessGroup) -> dict[str, torch.Tensor]:
        model, optimizer = make(group)
        load_checkpoint(model, folder=tmp_path)
        train(model, optimizer, data=batches()[HALF:], rank=group.rank, size=group.size)
        return full_state_dict(model)

    assert distance(run_ranks(2, on_rank)[0], trained_alone("adamw")) > 1e-3


def test_loaded_parameters_replace_gathered_ones(tmp_path: Path) -> None:
    """A forward has left the root whole; the load must be seen all the same."""
    other = make_model(seed=5).state_dict()

    def on_rank(group: ProcessGroup) -> torch.Tensor:
        model, _ = make(group)
        model(batches(1)[0])
        load_full_state_dict(model, state=other)
        return model(batches(1)[0])

    expected = make_model(seed=5)(batches(1)[0])
    for logits in run_ranks(2, on_rank):
        torch.testing.assert_close(logits, expected)


def test_the_file_of_the_whole_model(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    path = tmp_path / "model.safetensors"
    path.write_text("old")

    def on_rank(group: ProcessGroup) -> None:
        save_full_model(make(group)[0], path=path)

    run_ranks(3, on_rank)
    assert [found.name for found in tmp_path.iterdir()] == [path.name]
    assert path.stat().st_mode & 0o777 == 0o644
    state = load_file(path)
    expected = make_model(seed=0).state_dict()
    assert expected.keys() - state.keys() == {"head.weight"}
    assert all(torch.equal(state[name], expected[name]) for name in state)
    model = make_model(seed=9)
    assert model.load_state_dict(state, strict=False).unexpected_keys == []


def test_tensors_only_where_tensors_belong(tmp_path: Path) -> None:
    """Each rank's file has its own pieces, and the manifest is text."""
    save_half(tmp_path, 2)
    manifest = json.loads((tmp_path / MANIFEST_NAME).read_text())
    sizes = [
        sum(tensor.numel() for tensor in load_file(tmp_path / name).values())
        for name in manifest["model_files"]
    ]
    total = sum(parameter.numel() for parameter in make_model().parameters())
    assert sum(sizes) == total + 1  # and the buffer
    assert max(sizes) - min(sizes) < 10
    names = {path.suffix for path in tmp_path.iterdir()}
    assert names == {".json", ".safetensors"}


def test_a_save_replaces_the_one_before(tmp_path: Path) -> None:
    save_half(tmp_path, 4)
    first = {path.name for path in tmp_path.iterdir()}
    save_half(tmp_path, 2, kind="full")
    second = {path.name for path in tmp_path.iterdir()}
    assert len(first) == 9
    assert len(second) == 3
    assert first & second == {MANIFEST_NAME}


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_save_that_fails_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing_rank: int
) -> None:
    save_half(tmp_path, 2)
    write = checkpoint_module.save_file

    def write_or_fail(tensors: Any, path: Path) -> None:
        if f"-{failing_rank:05}-optimizer" in path.name:
            raise OSError("No space left on device")
        write(tensors, path)

    monkeypatch.setattr(checkpoint_module, "save_file", write_or_fail)

    def on_rank(group: ProcessGroup) -> str:
        model, optimizer = make(group)
        with pytest.raises(CheckpointError) as caught:
            save_checkpoint(model, folder=tmp_path, optimizer=optimizer)
        return str(caught.value)

    for text in run_ranks(2, on_rank):
        assert f"rank {failing_rank}: No space left on device" in text
    monkeypatch.undo()
    for state in go_on(tmp_path, 2):
        assert distance(state, trained_alone("adamw")) < 1e-5
    save_half(tmp_path, 1)
    assert len(list(tmp_path.iterdir())) == 3


def damage(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / MANIFEST_NAME
    manifest = json.loads(path.read_text())
    edit(manifest)
    path.write_text(json.dumps(manifest))


def set_in(*keys: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def edit(manifest: dict[str, Any]) -> None:
        inner: Any = manifest
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda m: m["parameters"].pop("layers.0.up.weight"), "layers.0.up.weight"),
        (
            set_in("parameters", "layers.0.up.weight", "shape", value=[12, 21]),
            r"layers.0.up.weight has shape \[12, 21\] instead of \[21, 12\]",
        ),
        (set_in("buffers", "surplus", value=[1]), "surplus is unknown"),
        (set_in("model_files", 0, value="../elsewhere"), "no plain name"),
        (set_in("model_files", 1, value="gone.safetensors"), "gone.safetensors is missing"),
        (set_in("parameters", "layers.0.up.weight", "pieces", value=[]), "have 0 elements"),
        (set_in("version", value=2), "must be stagemesh-fsdp version 1"),
        (set_in("optimizer", value=None), "has no optimizer state"),
        (set_in("optimizer", "groups", value=[]), "0 groups"),
        (set_in("parameters", value=3), "not a whole manifest"),
        (lambda m: m.pop("extra"), "extra"),
    ],
)
def test_what_does_not_fit_is_refused_on_all_ranks(
    tmp_path: Path, edit: Callable[[dict[str, Any]], Any], text: str
) -> None:
    save_half(tmp_path, 2)
    damage(tmp_path, edit)

    def on_rank(group: ProcessGroup) -> None:
        model, optimizer = make(group)
        before = full_state_dict(model)
        with pytest.raises(CheckpointError, match=text):
            load_checkpoint(model, folder=tmp_path, optimizer=optimizer)
        after = full_state_dict(model)
        assert all(torch.equal(before[name], after[name]) for name in before)

    run_ranks(2, on_rank)


def test_a_damaged_file_is_refused_on_all_ranks(tmp_path: Path) -> None:
    save_half(tmp_path, 2)
    for path in tmp_path.glob("*-00001-model*"):
        path.write_bytes(path.read_bytes()[:50])

    def on_rank(group: ProcessGroup) -> str:
        model, optimizer = make(group)
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(model, folder=tmp_path, optimizer=optimizer)
        return str(caught.value)

    for text in run_ranks(2, on_rank):
        assert "-00001-model" in text


def test_nothing_there(tmp_path: Path) -> None:
    def on_rank(group: ProcessGroup) -> None:
        with pytest.raises(CheckpointError, match=MANIFEST_NAME):
            load_checkpoint(make(group)[0], folder=tmp_path)

    run_ranks(2, on_rank)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda s: s.pop("layers.1.norm.bias"), "layers.1.norm.bias is missing"),
        (lambda s: s.update(more=torch.ones(1)), "more is unknown"),
        (
            lambda s: s.update({"layers.1.norm.bias": torch.ones(3)}),
            r"layers.1.norm.bias has shape \[3\] instead of \[12\]",
        ),
    ],
)
def test_whole_states_that_do_not_fit(change: Callable[[Any], Any], text: str) -> None:
    state = make_model().state_dict()
    change(state)

    def on_rank(group: ProcessGroup) -> None:
        with pytest.raises(CheckpointError, match=text):
            load_full_state_dict(make(group)[0], state=state)

    run_ranks(1, on_rank)


def test_one_rank_alone_gets_the_whole_state() -> None:
    def on_rank(group: ProcessGroup) -> int:
        return len(full_state_dict(make(group)[0], only_rank=1))

    assert run_ranks(3, on_rank) == [0, len(make_model().state_dict()), 0]
