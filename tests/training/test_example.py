"""examples/train_lm.py as a user runs it: processes, flags, resume, serving, and a killed rank."""

import asyncio
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from examples import train_lm
from stagemesh.training.checkpoint_folder import latest_checkpoint
from stagemesh.training.history import read_history
from tests.process.children import Children, children, descendants, until_gone
from tests.support.cluster import start_cluster

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = str(ROOT / "examples" / "train_lm.py")
TINY = (
    *("--layers", "2", "--hidden-size", "32", "--heads", "2", "--vocab-size", "300"),
    *("--batch-size", "4", "--sequence-length", "32", "--threads", "1", "--json", "--no-plot"),
)


@pytest.fixture
def processes(tmp_path: Path) -> Any:
    with children(tmp_path) as started:
        yield started


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, PROGRAM, *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def alone(*arguments: str) -> subprocess.CompletedProcess[str]:
    """One rank needs no process of its own, whose imports take seconds."""
    before = torch.get_num_threads()
    try:
        done = CliRunner().invoke(train_lm.main, arguments)
    finally:
        torch.set_num_threads(before)
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


def train(run: Path, *arguments: str) -> list[float]:
    """Losses of all steps that this call made."""
    call = launch if "--launch" in arguments else alone
    done = call("--out", str(run), *TINY, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert events[-1]["event"] == "done"
    return [event["loss"] for event in events if event["event"] == "step"]


async def until_trained(run: Path, num_steps: int, *, seconds: float = 120) -> None:
    """Wait for so many steps; interpreters may take long to start beside others."""
    deadline = time.monotonic() + seconds
    while len(read_history(run / "history.jsonl")) < num_steps:
        assert time.monotonic() < deadline, f"not {num_steps} steps in {seconds} s"
        await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--launch", "3", "--pp", "2"), r"dp 1 x pp 2 x tp 1 makes 2 ranks, there are 3"),
        (("--dp", "2"), r"dp 2 x pp 1 x tp 1 makes 2 ranks, there are 1: .*--launch"),
        (
            ("--launch", "3", "--tp", "3"),
            r"4 attention heads, which tp 3 does not.* 1, 2, 4",
        ),
        (("--launch", "8", "--pp", "8"), r"4 layers, too few for 8 pipeline stages"),
        (("--launch", "3", "--dp", "3"), r"batch_size 16 cannot be cut evenly over 3"),
        (("--schedule", "interleaved"), r"interleaved needs pp of at least 2"),
        (("--hidden-size", "30"), r"4 heads do not divide a width of 30"),
        (("--sequence-length", "0"), r"sequence_length must be at least 1"),
        (("--launch", "0"), r"launch must be at least 1"),
    ],
)
def test_flags_that_do_not_fit_are_refused_in_a_line(arguments: Any, message: str) -> None:
    done = alone(*arguments)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.match(rf"error: .*{message}", done.stderr), done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_goes_on_with_other_ranks(tmp_path: Path) -> None:
    run = tmp_path / "cut"
    # The rate falls with the steps in all; while it rises it depends on the step alone.
    rising = ("--warmup", "1000")
    first = train(run, "--launch", "2", "--pp", "2", "--steps", "4", *rising)
    refused = alone("--out", str(run), *TINY)
    assert "step-00000004 is there: give --resume to go on" in refused.stderr
    second = train(run, "--launch", "2", "--tp", "2", "--steps", "8", *rising, "--resume")
    whole = train(tmp_path / "whole", "--steps", "8", *rising)
    assert [*first, *second] == pytest.approx(whole, rel=1e-4)
    assert [entry.step for entry in read_history(run / "history.jsonl")] == list(range(1, 9))


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_rank_that_is_killed_in_a_step(tmp_path: Path, processes: Children) -> None:
    """The others say who it was, and fewer ranks go on from the checkpoint to the same loss."""
    run, timeout = tmp_path / "run", 10.0
    flags = (*TINY, "--out", str(run), "--warmup", "1000", "--backend", "grpc")
    ranks = [
        processes.start(
            *("examples.train_lm", *flags, "--dp", "2", "--pp", "2", "--fsdp"),
            *("--timeout", str(timeout), "--steps", "100000", "--save-every", "5"),
            env={
                "STAGEMESH_MEETING": str(tmp_path / "meeting"),
                "RANK": str(rank),
                "WORLD_SIZE": "4",
                "LOCAL_WORLD_SIZE": "4",
            },
        )
        for rank in range(4)
    ]
    await until_trained(run, 12)
    ranks[3].kill()
    for rank in ranks[:3]:
        # Within the timeout, and what an interpreter takes to end.
        assert await rank.wait(seconds=timeout + 10) == 1, rank.output()
        assert "error: rank 3 (dp 1, pp 1, tp 0) is lost" in rank.output(), rank.output()
    checkpoint = latest_checkpoint(run)
    assert checkpoint is not None
    step = int(checkpoint.name.removeprefix("step-"))
    assert step >= 10
    total = str(step + 5)
    resumed = await asyncio.to_thread(
        train, run, "--launch", "2", "--pp", "2", "--warmup", "1000", "--steps", total, "--resume"
    )
    assert len(resumed) == 5
    straight = await asyncio.to_thread(
        train, tmp_path / "straight", "--warmup", "1000", "--steps", total
    )
    assert resumed == pytest.approx(straight[step:], rel=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_ranks_end_with_the_process_that_launched_them(
    tmp_path: Path, processes: Children
) -> None:
    parent = processes.start(
        *("examples.train_lm", *TINY, "--out", str(tmp_path / "run")),
        *("--launch", "2", "--steps", "100000"),
    )
    await until_trained(tmp_path / "run", 1)
    ranks = descendants(parent.pid)
    assert len(ranks) == 2
    parent.kill()
    await until_gone(ranks, seconds=30)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_what_was_trained_serves(tmp_path: Path) -> None:
    run = tmp_path / "run"
    await asyncio.to_thread(train, run, "--launch", "2", "--pp", "2", "--steps", "30")
    checkpoint = latest_checkpoint(run)
    assert checkpoint is not None
    asked = {"model": "mine", "temperature": 0}
    async with start_cluster(checkpoint, name="mine") as cluster, cluster.http() as client:
        answer = await client.post(
            "/v1/completions", json={**asked, "prompt": "The", "max_tokens": 8}
        )
        assert answer.status_code == 200, answer.text
        text = answer.json()["choices"][0]["text"]
        messages = [{"role": "user", "content": "The"}]
        chat = await client.post(
            "/v1/chat/completions",
            json={**asked, "messages": messages, "max_completion_tokens": 8},
        )
        assert chat.status_code == 200, chat.text
        # The template of a base model adds nothing, so both were asked the same.
        assert chat.json()["choices"][0]["message"]["content"] == text != ""
