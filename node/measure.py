"""What a device can do, measured in slices: each is short, so that others may use it in between.

The kernels are those that stages use (`stagemesh.models.packed_linear`): a rate that some other
matrix product reaches would say little. Times are the lower quartile of several runs, since what
disturbs a run only ever makes it slower.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from node.trial_stage import TrialStage
from stagemesh.models.builder import DTYPES
from stagemesh.models.packed_linear import PACKABLE_DTYPES, PackedLinear, can_pack

_IN, _OUT = 1024, 2048
_WEIGHT_BYTES = 96 * 2**20
"""Of all matrices that are read in turn: more than caches hold."""
_MANY_ROWS = 64
_RATE_SECONDS = 0.08
_STEP_SECONDS = 0.06
_STEP_ROUNDS = 3
_MIN_RUNS = 3
_MOST_TIMES = 2.0
"""Runs end after so many times the planned seconds, however few they are."""
_FEW_LAYERS, _MANY_LAYERS = 1, 9

Slice = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a device reaches in one dtype."""

    stream_bytes_per_second: float
    """Weights that a matrix-vector product reads."""
    flops_per_second: float
    """Of a matrix product with many rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpeed:
    """What was measured."""

    rates: Mapping[str, Rates]
    """By run dtype."""
    layer_overhead_seconds: float
    """Added per layer and step, whatever its size."""
    step_overhead_seconds: float
    """Added per step."""


class SpeedMeasurement:
    """A measurement to be run slice by slice, in order, on the device's thread.

    Args:
        device: what to measure.
        weight_bytes: memory that it may take.
    """

    def __init__(self, device: torch.device, *, weight_bytes: int = _WEIGHT_BYTES) -> None:
        self._device = device
        self._num_elements = max(1, weight_bytes) // 4
        self._rates: dict[str, Rates] = {}
        self._stages: dict[int, TrialStage] = {}
        self._steps: dict[int, float] = {}
        self._layers: list[nn.Module] = []
        self._stream_seconds = math.inf

    def overhead_slices(self) -> Iterator[Slice]:
        """The slices that take next to no memory; in turn, so that a slow moment hits both."""
        for num_layers in (_FEW_LAYERS, _MANY_LAYERS) * _STEP_ROUNDS:
            yield lambda n=num_layers: self._time_steps(n)  # type: ignore[misc]

    def rate_slices(self) -> Iterator[Slice]:
        """The slices that need weights."""
        for name, dtype in DTYPES.items():
            yield lambda d=dtype: self._make_layers(d)  # type: ignore[misc]
            yield lambda d=dtype: self._time_stream(d)  # type: ignore[misc]
            yield lambda n=name, d=dtype: self._time_flops(n, d)  # type: ignore[misc]

    def result(self) -> DeviceSpeed:
        """What came out, once all slices have run."""
        few, many = self._steps[_FEW_LAYERS], self._steps[_MANY_LAYERS]
        per_layer = max(0.0, (many - few) / (_MANY_LAYERS - _FEW_LAYERS))
        return DeviceSpeed(
            rates=dict(self._rates),
            layer_overhead_seconds=per_layer,
            step_overhead_seconds=max(0.0, few - _FEW_LAYERS * per_layer),
        )

    def _time_steps(self, num_layers: int) -> None:
        if num_layers not in self._stages:
            self._stages[num_layers] = TrialStage(num_layers, device=self._device)
        seconds = self._time(self._stages[num_layers].step, seconds=_STEP_SECONDS)
        self._steps[num_layers] = min(seconds, self._steps.get(num_layers, math.inf))

    @torch.inference_mode()
    def _make_layers(self, dtype: torch.dtype) -> None:
        self._layers = []
        count = max(1, self._num_elements * 4 // dtype.itemsize // (_IN * _OUT))
        is_packed = can_pack(self._device) and dtype in PACKABLE_DTYPES
        for _ in range(count):
            linear = nn.Linear(_IN, _OUT, bias=False, device="meta", dtype=dtype)
            # Written to, or all would be read from one page of zeros.
            weight = torch.full((_OUT, _IN), 0.01, dtype=dtype, device=self._device)
            linear.weight = nn.Parameter(weight, requires_grad=False)
            self._layers.append(PackedLinear(linear) if is_packed else linear)

    @torch.inference_mode()
    def _time_stream(self, dtype: torch.dtype) -> None:
        row = torch.full((1, _IN), 0.5, dtype=dtype, device=self._device)

        def read_all() -> None:
            for layer in self._layers:
                layer(row)

        self._stream_seconds = self._time(read_all, seconds=_RATE_SECONDS)

    @torch.inference_mode()
    def _time_flops(self, name: str, dtype: torch.dtype) -> None:
        rows = torch.full((_MANY_ROWS, _IN), 0.5, dtype=dtype, device=self._device)
        layer = self._layers[0]
        seconds = self._time(lambda: layer(rows), seconds=_RATE_SECONDS)
        num_bytes = len(self._layers) * _IN * _OUT * dtype.itemsize
        self._layers = []
        self._rates[name] = Rates(
            stream_bytes_per_second=num_bytes / self._stream_seconds,
            flops_per_second=2 * _MANY_ROWS * _IN * _OUT / seconds,
        )

    def _time(self, function: Callable[[], object], *, seconds: float) -> float:
        """Lower quartile of the seconds that a call takes, in about so many seconds."""
        function()
        self._wait()
        taken: list[float] = []
        while sum(taken) < seconds or len(taken) < _MIN_RUNS:
            started = time.perf_counter()
            function()
            self._wait()
            taken.append(time.perf_counter() - started)
            if sum(taken) > _MOST_TIMES * seconds:
                break
        return sorted(taken)[len(taken) // 4]

    def _wait(self) -> None:
        """Until an accelerator has done what it was given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        elif self._device.type == "mps":
            torch.mps.synchronize()
