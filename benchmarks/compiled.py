"""Steps of a compiled stage against eager ones, in one process, on the same weights.

    transformers   the family's model as transformers runs it: generate's own steps
    eager          the stage as it runs without --compile: linears packed for oneDNN
    compiled       the stage with --compile

The stage has all layers and the head. All are timed in turn, so that a ratio compares neighbours
in time. Starts: from a load with an empty cache, and with what that left, until the stage runs
compiled code.
"""

import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks.report import Floor, at_least, median, parser, report
from benchmarks.transformers_peer import load
from stagemesh.inference.stage_engine import StageEngine
from stagemesh.model_spec import ModelSpec, load_model_spec
from stagemesh.models.draft import DTYPES
from stagemesh.steps import SamplingParams, Segment, Step

_CONTEXT = 32
_STREAMS = (1, 8)
_PREFILL = 128
_STEPS = 6
_COMPILE_SECONDS = 600.0
_FLOOR = 2.0


class Streams:
    """Sessions of a stage that decode side by side."""

    def __init__(self, engine: StageEngine, count: int) -> None:
        self._engine = engine
        self._count = count
        self._length = _CONTEXT
        self.last: tuple[int | None, ...] = ()
        for index in range(count):
            self._step([(index, 0, _CONTEXT)], [1000 + 31 * j for j in range(_CONTEXT)])

    def decode(self) -> None:
        """One token for each."""
        self._step([(index, self._length, 1) for index in range(self._count)], [7] * self._count)
        self._length += 1

    def prefill(self) -> None:
        """A prompt of another session."""
        self._step([(99, 0, _PREFILL)], [7 + j for j in range(_PREFILL)], release=(99,))

    def _step(
        self, segments: list[tuple[int, int, int]], ids: list[int], release: tuple[int, ...] = ()
    ) -> None:
        step = Step(
            step_id=1,
            segments=tuple(
                Segment(
                    session_id=100 * self._count + session,
                    start_position=start,
                    num_tokens=count,
                    sampling=SamplingParams(),
                )
                for session, start, count in segments
            ),
            token_ids=tuple(ids),
        )
        output = self._engine.run(step, None)
        self.last = tuple(token.token_id for token in output.tokens)
        if release:
            ids_to_free = tuple(100 * self._count + session for session in release)
            self._engine.run(Step(step_id=2, segments=(), release_session_ids=ids_to_free), None)


class Reference:
    """transformers' model with its own cache."""

    def __init__(self, model: Any, count: int) -> None:
        self._model = model
        self._cache = DynamicCache(config=model.config)
        self._count = count
        prompt = [[1000 + 31 * j for j in range(_CONTEXT)]] * count
        with torch.inference_mode():
            model(torch.tensor(prompt), past_key_values=self._cache, use_cache=True)

    @torch.inference_mode()
    def decode(self) -> None:
        """One token for each."""
        ids = torch.full((self._count, 1), 7)
        self._model(ids, past_key_values=self._cache, use_cache=True).logits.argmax(-1)


def load_engine(spec: ModelSpec, dtype: str, folder: Path | None) -> StageEngine:
    """A stage with all layers."""
    return StageEngine.load(
        spec,
        start_layer=0,
        end_layer=spec.num_layers,
        dtype=dtype,
        device=torch.device("cpu"),
        kv_limit_bytes=2**30,
        compile_folder=folder,
    )


def start(spec: ModelSpec, dtype: str, folder: Path) -> tuple[StageEngine, float]:
    """A stage that runs compiled code, and the seconds from the begin of its load."""
    started = time.perf_counter()
    engine = load_engine(spec, dtype, folder)
    assert engine.compiler is not None
    while not engine.compiler.is_settled and time.perf_counter() - started < _COMPILE_SECONDS:
        time.sleep(0.05)
        engine.compiler.advance()
    if engine.compiler.status != "compiled":
        raise SystemExit(f"not compiled: {engine.compiler.status}")
    return engine, time.perf_counter() - started


def seconds(run: Callable[[], None]) -> float:
    """Median of a few calls."""
    times = []
    for _ in range(_STEPS):
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return median(times)


def measure(
    spec: ModelSpec, dtype: str, folder: Path, rounds: int
) -> tuple[list[dict[str, Any]], list[Floor]]:
    """All figures of one dtype; `folder` keeps the compiled code."""
    _, first = start(spec, dtype, folder)
    engine, second = start(spec, dtype, folder)
    eager = load_engine(spec, dtype, None)
    model = load(spec, DTYPES[dtype])
    runs: dict[str, Callable[[], None]] = {}
    for count in _STREAMS:
        name = f"{dtype} {count} stream{'s' if count > 1 else ''}"
        runs[f"{name}, transformers"] = Reference(model, count).decode
        runs[f"{name}, eager"] = Streams(eager, count).decode
        runs[f"{name}, compiled"] = Streams(engine, count).decode
    runs[f"{dtype} prefill of {_PREFILL}, eager"] = Streams(eager, 2).prefill
    runs[f"{dtype} prefill of {_PREFILL}, compiled"] = Streams(engine, 2).prefill
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(seconds(run))
    rows = []
    for name, found in times.items():
        what, _, kind = name.rpartition(", ")
        row: dict[str, Any] = {"what": name, "ms": 1e3 * median(found)}
        for other in ("transformers", "eager"):
            theirs = times.get(f"{what}, {other}")
            ratio = None if theirs is None or kind == other else _ratio(theirs, found)
            row[f"x {other}"] = "" if ratio is None else ratio
        rows.append(row)
    rows.append({"what": f"{dtype} first start, s", "ms": 1e3 * first})
    rows.append({"what": f"{dtype} second start, s", "ms": 1e3 * second})
    floors = []
    if dtype == "float32":
        one = functools.partial("{}, {}".format, f"{dtype} 1 stream")
        for other in ("transformers", "eager"):
            ratio = _ratio(times[one(other)], times[one("compiled")])
            floors.append(at_least(f"compiled / {other}, 1 stream, {dtype}", ratio, _FLOOR))
    return [{column: row.get(column, "") for column in rows[0]} for row in rows], floors


def _ratio(theirs: list[float], ours: list[float]) -> float:
    return median([a / b for a, b in zip(theirs, ours, strict=True)])


def memory_rate() -> float:
    """GB/s at which one thread adds up numbers that lie in memory."""
    numbers = torch.ones(10**8)
    return numbers.nbytes / min(seconds(numbers.sum) for _ in range(3)) / 1e9  # type: ignore[arg-type]


def main() -> None:
    """Parse the command line and run."""
    options = parser(__doc__ or "")
    options.add_argument("--model", default="smollm2-135m-instruct")
    options.add_argument("--dtypes", default="float32,bfloat16")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--cache", type=Path, help="folder of compiled code; by default a new one")
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    spec = load_model_spec(arguments.model)
    rate = memory_rate()
    rows: list[dict[str, Any]] = []
    floors: list[Floor] = []
    with tempfile.TemporaryDirectory() as made:
        for dtype in arguments.dtypes.split(","):
            folder = arguments.cache or Path(made)
            more_rows, more_floors = measure(spec, dtype, folder, arguments.rounds)
            rows += more_rows
            floors += more_floors
    read = spec.stage_weight_bytes(0, spec.num_layers, "float32")
    bound = 1e3 * read / rate / 1e9
    rows.append(dict.fromkeys(rows[0], "") | {"what": "fp32 weights at memory's rate", "ms": bound})
    report("compiled stages", rows, floors, as_json=arguments.json)


if __name__ == "__main__":
    main()
