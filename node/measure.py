"""What a device can do, measured in slices: each is short, so that others may use it in between.

All of it is measured with steps through the engine that serves, as stages of a pipeline meet them:
after a pause, in which the thread and its helpers have gone to sleep, and with caches that hold
other things. Steps that follow each other at once, with warm caches, take up to 4 ms less, and a
pipeline pays that in every stage.

    narrow stages of few and many layers    seconds per step and per layer, whatever its size
    wide ones, one token                    seconds per byte of weights, beyond those
    wide ones, a prompt                     seconds per product, beyond those

So a rate has in it what layers of a dtype add to those of fp32, and what small matrices cost.
A wide stage's steps take turns with those of narrow ones, and what is taken from each other was
measured within a tenth of a second: how fast a machine is changes by a fifth from second to second.
Figures are medians: what disturbs a step now and then disturbs steps that serve as well.

All slices with their pauses have `BUDGET_SECONDS`, of which each dtype has its part: rounds end
with it, and one is the least. A device gets smaller stages where its memory is slow, and once
something took longer than its part. So only one that needs longer for the least, of the smallest
stages, takes longer.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median

import torch

from node.other_memory import OtherMemory, wait_for
from node.trial_stage import TrialStage, matrix_parameters
from stagemesh.models.draft import DTYPES

_WEIGHT_BYTES = 128 * 2**20
_FLUSHED_PARTS = 3
"""One part of the memory in so many empties the caches, the others are weights."""
_FEW_LAYERS, _MANY_LAYERS = 1, 9
# The widest is whole blocks of the kernels for 16 bits and little more, as most models' widths are:
# what lies behind a block takes several times as long (`stagemesh.models.half_linear`).
_WIDTHS = (576, 384, 192)
_MOST_WIDE_LAYERS = 12
_FEW_ROWS, _MANY_ROWS = 8, 64
_SLICE_SECONDS = 0.1
_FIRST_ROUNDS = 2
_DECODE_ROUNDS = 5
_PREFILL_ROUNDS = 3
"""The most, where there is time for them."""
_USUAL_SHARE = 0.8
"""Of the budget, what is left for the dtypes: with less, their stages are smaller."""
_DECODE_SHARE = 0.75
"""Of a dtype's time, until when there are more rounds of single tokens."""
_READ_SECONDS = 0.03
"""A wide stage is no larger than what is read in this time."""
_FLUSH_SECONDS = 0.01
"""Nor is what is read between steps larger than this: slow memory has small caches."""
_FLUSHES_TIMED = 2
_MOST_OF_MEMORY = 2.0
"""Weights are read at no more than so many times the rate of memory that is only added up."""
_LEAST_SHARE = 0.1
"""Of a step, however much the overheads seem to be."""

BUDGET_SECONDS = 1.5
"""For all slices and pauses, waiting for others not included."""

PAUSE_SECONDS = 0.006
"""Between two slices: longer than idle threads spin before they sleep."""

