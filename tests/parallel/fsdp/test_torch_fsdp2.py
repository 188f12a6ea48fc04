"""The same training by PyTorch's FSDP2, in two processes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.parallel.fsdp.full_state import full_state_dict
from tests.parallel.fsdp.training import OPTIMIZERS, batches, distance, train, wrap
from tests.support.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_parameters_after_20_steps_are_those_of_fsdp2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.parallel.fsdp.torch_rank"]
    ranks = [
        subprocess.Popen([*command, str(rank), "2", str(tmp_path)], cwd=ROOT) for rank in range(2)
    ]
    try:
        assert [rank.wait(timeout=100) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    expected = load_file(tmp_path / "whole.safetensors")

    def on_rank(group: ProcessGroup) -> dict[str, torch.Tensor]:
        model = wrap(group)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        train(model, optimizer, data=batches(), rank=group.rank, size=group.size)
        return full_state_dict(model)

    for state in run_ranks(2, on_rank):
        ours = {name: state[name].reshape(expected[name].shape) for name in expected}
        assert len(ours) == len(state) - 2  # no buffer, and the tied name once
        assert distance(ours, expected) < 1e-5
