"""PyTorch programs over the mesh against the same programs over Gloo, two ranks under torchrun."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.torch_backend.worker import CASES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SIZE = 2
BACKENDS = ("gloo", "stagemesh")
ROOT = Path(__file__).parents[2]


def torchrun(*arguments: str) -> subprocess.Popen[str]:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(SIZE)]
    return subprocess.Popen(
        [sys.executable, *command, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(*launches: subprocess.Popen[str], seconds: float) -> list[str]:
    """What each printed; fails when one failed or is late, and leaves no process."""
    try:
        outputs = [launch.communicate(timeout=seconds)[0] for launch in launches]
    finally:
        for launch in launches:
            # On SIGTERM torchrun ends its ranks too.
            launch.terminate()
            launch.wait(timeout=30)
    for launch, output in zip(launches, outputs, strict=True):
        assert launch.returncode == 0, output[-4000:]
    return outputs


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], dict[str, Any]]:
    """What each case left, by backend and rank."""
    folder = tmp_path_factory.mktemp("found")
    worker = "tests.torch_backend.worker"
    finish(*(torchrun("-m", worker, name, str(folder)) for name in BACKENDS), seconds=200)
    return {
        (backend, rank): torch.load(folder / f"{backend}-{rank}.pt", weights_only=True)
        for backend in BACKENDS
        for rank in range(SIZE)
    }


def differences(found: Any, case: str, rank: int) -> list[str]:
    """Tensors of a case that are not bit for bit those over Gloo."""
    theirs, ours = (found[backend, rank][case] for backend in BACKENDS)
    assert isinstance(theirs, dict), f"over gloo: {theirs}"
    assert isinstance(ours, dict), f"over stagemesh: {ours}"
    assert ours, "the case left nothing to compare"
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("case", CASES)
def test_a_program_leaves_the_same_bits_as_over_gloo(found, case, rank):
    assert differences(found, case, rank) == []


@pytest.mark.parametrize("rank", range(SIZE))
def test_one_wrong_bit_in_a_reduction_is_found(found, rank):
    wrong = differences(found, "corrupted", rank)
    assert "large" in wrong
    # The fault is in floating-point reductions only, and the comparison says so.
    assert not [name for name in wrong if "int" in name]


def test_a_loaded_checkpoint_is_the_saved_model(found):
    for rank in range(SIZE):
        assert found["stagemesh", rank]["checkpoint"]["equal"].all()


def test_the_example_trains():
    (output,) = finish(torchrun("examples/ddp_over_mesh.py"), seconds=100)
    losses = [float(line.split()[-1]) for line in output.splitlines() if line.startswith("step")]
    assert len(losses) > 2
    assert losses[-1] < losses[0]
