"""Runs of examples/train_lm.py that begin with a model there is, or with their own checkpoint."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import click
import gguf
import pytest
import torch
from click.testing import CliRunner

from coordinator.text.metadata import text_metadata
from coordinator.text.pieces import byte_alphabet
from coordinator.text.tokenizer import load_tokenizer
from examples import train_lm
from stagemesh.errors import ConfigError
from stagemesh.model_spec import load_model_spec
from stagemesh.training.checkpoint_folder import STATE_NAME, latest_checkpoint
from stagemesh.training.history import read_history
from stagemesh.training.launch import local_device
from tests.support.checkpoints import (
    BYTE_VOCAB_SIZE,
    CHAT_TEMPLATE,
    IM_END,
    edit_config,
    write_byte_tokenizer,
    write_tiny_checkpoint,
    write_tiny_gguf,
)

# While the rate rises it does not depend on the number of all steps.
SMALL = ("--batch-size", "4", "--sequence-length", "16", "--lr", "1e-3", "--warmup", "100")


def run(folder: Path, *arguments: str) -> str:
    """The program as a single rank, in this process; what it says on standard error."""
    threads = ("--threads", str(torch.get_num_threads()))
    done = CliRunner().invoke(
        train_lm.main, ["--out", str(folder), "--no-plot", "--json", *threads, *arguments]
    )
    assert done.exit_code == (1 if "error:" in done.stderr else 0), (done.output, done.exception)
    return done.stderr


def tiny_folder(folder: Path) -> Path:
    write_byte_tokenizer(folder)
    return write_tiny_checkpoint(
        folder, num_layers=2, vocab_size=BYTE_VOCAB_SIZE, eos_token_id=IM_END
    )


def losses(folder: Path) -> list[float]:
    return [entry.loss for entry in read_history(folder / "history.jsonl")]


def test_a_folder_is_trained_on_and_goes_on_by_itself(tmp_path: Path) -> None:
    """Neither the model nor a setting has to be said again; the data goes on where it was."""
    model = tiny_folder(tmp_path / "model")
    own = tmp_path / "run"
    assert run(own, "--model", str(model), *SMALL, "--steps", "2") == ""
    other = shutil.copytree(own, tmp_path / "other")
    assert run(own, "--resume", "--steps", "4") == ""
    straight = tmp_path / "straight"
    assert run(straight, "--model", str(model), *SMALL, "--steps", "4") == ""
    assert losses(own) == pytest.approx(losses(straight), rel=1e-6)
    assert len(losses(own)) == 4
    # Negative control: what is said counts, and makes another run of it.
    assert run(other, "--resume", "--steps", "4", "--sequence-length", "8") == ""
    assert losses(other)[2:] != pytest.approx(losses(straight)[2:], rel=1e-3)
    checkpoint = latest_checkpoint(other)
    assert checkpoint is not None
    state = json.loads((checkpoint / STATE_NAME).read_text())
    assert (state["step"], state["settings"]["sequence_length"]) == (4, 8)
    assert state["settings"]["learning_rate"] == 1e-3
    written = json.loads((checkpoint / "tokenizer_config.json").read_text())
    assert (written["chat_template"], written["eos_token"]) == (CHAT_TEMPLATE, "<|im_end|>")
    assert load_model_spec(checkpoint).config["vocab_size"] == BYTE_VOCAB_SIZE


def _add_tokens(writer: gguf.GGUFWriter) -> None:
    alphabet = byte_alphabet()
    characters = sorted(alphabet, key=alphabet.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    # One pair of bytes that no text has, as there must be some.
    pair = (characters[1], characters[2])
    writer.add_token_list([*characters, "<|im_start|>", "<|im_end|>", "<|end|>", "".join(pair)])
    kinds = [gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * 3
    writer.add_token_types([*kinds, gguf.TokenType.NORMAL])
    writer.add_token_merges([" ".join(pair)])
    writer.add_chat_template(CHAT_TEMPLATE)


def test_a_gguf_file_is_trained_on_as_the_folder_of_the_same_model(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "model")
    file = write_tiny_gguf(
        tmp_path / "gguf",
        num_layers=2,
        vocab_size=BYTE_VOCAB_SIZE,
        eos_token_id=IM_END,
        extra=_add_tokens,
    )
    for name, model in (("a", folder), ("b", file)):
        assert run(tmp_path / name, "--model", str(model), *SMALL, "--steps", "2") == ""
    assert losses(tmp_path / "a") == pytest.approx(losses(tmp_path / "b"), rel=1e-6)
    # As it serves, too: its own template, and an end that the tokenizer knows.
    checkpoint = latest_checkpoint(tmp_path / "b")
    assert checkpoint is not None
    tokenizer = load_tokenizer(load_model_spec(checkpoint))
    assert tokenizer.encode("<|im_end|>", add_special_tokens=False) == [IM_END]
    assert tokenizer.eos_token_ids == {IM_END}
    assert text_metadata(load_model_spec(checkpoint)).chat_template == CHAT_TEMPLATE


def test_a_resumed_model_is_checked_and_not_the_one_of_the_flags(tmp_path: Path) -> None:
    model, own = tiny_folder(tmp_path / "model"), tmp_path / "run"
    run(own, "--model", str(model), *SMALL, "--steps", "1")
    text = run(own, "--resume", "--steps", "9", "--launch", "3", "--pp", "3")
    assert "the model has 2 layers, too few for 3 pipeline stages" in text
    # A fresh model of the default size has four layers; these flags are not asked.
    assert "has 1 steps already" in run(own, "--resume", "--steps", "1")


def test_a_model_that_cannot_be_trained_is_refused_before_ranks_start(tmp_path: Path) -> None:
    model = tiny_folder(tmp_path / "model")
    (model / "tokenizer.json").unlink()
    text = run(tmp_path / "run", "--model", str(model), *SMALL)
    assert "tokenizer.json is not there" in text
    edit_config(model, {"model_type": "qwen2"})
    text = run(tmp_path / "run", "--model", str(model), *SMALL, "--launch", "2", "--pp", "2")
    assert text.count("\n") == 1
    assert "models of type 'qwen2' cannot be cut for training" in text


def test_a_text_that_is_held_out_may_be_too_short_for_a_batch(tmp_path: Path) -> None:
    model, own = tiny_folder(tmp_path / "model"), tmp_path / "run"
    # 5 % of the manual are some 170 sequences of 128 bytes.
    sizes = ("--batch-size", "256", "--sequence-length", "128")
    assert run(own, "--model", str(model), *sizes, "--steps", "1") == ""
    (entry,) = read_history(own / "history.jsonl")
    assert entry.held_out_loss is not None


@pytest.mark.parametrize(
    ("arguments", "kept", "expected"),
    [
        ((), {"learning_rate": 0.5, "total_steps": 7}, {"lr": 0.5, "steps": 7, "seed": 0}),
        (("--lr", "0.1", "--steps", "300"), {"learning_rate": 0.5, "total_steps": 7}, None),
        ((), {}, {"lr": None, "steps": 300}),
    ],
)
def test_what_is_not_said_stays_as_it_was(
    tmp_path: Path, arguments: tuple[str, ...], kept: dict[str, Any], expected: Any
) -> None:
    state = {"format": "stagemesh-training", "version": 1, "step": 1, "num_sequences": 1}
    (tmp_path / STATE_NAME).write_text(json.dumps({**state, "settings": kept}))
    context: click.Context = train_lm.main.make_context("train_lm", list(arguments))
    flags = dict(context.params)
    train_lm.keep_settings(context, flags, tmp_path)
    expected = expected or {"lr": 0.1, "steps": 300}
    assert {name: flags[name] for name in expected} == expected


@pytest.mark.parametrize(("steps", "expected"), [("300", 20), ("40", 8), ("5", 1), ("1", 0)])
def test_few_steps_are_not_all_warm_up(steps: str, expected: int) -> None:
    context: click.Context = train_lm.main.make_context("train_lm", ["--steps", steps])
    assert train_lm.train_config(context.params, 1).warmup_steps == expected


def test_zero_is_no_way_to_ask_for_the_default(tmp_path: Path) -> None:
    assert "learning_rate must be positive" in run(tmp_path, "--lr", "0")
    assert "num_microbatches must be at least 1" in run(tmp_path, "--microbatches", "0")


def test_ranks_of_a_host_take_a_device_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    environ = {**os.environ, "LOCAL_RANK": "1"}
    assert local_device("cuda", environ) == torch.device("cuda", 1)
    assert local_device("cuda", {}) == torch.device("cuda", 0)
    assert local_device("cuda:0", environ) == torch.device("cuda", 0)
    assert local_device("cpu", environ) == torch.device("cpu")
    with pytest.raises(ConfigError, match="no device cuda:2 here: torch sees 2"):
        local_device("cuda", {"LOCAL_RANK": "2"})
    with pytest.raises(ConfigError, match="'warp' is none that torch knows"):
        local_device("warp", environ)
