"""One rank of the tensor-parallel benchmark: a process with one thread that runs a whole model.

One JSON object per line, in and out. The first input is a `Start`; each later one is a `Request`,
which all ranks get alike, answered with an `Answer`.
"""

import functools
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch

from stagemesh.comm.backends import Backend, GroupConfig, init_process_group
from stagemesh.comm.comm_loop import CommLoop
from stagemesh.comm.rendezvous import SharedFolder
from stagemesh.inference.stage_engine import StageEngine
from stagemesh.model_spec import ModelSpec, load_model_spec
from stagemesh.models.tensor_group import TensorGroup
from stagemesh.placement.tensor_shares import TensorShares
from stagemesh.steps import SamplingParams, Segment, Step

_TIMEOUT_SECONDS = 120.0
_SESSION = 7
_READS = 8

Kind = Literal["decode", "prefill", "read"]
"""What is measured; "read" computes nothing, but adds up as many bytes as there are of weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a process is to be."""

    model: str
    dtype: str
    rank: int
    world_size: int
    backends: list[str]
    folder: str
    """Where the ranks meet."""
    core: int | None
    """To stay on; None lets the kernel choose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One measurement."""

    backend: str
    is_direct: bool
    """Whether sums go straight from thread to thread, or through the group."""
    kind: Kind
    prompt_tokens: int
    new_tokens: int
    """Decode: so many after the prompt, which is not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What it took on this rank."""

    seconds: float
    """Of a token of decode, or of the prefill."""
    sum_share: float
    """Part of it that passed in what the ranks do together, waiting for each other included."""
    tokens: list[int]


def engines(start: Start, spec: ModelSpec, stack: ExitStack) -> Iterator[tuple[str, StageEngine]]:
    """The model by backend; a rank alone needs none."""
    if start.world_size == 1:
        yield "", _load(start, spec, None)
        return
    shares = TensorShares.divide(
        num_ranks=start.world_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        mlp_columns=spec.config["intermediate_size"],
        vocab_size=spec.vocab_size,
    )
    loop = stack.enter_context(CommLoop())
    for backend in start.backends:
        config = GroupConfig(
            backend=cast(Backend, backend),
            rendezvous=SharedFolder(path=Path(start.folder)),
            rank=start.rank,
            world_size=start.world_size,
            group_id=backend,
            timeout_seconds=_TIMEOUT_SECONDS,
        )
        group = stack.enter_context(init_process_group(config, loop=loop))
        yield backend, _load(start, spec, TensorGroup(group, shares))


def _load(start: Start, spec: ModelSpec, group: TensorGroup | None) -> StageEngine:
    return StageEngine.load(
        spec,
        start_layer=0,
        end_layer=spec.num_layers,
        dtype=start.dtype,
        device=torch.device("cpu"),
        kv_limit_bytes=2**29,
        tensor_group=group,
    )


@functools.cache
def _bytes_like(engine: StageEngine) -> torch.Tensor:
    return torch.ones(engine.stage.weight_bytes // 4)


def read(engine: StageEngine) -> Answer:
    """The rate of memory, which no decode can beat."""
    memory = _bytes_like(engine)
    started = time.perf_counter()
    for _ in range(_READS):
        memory.sum()
    return Answer(seconds=(time.perf_counter() - started) / _READS, sum_share=0.0, tokens=[])


def measure(engine: StageEngine, request: Request) -> Answer:
    """Run a prompt, and what follows it; the session is gone afterwards."""
    if request.kind == "read":
        return read(engine)
    group = engine.stage.tensor_group
    if group is not None:
        group.sums.bypass(is_on=not request.is_direct)
    vocab_size = engine.stage.model.config.get_text_config().vocab_size
    prompt = tuple(
        (17 * index + 5) % min(vocab_size, 4096) for index in range(request.prompt_tokens)
    )
    tokens: list[int] = []
    started, before = time.perf_counter(), _seconds_in_sums(group)
    tokens.append(_run(engine, prompt, start_position=0))
    if request.kind == "decode":
        started, before = time.perf_counter(), _seconds_in_sums(group)
        for index in range(request.new_tokens):
            position = len(prompt) + index
            tokens.append(_run(engine, (tokens[-1],), start_position=position))
    seconds = time.perf_counter() - started
    share = (_seconds_in_sums(group) - before) / seconds
    engine.run(Step(step_id=0, segments=(), token_ids=(), release_session_ids=(_SESSION,)), None)
    count = request.new_tokens if request.kind == "decode" else 1
    return Answer(seconds=seconds / count, sum_share=share, tokens=tokens)


def _run(engine: StageEngine, token_ids: tuple[int, ...], *, start_position: int) -> int:
    segment = Segment(
        session_id=_SESSION,
        start_position=start_position,
        num_tokens=len(token_ids),
        sampling=SamplingParams(),
    )
    output = engine.run(Step(step_id=0, segments=(segment,), token_ids=token_ids), None)
    token = output.tokens[0].token_id
    assert token is not None
    return token


def _seconds_in_sums(group: TensorGroup | None) -> float:
    return 0.0 if group is None else group.sums.time_spent.seconds


def _say(answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serve until standard input ends."""
    torch.set_num_threads(1)
    start = Start(**json.loads(sys.stdin.readline()))
    if start.core is not None:
        os.sched_setaffinity(0, {start.core})
    spec = load_model_spec(start.model)
    with ExitStack() as stack:
        by_backend = dict(engines(start, spec, stack))
        _say("ready")
        for line in sys.stdin:
            request = Request(**json.loads(line))
            _say(asdict(measure(by_backend[request.backend], request)))


if __name__ == "__main__":
    main()
