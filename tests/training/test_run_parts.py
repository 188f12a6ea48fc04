"""Batches, corpus, tokenizer, history, launching: the parts of a run that need no mesh."""

import itertools
import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from coordinator.text.tokenizer import load_tokenizer
from stagemesh.errors import CheckpointError, ConfigError, NotReady
from stagemesh.model_spec import load_model_spec
from stagemesh.training.config import TrainConfig, check_model
from stagemesh.training.corpus import (
    END_OF_TEXT_ID,
    corpus_texts,
    encode_texts,
    train_tokenizer,
    write_tokenizer,
)
from stagemesh.training.data import TokenBatches, split_tokens
from stagemesh.training.history import History, HistoryEntry, read_history
from stagemesh.training.launch import (
    check_parent,
    describe_failures,
    join_world,
    launch_ranks,
    world_size_of,
)
from stagemesh.training.plot import plot_history
from stagemesh.training.weights import FreshWeights
from tests.support.checkpoints import tiny_model, write_model
from tests.training.support import MODEL, make_config


def batches(num_tokens: int = 101, *, seed: int = 0, batch_size: int = 4) -> TokenBatches:
    return TokenBatches(
        torch.arange(num_tokens), sequence_length=10, batch_size=batch_size, seed=seed
    )


def test_an_epoch_has_each_window_once_and_targets_are_the_next_tokens() -> None:
    data = batches()
    assert data.num_windows == 10
    starts = []
    for num_sequences in range(0, 20, 4):
        inputs, targets = data.batch(num_sequences)
        assert torch.equal(inputs + 1, targets)
        starts += inputs[:, 0].tolist()
    # Two epochs, in different orders; the third batch has the end of one and the start of the next.
    assert sorted(starts[:10]) == sorted(starts[10:]) == list(range(0, 100, 10))
    assert starts[:10] != starts[10:]


def test_a_batch_depends_on_its_position_alone() -> None:
    data = batches()
    forward = [data.batch(n)[0] for n in (0, 4, 8, 12)]
    backward = [batches().batch(n)[0] for n in (12, 8, 4, 0)]
    assert all(map(torch.equal, forward, reversed(backward)))
    assert not torch.equal(batches(seed=1).batch(0)[0], forward[0])


def test_fresh_weights_depend_on_seed_and_name() -> None:
    model = {**MODEL, "tie_word_embeddings": True}
    shape = (64, 32)

    def drawn(seed: int, name: str) -> torch.Tensor:
        return FreshWeights(model, seed=seed).read(name, shape)

    names = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight")
    tables = [drawn(seed, name) for seed in (0, 1) for name in names]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(tables, 2))
    assert torch.equal(tables[0], drawn(0, names[0]))
    assert torch.equal(tables[0], drawn(0, "lm_head.weight"))
    assert tables[0].std().item() == pytest.approx(MODEL["initializer_range"], rel=0.05)
    assert torch.equal(FreshWeights(model, seed=0).read("norm.weight", (3,)), torch.ones(3))


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match="10 tokens are too few for one sequence of 10"):
        batches(10)
    assert batches(11).num_windows == 1
    assert [len(inputs) for inputs, _ in batches(11).first_batches(3)] == [1]


def test_measured_batches_are_whole_and_in_the_order_of_the_text() -> None:
    found = batches().first_batches(5)
    assert [inputs[:, 0].tolist() for inputs, _ in found] == [[0, 10, 20, 30], [40, 50, 60, 70]]
    # Ten windows are too few for a batch of 32, so there is one of as many as dp divides.
    sizes = [
        [len(inputs) for inputs, _ in batches(batch_size=32).first_batches(5, multiple_of=dp)]
        for dp in (1, 2, 4, 16)
    ]
    assert sizes == [[10], [10], [8], []]
    first, rest = split_tokens(torch.arange(100), held_out=0.05)
    assert (first.tolist()[-1], rest.tolist()) == (94, [95, 96, 97, 98, 99])


def test_the_tokenizer_says_any_text_and_the_coordinator_reads_it(tmp_path: Path) -> None:
    texts = corpus_texts()[:20]
    tokenizer = train_tokenizer(texts, vocab_size=300)
    write_model(tmp_path, tiny_model(vocab_size=300, eos_token_id=0, bos_token_id=None))
    paths = write_tokenizer(tmp_path, tokenizer)
    again = Tokenizer.from_file(str(paths[0]))
    text = "def f(): pass  # \u00e4 \U0001f600\n"
    assert again.decode(again.encode(text).ids) == text
    served = load_tokenizer(load_model_spec(tmp_path))
    assert served.encode(text, add_special_tokens=True) == again.encode(text).ids
    assert served.eos_token_ids == {END_OF_TEXT_ID}
    ids = encode_texts(again, ["a", "b"])
    assert ids.tolist()[1::2] == [END_OF_TEXT_ID] * 2
    with pytest.raises(ConfigError, match="at least 257"):
        train_tokenizer(texts, vocab_size=256)


