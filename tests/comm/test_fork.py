"""Processes that fork beside an open group, as a DataLoader with workers does."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stagemesh.rpc.fork_guard import ForkGuard

SETTING = "GRPC_ENABLE_FORK_SUPPORT"

SCRIPT = """
import sys
from pathlib import Path
from stagemesh.comm.backends import GroupConfig, init_process_group
from stagemesh.comm.rendezvous import SharedFolder
import torch
from torch.utils.data import DataLoader, TensorDataset

config = GroupConfig(
    rendezvous=SharedFolder(path=Path(sys.argv[1])),
    rank=int(sys.argv[2]),
    world_size=2,
    timeout_seconds=40,
)
data = TensorDataset(torch.arange(8.0))
total = 0.0
with init_process_group(config) as group:
    for _ in range(5):
        loader = DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context="fork")
        for (batch,) in loader:
            total += group.all_reduce(batch.sum()).item()
print(total)
"""


@pytest.mark.slow
def test_a_forked_worker_lives_beside_an_open_group(tmp_path: Path) -> None:
    environment = {name: text for name, text in os.environ.items() if name != SETTING}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path), str(rank)],
            env={**environment, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ended = [rank.communicate(timeout=50) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    # Five times the sum of 0 to 7, on two ranks.
    assert [out for out, _ in ended] == ["280.0\n"] * 2, ended


@pytest.mark.parametrize(
    ("is_loaded", "decided", "setting", "warns"),
    [
        (False, None, "0", False),
        (True, None, "0", True),
        (True, "0", "0", False),
        (True, "1", "1", False),
        (False, "1", "1", False),
    ],
)
def test_the_handlers_are_turned_off_unless_the_user_has_decided(
    is_loaded: bool,
    decided: str | None,
    setting: str,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv(SETTING, raising=False)
    monkeypatch.setattr(sys, "modules", {"grpc": None} if is_loaded else {})
    if decided is not None:
        monkeypatch.setenv(SETTING, decided)
    guard = ForkGuard()
    guard.turn_off_handlers()
    assert os.environ[SETTING] == setting
    monkeypatch.undo()
    with caplog.at_level(logging.WARNING):
        guard.warn_if_late()
    assert ("gRPC was loaded before" in caplog.text) is warns
