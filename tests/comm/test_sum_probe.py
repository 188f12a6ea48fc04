"""What sharing a stage is measured to take two ranks, with steps that take a known time."""

import threading
import time

import pytest
import torch

from node.sum_probe import TrialSteps, measure_steps
from node.trial_stage import TrialStage, matrix_parameters, trial_shares
from stagemesh.comm.direct_group import DirectGroup
from stagemesh.comm.process_group import ProcessGroup
from stagemesh.models.packed_linear import PackedLinear
from stagemesh.models.tensor_group import TensorGroup
from tests.support.ranks import run_ranks

_NARROW, _READ, _SUM, _NUM_SUMS = 0.002, 0.02, 0.001, 10


def measured(*, slowdown: float, ranks: tuple[float, float] = (1.0, 1.0)) -> tuple[float, float]:
    """Two ranks that read weights `slowdown` times slower together; by rank, how slow it is."""
    reading = [0]
    lock = threading.Lock()

    def on_rank(group: ProcessGroup) -> tuple[float, float]:
        sums = DirectGroup(group)
        sums.connect(within_process=True)

        def read(seconds: float, *, after: float) -> None:
            time.sleep(after)
            with lock:
                reading[0] += 1
            time.sleep(seconds / 4)  # until the other one has begun, if it does
            with lock:
                is_alone = reading[0] == 1
            rest = seconds * ((1.0 if is_alone else slowdown) - 0.25)
            time.sleep(rest)
            with lock:
                reading[0] -= 1

        own = ranks[group.rank]
        steps = TrialSteps(
            narrow=lambda: time.sleep(_NARROW),
            whole=lambda: read(own * _READ, after=_NARROW),
            shared=lambda: time.sleep(
                _NARROW + max(ranks) * slowdown * _READ / 2 + _NUM_SUMS * _SUM
            ),
            flush=lambda: None,
            num_sums=_NUM_SUMS,
        )
        try:
            return measure_steps(sums, steps)
        finally:
            sums.close()

    first, second = run_ranks(2, on_rank, backend="grpc", timeout_seconds=20.0)
    assert first == second, "the planner is told one figure"
    return first


@pytest.mark.slow  # it sleeps
@pytest.mark.parametrize(
    ("slowdown", "ranks"), [(1.0, (1.0, 1.0)), (1.6, (1.0, 1.0)), (1.0, (1.0, 2.0))]
)
def test_the_parts_are_told_apart(slowdown: float, ranks: tuple[float, float]) -> None:
    """Sums, memory that is shared, and a rank that is slower by itself."""
    sum_seconds, found = measured(slowdown=slowdown, ranks=ranks)
    assert found == pytest.approx(slowdown, abs=0.15)
    assert sum_seconds == pytest.approx(_SUM, rel=0.4)


def test_a_trial_stage_is_shared_as_a_model_is() -> None:
    """Two ranks have half of its matrices each, and run steps of it."""

    def on_rank(group: ProcessGroup) -> tuple[int, int]:
        tensor_group = TensorGroup(group, trial_shares(96, num_ranks=2))
        device = torch.device("cpu")
        whole = TrialStage(2, device=device, hidden_size=96)
        try:
            tensor_group.sums.connect(within_process=True)
            stage = TrialStage(2, device=device, hidden_size=96, tensor_group=tensor_group)
            for _ in range(2):
                stage.decode()
            stage.prefill(5)
        finally:
            tensor_group.sums.close()
        return matrix_bytes(stage), matrix_bytes(whole)

    for own, whole in run_ranks(2, on_rank, backend="grpc", timeout_seconds=20.0):
        assert own == whole // 2
        assert whole >= 4 * 2 * matrix_parameters(96)


def matrix_bytes(stage: TrialStage) -> int:
    """Of the layers and the head."""
    packed = [m for m in stage._engine.stage.model.modules() if isinstance(m, PackedLinear)]
    return sum(m.weight_bytes for m in packed)