Slice = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a device reaches in one dtype."""

    stream_bytes_per_second: float
    """Weights that a step of one token reads."""
    flops_per_second: float
    """Of a step with many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpeed:
    """What was measured."""

    rates: Mapping[str, Rates]
    """By run dtype."""
    layer_overhead_seconds: float
    """Added per layer and step, whatever its size."""
    step_overhead_seconds: float
    """Added per step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _WideTimes:
    """Steps of a wide stage."""

    num_layers: int
    layer_parameters: int
    layer_bytes: int
    read_seconds: float
    """Of a step of one token, without the overheads."""
    prefill_seconds: float
    prefill_rows: int


class SpeedMeasurement:
    """A measurement to be run slice by slice, in order, on the device's thread.

    Each slice runs a step and then empties the caches for the next one. Between two slices whoever
    runs them waits for `PAUSE_SECONDS`.

    Args:
        device: what to measure.
        weight_bytes: memory that it may take.
        budget_seconds: for all slices and the pauses between them.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        weight_bytes: int = _WEIGHT_BYTES,
        budget_seconds: float = BUDGET_SECONDS,
    ) -> None:
        self._device = device
        self._budget_seconds = budget_seconds
        self._spent_seconds = 0.0
        self._flushed_bytes = max(1, weight_bytes // _FLUSHED_PARTS)
        self._weight_bytes = max(1, weight_bytes - self._flushed_bytes)
        self._other: OtherMemory | None = None
        self._narrow: dict[int, TrialStage] = {}
        self._steps: dict[int, list[float]] = {_FEW_LAYERS: [], _MANY_LAYERS: []}
        self._wide: TrialStage | None = None
        self._reads: list[float] = []
        self._prefills: list[float] = []
        self._rows = _MANY_ROWS
        self._memory_rate = math.inf
        self._times: dict[str, _WideTimes] = {}

    def overhead_slices(self) -> Iterator[Slice]:
        """The slices that keep next to no memory."""
        for num_layers in (_FEW_LAYERS, _MANY_LAYERS):
            yield self._counted(lambda n=num_layers: self._make_narrow(n))  # type: ignore[misc]
        yield self._counted(self._fit_to_memory)
        for _ in range(_FIRST_ROUNDS):
            yield from self._narrow_slices()
        yield self._counted(self._drop_flushed)

    def rate_slices(self) -> Iterator[Slice]:
        """The slices that need weights."""
        for number, (name, dtype) in enumerate(DTYPES.items()):
            begun = self._spent_seconds
            part = (self._budget_seconds - begun) / (len(DTYPES) - number)
            size = int(self._weight_bytes * min(1.0, part / self._usual_part()))
            yield self._counted(lambda d=dtype, s=size: self._make_wide(d, s))  # type: ignore[misc]
            for _ in self._rounds(_DECODE_ROUNDS, until=begun + _DECODE_SHARE * part):
                if self._spent_seconds < begun + part:
                    yield from self._narrow_slices()
                yield self._counted(self._time_decode)
            yield self._counted(self._choose_rows)
            for _ in self._rounds(_PREFILL_ROUNDS, until=begun + part):
                yield self._counted(self._time_prefill)
            yield self._counted(lambda n=name, d=dtype: self._end_wide(n, d))  # type: ignore[misc]
            over = (self._spent_seconds - begun) / max(part, PAUSE_SECONDS)
            self._weight_bytes = int(self._weight_bytes / max(over, 1.0))
        yield self._counted(self._drop_flushed)

    def _narrow_slices(self) -> Iterator[Slice]:
        for num_layers in (_FEW_LAYERS, _MANY_LAYERS):
            yield self._counted(lambda n=num_layers: self._time_narrow(n))  # type: ignore[misc]

    def _usual_part(self) -> float:
        """Seconds that a dtype has where nothing before it took long."""
        return _USUAL_SHARE * self._budget_seconds / len(DTYPES)

    def _rounds(self, most: int, *, until: float) -> Iterator[int]:
        """One round, and up to so many while there is time for one more."""
        begun = self._spent_seconds
        for number in range(most):
            one = (self._spent_seconds - begun) / max(1, number)
            if number and self._spent_seconds + one > until:
                return
            yield number

    def _counted(self, each: Slice) -> Slice:
        """The slice, its time and pause taken from the budget."""

        def run() -> None:
            started = time.perf_counter()
            each()
            self._spent_seconds += time.perf_counter() - started + PAUSE_SECONDS

        return run

    def result(self) -> DeviceSpeed:
        """What came out, once all slices have run."""
        per_layer = max(0.0, median(_layer_seconds(*each) for each in self._narrow_pairs()))
        per_step = max(0.0, median(_step_seconds(*each) for each in self._narrow_pairs()))
        rates = {}
        for name, times in self._times.items():
            fixed = per_step + times.num_layers * per_layer
            computing = max(times.prefill_seconds - fixed, _LEAST_SHARE * times.prefill_seconds)
            flops = 2 * times.prefill_rows * times.num_layers * times.layer_parameters
            stream = times.num_layers * times.layer_bytes / times.read_seconds
            rates[name] = Rates(
                # Where a pause of the machine was taken for overhead, more seems to be left.
                stream_bytes_per_second=min(stream, _MOST_OF_MEMORY * self._memory_rate),
                flops_per_second=flops / computing,
            )
        return DeviceSpeed(
            rates=rates, layer_overhead_seconds=per_layer, step_overhead_seconds=per_step
        )

    def _make_narrow(self, num_layers: int) -> None:
        stage = self._narrow[num_layers] = TrialStage(num_layers, device=self._device)
        stage.decode()
        self._flush()

    def _fit_to_memory(self) -> None:
        """Take less where memory is so slow that reading all of it takes too long."""
        seconds = min(self._time(self._flush) for _ in range(_FLUSHES_TIMED))
        rate = self._memory_rate = self._flushed_bytes / max(seconds, 1e-9)
        self._weight_bytes = max(1, min(self._weight_bytes, int(_READ_SECONDS * rate)))
        fewer = max(1, min(self._flushed_bytes, int(_FLUSH_SECONDS * rate)))
        if fewer < self._flushed_bytes:
            self._flushed_bytes, self._other = fewer, None

    def _time_narrow(self, num_layers: int) -> None:
        self._steps[num_layers].append(self._time(self._narrow[num_layers].decode))

    def _make_wide(self, dtype: torch.dtype, weight_bytes: int) -> None:
        hidden_size, num_layers = wide_size(max(1, weight_bytes), element_bytes=dtype.itemsize)
        self._wide = TrialStage(
            num_layers, device=self._device, hidden_size=hidden_size, dtype=dtype
        )
        self._wide.decode()
        self._reads, self._prefills = [], []
        self._flush()

    def _time_decode(self) -> None:
        seconds = self._time(self._stage.decode)
        few, many = self._narrow_pairs()[-1]
        fixed = _step_seconds(few, many) + self._stage.num_layers * _layer_seconds(few, many)
        self._reads.append(max(seconds - fixed, _LEAST_SHARE * seconds))

    def _choose_rows(self) -> None:
        """Fewer where many take too long, as in a dtype that the device has no units for."""
        seconds = self._time(lambda: self._stage.prefill(_FEW_ROWS))
        fits = seconds * _MANY_ROWS / _FEW_ROWS <= 2 * _SLICE_SECONDS
        self._rows = _MANY_ROWS if fits else _FEW_ROWS

    def _time_prefill(self) -> None:
        self._prefills.append(self._time(lambda: self._stage.prefill(self._rows)))

    def _end_wide(self, name: str, dtype: torch.dtype) -> None:
        stage, self._wide = self._stage, None
        self._times[name] = _WideTimes(
            num_layers=stage.num_layers,
            layer_parameters=stage.layer_parameters,
            layer_bytes=stage.layer_parameters * dtype.itemsize,
            read_seconds=median(self._reads),
            prefill_seconds=median(self._prefills),
            prefill_rows=self._rows,
        )

    def _narrow_pairs(self) -> list[tuple[float, float]]:
        """Seconds of steps of few and of many layers that followed each other."""
        return list(zip(self._steps[_FEW_LAYERS], self._steps[_MANY_LAYERS], strict=True))

    @property
    def _stage(self) -> TrialStage:
        assert self._wide is not None, "slices run in order"
        return self._wide

    def _time(self, function: Callable[[], object]) -> float:
        """Seconds that a call takes; the caches are emptied after it."""
        started = time.perf_counter()
        function()
        wait_for(self._device)
        seconds = time.perf_counter() - started
        self._flush()
        return seconds

    def _flush(self) -> None:
        """Empty the caches, as a stage of another process does when its turn comes."""
        if self._other is None:
            self._other = OtherMemory(self._device, num_bytes=self._flushed_bytes)
        self._other.read()

    def _drop_flushed(self) -> None:
        self._other = None


def _layer_seconds(few: float, many: float) -> float:
    """What a layer adds, from steps of narrow stages of few and of many."""
    return (many - few) / (_MANY_LAYERS - _FEW_LAYERS)


def _step_seconds(few: float, many: float) -> float:
    """What a step takes without layers."""
    return few - _FEW_LAYERS * _layer_seconds(few, many)


def wide_size(weight_bytes: int, *, element_bytes: int) -> tuple[int, int]:
    """The width and layers of a stage that fills so much memory: wide layers rather than many."""
    layer_bytes = [matrix_parameters(width) * element_bytes for width in _WIDTHS]
    index = next((i for i, size in enumerate(layer_bytes) if 2 * size <= weight_bytes), -1)
    num_layers = weight_bytes // layer_bytes[index]
    return _WIDTHS[index], min(max(1, num_layers), _MOST_WIDE_LAYERS)
