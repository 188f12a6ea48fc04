"""Two ranks of one thread against one process of one thread: decode of a stream, and a prefill.

    sample          the shipped model: 30 layers, hidden 576, 9 heads, which two ranks divide 6 to 3
    random Llama    8 layers, hidden 2048, 32 heads over 8 of keys and values, random weights

All processes of a model live through its run and only those of one measurement work at a time. A
round measures everything one after the other, so that a ratio compares neighbours in time; ratios
are medians over rounds. Each backend is measured twice: as it is by default, with sums that go
straight from thread to thread, and "through the group", whose operations cross its event loop. The
share of sums is of rank 0's time, and has its waiting for the other rank in it. "Weights only read"
is the bound that memory sets to a decode: each process adds up as many bytes as it has weights.
"""

import asyncio
import contextlib
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.collectives import RankProcess, end_process
from benchmarks.report import Floor, at_least, median, parser, report
from benchmarks.tensor_parallel_rank import Answer, Kind, Request, Start

BACKENDS = ("grpc", "gloo")
SAMPLE, LLAMA = "sample", "random Llama"
FLOORS = {
    (SAMPLE, "decode"): 1.1,
    (LLAMA, "decode"): 1.5,
    (SAMPLE, "prefill"): 1.5,
    (LLAMA, "prefill"): 1.7,
}
NEW_TOKENS = {SAMPLE: 32, LLAMA: 12}

_CONTEXT_TOKENS = 64
_PREFILL_TOKENS = 512
_LABELS = {"decode": "decode", "prefill": "prefill", "read": "weights only read"}
_ONE = ("one process", False)
_KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Model:
    """What is measured."""

    name: str
    path: str


def write_llama(folder: Path) -> str:
    """A Llama with random weights, in the sizes of a small real one but for its depth."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=8,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=16384,
        dtype="bfloat16",
    )
    model: torch.nn.Module = LlamaForCausalLM(config)
    model.to(torch.bfloat16)
    model.save_pretrained(folder)  # type: ignore[operator]
    return str(folder)


@contextlib.asynccontextmanager
async def processes(
    model: Model, arguments: Any
) -> AsyncGenerator[tuple[RankProcess, list[RankProcess]], None]:
    """The process alone and the two ranks, with the model loaded."""
    with tempfile.TemporaryDirectory() as folder:
        started = []
        try:
            running = []
            for rank, world_size in ((0, 1), (0, 2), (1, 2)):
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "benchmarks.tensor_parallel_rank"),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                )
                started.append(process)
                running.append(RankProcess(process))
                start = Start(
                    model=model.path,
                    dtype=arguments.dtype,
                    rank=rank,
                    world_size=world_size,
                    backends=list(BACKENDS),
                    folder=folder,
                    core=rank if arguments.pin else None,
                )
                running[-1].tell(asdict(start))
            for each in running:
                await each.read()
            yield running[0], running[1:]
        finally:
            for process in started:
                await end_process(process)


async def measure(running: Sequence[RankProcess], request: Request) -> Answer:
    """What rank 0 saw, and the time of the slowest."""
    for each in running:
        each.tell(asdict(request))
    answers = [Answer(**answer) for answer in await asyncio.gather(*(e.read() for e in running))]
    if any(answer.tokens != answers[0].tokens for answer in answers):
        raise RuntimeError(f"{request}: the ranks gave different tokens")
    return replace(answers[0], seconds=max(answer.seconds for answer in answers))


Key = tuple[str, tuple[str, bool]]


async def run_model(model: Model, arguments: Any) -> dict[Key, list[Answer]]:
    """The answers of all rounds, by kind and by backend and way."""
    seen: defaultdict[Key, list[Answer]] = defaultdict(list)
    ways = [(backend, is_direct) for backend in BACKENDS for is_direct in (True, False)]
    if arguments.direct_only:
        ways = [way for way in ways if way[1]]
    async with processes(model, arguments) as (alone, ranks):
        for number in range(arguments.rounds + 1):
            for kind in _KINDS:
                tokens = _CONTEXT_TOKENS if kind == "decode" else _PREFILL_TOKENS
                for backend, is_direct in (_ONE, *(ways[:1] if kind == "read" else ways)):
                    is_one = (backend, is_direct) == _ONE
                    request = Request(
                        backend="" if is_one else backend,
                        is_direct=is_direct,
                        kind=kind,
                        # The first round warms up.
                        prompt_tokens=tokens if number else 32,
                        new_tokens=NEW_TOKENS[model.name] if number else 4,
                    )
                    answer = await measure([alone] if is_one else ranks, request)
                    if number:
                        seen[kind, (backend, is_direct)].append(answer)
    return seen


def summary(
    model: Model, seen: dict[Key, list[Answer]]
) -> tuple[list[dict[str, Any]], list[Floor]]:
    """A row for each measurement, and the model's floors."""
    rows: list[dict[str, Any]] = []
    floors = []
    for kind in _KINDS:
        alone = seen[kind, _ONE]
        best = 0.0
        for (other_kind, way), answers in seen.items():
            if other_kind != kind:
                continue
            pairs = list(zip(alone, answers, strict=True))
            ratio = median([one.seconds / two.seconds for one, two in pairs])
            name = way[0] if way == _ONE or way[1] else f"{way[0]}, through the group"
            if kind == "read":
                name = way[0] if way == _ONE else "two processes"
            same = sum(one.tokens == two.tokens for one, two in pairs)
            rows.append(
                {
                    "what": f"{model.name}, {_LABELS[kind]}, {name}",
                    "ms": median([answer.seconds for answer in answers]) * 1e3,
                    "ratio": ratio,
                    "least": min(one.seconds / two.seconds for one, two in pairs),
                    "share of sums": median([answer.sum_share for answer in answers]),
                    "same answers": f"{same}/{len(pairs)}",
                }
            )
            if way != _ONE:
                best = max(best, ratio)
        if (model.name, kind) in FLOORS:
            label = f"{model.name}, {kind}: 2 ranks / 1, the better backend"
            floors.append(at_least(label, best, FLOORS[model.name, kind]))
    return rows, floors


async def run(arguments: Any) -> None:
    """Measure each model and print."""
    rows: list[dict[str, Any]] = []
    floors: list[Floor] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in (SAMPLE, LLAMA):
            if arguments.model not in ("both", name.split()[-1].lower()):
                continue
            is_sample = name == SAMPLE
            path = arguments.sample if is_sample else write_llama(Path(folder) / "llama")
            model = Model(name, path)
            more_rows, more_floors = summary(model, await run_model(model, arguments))
            rows += more_rows
            floors += more_floors
    where = "each rank on a core of its own" if arguments.pin else "cores by the kernel"
    title = f"2 ranks x 1 thread against 1 x 1, {arguments.dtype}, {where}"
    report(title, rows, floors, as_json=arguments.json)


def main() -> None:
    """Parse the command line and run."""
    options = parser(__doc__ or "")
    options.set_defaults(rounds=3)
    options.add_argument("--model", choices=("both", "sample", "llama"), default="both")
    options.add_argument("--sample", default="smollm2-135m-instruct", help="the sample model")
    options.add_argument("--dtype", default="float32")
    options.add_argument("--pin", action="store_true", help="bind each process to a core")
    options.add_argument(
        "--direct-only", action="store_true", help="leave out the way through the group"
    )
    arguments = options.parse_args()
    if arguments.pin and len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("--pin needs two cores")
    asyncio.run(run(arguments))


if __name__ == "__main__":
    main()