def entry(step: int, **changes: Any) -> HistoryEntry:
    numbers = {"loss": 2.0, "grad_norm": 1.0, "learning_rate": 0.1, "seconds": 0.5}
    return HistoryEntry(step=step, **{**numbers, **changes})


def test_a_history_goes_on_from_a_step(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    history = History(path)
    for step in (1, 2, 3):
        history.add(entry(step, loss=float(step)))
    with path.open("a") as file:
        file.write('{"step": 4, "lo')  # as a process that died in the middle leaves it
    assert [e.step for e in read_history(path)] == [1, 2, 3]
    again = History(path, num_steps=2)
    again.add(entry(3, loss=9.0))
    assert [e.loss for e in read_history(path)] == [1.0, 2.0, 9.0]
    path.write_text('{"no": 1}\n')
    with pytest.raises(CheckpointError, match="no history"):
        read_history(path)


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "loss.png"
    plot_history([entry(1), entry(2, held_out_loss=1.5)], path, title="a run")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["loss.png"]


def test_the_learning_rate_rises_and_falls() -> None:
    config = TrainConfig(learning_rate=1.0, warmup_steps=4, total_steps=20)
    rates = [config.learning_rate_at(step) for step in range(21)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[12] == pytest.approx(0.55)
    assert rates[20] == pytest.approx(0.1)
    assert all(math.isfinite(config.learning_rate_at(step)) for step in (0, 10**6))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 6, "dp": 4}, "6 cannot be cut evenly over 4"),
        ({"num_microbatches": 5, "dp": 2}, "5 micro-batches need as many sequences"),
        ({"schedule": "nonsense"}, "schedule must be one of"),
        ({"precision": "int8"}, "precision must be one of"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be positive"),
        ({"total_steps": 0}, "total_steps must be at least 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(**changes)


def test_a_model_that_cannot_be_cut_is_refused() -> None:
    check_model(MODEL, make_config(1, 4, 2))
    for changes, config, message in (
        ({"num_key_value_heads": 1}, make_config(1, 1, 2), "1 key/value heads, which tp 2"),
        ({"num_hidden_layers": 2}, make_config(1, 4, 1), "2 layers, too few for 4"),
        ({"max_position_embeddings": 8}, make_config(), "over the model's 8 positions"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_model({**MODEL, **changes}, config)
    with pytest.raises(Exception, match="'mamba' cannot be cut"):
        check_model({**MODEL, "model_type": "mamba"}, make_config())


SCRIPT = """
import json, os, pathlib, sys
here = pathlib.Path(sys.argv[1])
names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
(here / os.environ["RANK"]).write_text(json.dumps([os.environ[name] for name in names]))
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), int(sys.argv[2])) if sys.argv[2] != "0" else sys.exit(0)
if sys.argv[2] != "0":
    sys.stdin.read()  # forever, or until it is ended
"""


@pytest.mark.parametrize(
    ("number", "told"),
    [(0, ""), (signal.SIGKILL, "rank 0 was ended by SIGTERM, rank 1 was ended by SIGKILL")],
)
def test_launched_ranks_know_who_they_are_and_end_together(
    number: int, told: str, tmp_path: Path
) -> None:
    arguments = ["-c", SCRIPT, str(tmp_path), str(int(number))]
    statuses = launch_ranks(arguments, num_ranks=2, grace_seconds=2.0)
    assert describe_failures(statuses) == told
    for rank in (0, 1):
        assert json.loads((tmp_path / str(rank)).read_text()) == [str(rank), "2", "2"]
    with pytest.raises(ConfigError, match="at least 1"):
        launch_ranks(arguments, num_ranks=0)


def test_a_program_that_nobody_launched_is_alone() -> None:
    with join_world({}, backend="grpc", timeout_seconds=5) as world:
        assert (world.rank, world.size) == (0, 1)
    assert world_size_of({}) == 1
    assert world_size_of({"RANK": "0", "WORLD_SIZE": "3"}) == 3
    with pytest.raises(ConfigError, match="WORLD_SIZE must be a number"):
        world_size_of({"RANK": "0", "WORLD_SIZE": "many"})
    check_parent({})


def test_a_rank_sees_that_its_parent_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    with os.fdopen(read_end) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        check_parent({"STAGEMESH_MEETING": "x"})
        os.close(write_end)
        with pytest.raises(NotReady, match="launched this rank is gone"):
            check_parent({"STAGEMESH_MEETING": "x"})
