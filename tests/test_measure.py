"""What a measurement makes of the times of steps, with a clock that only the stages move."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import chain

import pytest
import torch

from node import measure
from node.measure import SpeedMeasurement, wide_size
from node.trial_stage import TrialStage, matrix_parameters

CPU = torch.device("cpu")
MIB = 2**20
WEIGHT_BYTES = 128 * MIB


class Clock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds


@dataclass(frozen=True, kw_only=True)
class Machine:
    """How long steps take, and what slows them from one step to the next."""

    clock: Clock
    step: float = 1.5e-3
    layer: float = 4e-4
    stream: float = 2e10
    flops: float = 2e11
    slower_by: float = 1.0
    making: float = 0.0
    """Seconds for each byte of a wide stage."""
    steps: Counter[str] = field(default_factory=Counter)

    def stage(self, num_layers: int, *, device, hidden_size: int = 48, dtype=torch.float32):
        wide = hidden_size > 48
        parameters = num_layers * matrix_parameters(hidden_size) if wide else 0
        fixed = self.step + num_layers * self.layer
        self.clock.seconds += parameters * dtype.itemsize * self.making
        return Stage(
            machine=self,
            num_layers=num_layers,
            layer_parameters=matrix_parameters(hidden_size),
            decode_seconds=fixed + parameters * dtype.itemsize / self.stream,
            row_seconds=2 * parameters / self.flops,
            fixed=fixed,
        )


@dataclass(kw_only=True)
class Stage:
    machine: Machine
    num_layers: int
    layer_parameters: int
    decode_seconds: float
    row_seconds: float
    fixed: float
    slowness: float = 1.0

    def decode(self) -> None:
        self.machine.steps["decode"] += 1
        self.machine.clock.seconds += self.decode_seconds * self.slowness
        self.slowness *= self.machine.slower_by

    def prefill(self, num_tokens: int) -> None:
        self.machine.steps["prefill"] += 1
        self.machine.clock.seconds += self.fixed + num_tokens * self.row_seconds


@dataclass(kw_only=True)
class Other:
    """Memory that the machine reads as fast as weights."""

    machine: Machine
    num_bytes: int

    def read(self) -> None:
        self.machine.clock.seconds += self.num_bytes / self.machine.stream


def measured(monkeypatch: pytest.MonkeyPatch, **figures: float) -> measure.DeviceSpeed:
    return measured_by(Machine(clock=Clock(), **figures), monkeypatch)


def measured_by(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, **settings: float
) -> measure.DeviceSpeed:
    monkeypatch.setattr(measure, "time", machine.clock)
    monkeypatch.setattr(measure, "TrialStage", machine.stage)
    monkeypatch.setattr(
        measure, "OtherMemory", lambda _, num_bytes: Other(machine=machine, num_bytes=num_bytes)
    )
    speed = SpeedMeasurement(CPU, weight_bytes=WEIGHT_BYTES, **settings)
    for each in chain(speed.overhead_slices(), speed.rate_slices()):
        machine.clock.seconds += measure.PAUSE_SECONDS
        each()
    return speed.result()


@pytest.mark.parametrize(
    "figures",
    [
        {},
        {"step": 4e-3, "layer": 1e-4},
        {"stream": 5e9, "flops": 3e10},
        {"step": 0.0, "layer": 0.0},
    ],
)
def test_each_figure_comes_out_as_it_went_in(
    monkeypatch: pytest.MonkeyPatch, figures: dict[str, float]
) -> None:
    expected = Machine(clock=Clock(), **figures)
    speed = measured(monkeypatch, **figures)
    assert speed.step_overhead_seconds == pytest.approx(expected.step, abs=1e-9)
    assert speed.layer_overhead_seconds == pytest.approx(expected.layer, abs=1e-9)
    for rates in speed.rates.values():
        assert rates.stream_bytes_per_second == pytest.approx(expected.stream, rel=1e-6)
        assert rates.flops_per_second == pytest.approx(expected.flops, rel=1e-6)


def test_a_machine_that_slows_down_meanwhile_is_measured_in_its_middle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drifting = measured(monkeypatch, slower_by=1.01)
    steady = measured(monkeypatch)
    assert 1.0 < drifting.layer_overhead_seconds / steady.layer_overhead_seconds < 1.2
    # Negative control: a stage that is a quarter slower at once is seen in full.
    slow = measured(monkeypatch, layer=5e-4)
    assert slow.layer_overhead_seconds == pytest.approx(1.25 * steady.layer_overhead_seconds)


@pytest.mark.parametrize(
    "figures",
    [
        {},
        {"step": 1e-2, "layer": 1e-3},
        {"making": 5e-9},
        {"stream": 2e9, "flops": 1e10, "making": 4e-9},
        {"step": 5e-3, "layer": 2e-3, "stream": 1e9, "flops": 5e9},
    ],
)
def test_a_measurement_ends_in_time_however_slow_the_device(
    monkeypatch: pytest.MonkeyPatch, figures: dict[str, float]
) -> None:
    machine = Machine(clock=Clock(), **figures)
    speed = measured_by(machine, monkeypatch)
    assert machine.clock.seconds < 2
    for rates in speed.rates.values():
        assert rates.stream_bytes_per_second == pytest.approx(machine.stream, rel=1e-6)
        assert rates.flops_per_second == pytest.approx(machine.flops, rel=1e-6)
    # Negative control: time to spare goes into more steps, and then it does take longer.
    patient = Machine(clock=Clock(), **figures)
    measured_by(patient, monkeypatch, budget_seconds=60.0)
    if figures:
        assert patient.steps["decode"] > machine.steps["decode"]
        assert patient.clock.seconds > machine.clock.seconds
    else:
        assert patient.steps == machine.steps


def test_weights_are_not_read_faster_than_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # A stage that seems to need no time at all, as when its overheads were measured in a pause.
    machine = Machine(clock=Clock(), stream=1e10)
    monkeypatch.setattr(Machine, "stage", _instant(Machine.stage))
    speed = measured_by(machine, monkeypatch)
    for rates in speed.rates.values():
        assert rates.stream_bytes_per_second == pytest.approx(2 * machine.stream, rel=1e-6)


def _instant(stage):
    def made(self: Machine, num_layers: int, **settings) -> Stage:
        found = stage(self, num_layers, **settings)
        found.decode_seconds = found.fixed
        return found

    return made


@pytest.mark.parametrize(
    ("weight_bytes", "element_bytes", "expected"),
    [
        (85 * MIB, 4, (576, 6)),
        (85 * MIB, 2, (576, 12)),
        (2**40, 4, (576, 12)),
        (30 * MIB, 4, (576, 2)),
        (16 * MIB, 4, (384, 2)),
        (7 * MIB, 2, (384, 2)),
        (4 * MIB, 4, (192, 2)),
        (1, 4, (192, 1)),
    ],
)
def test_wide_stages_fill_what_memory_there_is(
    weight_bytes: int, element_bytes: int, expected: tuple[int, int]
) -> None:
    width, num_layers = wide_size(weight_bytes, element_bytes=element_bytes)
    assert (width, num_layers) == expected
    assert num_layers == 1 or (
        num_layers * matrix_parameters(width) * element_bytes <= weight_bytes
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_trial_stage_runs_prompts_and_tokens(dtype: torch.dtype) -> None:
    stage = TrialStage(2, device=CPU, hidden_size=192, dtype=dtype)
    for _ in range(2):
        stage.decode()
        stage.prefill(5)
    model = stage._engine.stage.model
    (layer, _) = model.model.layers
    sizes = [p.numel() for p in layer.parameters() if p.dim() > 1]
    packed = [
        m.in_features * m.out_features
        for m in layer.modules()
        if hasattr(m, "in_features") and not isinstance(m, torch.nn.Linear)
    ]
    assert sum(sizes) + sum(packed) == stage.layer_parameters == matrix_parameters(192)
