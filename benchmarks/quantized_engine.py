"""One whole model in one process, for the benchmark of low-bit weights.

`python -m benchmarks.quantized_engine MODEL DTYPE QUANTIZE` loads it in a process of its own, as a
node does, answers a little, and prints what the process has grown by.
"""

import json
import math
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

from node.free_memory import give_back_freed_memory
from stagemesh.inference.stage_engine import StageEngine
from stagemesh.model_spec import ModelSpec, load_model_spec
from stagemesh.steps import SampledToken, SamplingParams, Segment, Step

_PROMPT_TOKENS = 32
_TRIM_BYTES = 64 * 2**20
_GREEDY = SamplingParams()


class WholeModel:
    """All layers of a model on the CPU.

    Args:
        spec: the model.
        dtype: run dtype.
        quantize: how weights are held.
    """

    def __init__(self, spec: ModelSpec, *, dtype: str, quantize: str) -> None:
        self._since_trim = 0
        self.engine = StageEngine.load(
            spec,
            start_layer=0,
            end_layer=spec.num_layers,
            dtype=dtype,
            device=torch.device("cpu"),
            kv_limit_bytes=10**9,
            on_bytes=self._trim,
            quantize=quantize,
        )
        give_back_freed_memory()
        self._next_step_id = 1

    def tokens_per_second(self, streams: int, new_tokens: int) -> float:
        """New tokens of all streams by the time that decoding takes; prompts are not counted."""
        last = []
        for stream in range(streams):
            prompt = [1000 + 97 * stream + 31 * i for i in range(_PROMPT_TOKENS)]
            segment = Segment(
                session_id=stream, start_position=0, num_tokens=len(prompt), sampling=_GREEDY
            )
            last.append(self._run([segment], prompt)[0].token_id or 0)
        started = time.perf_counter()
        for step in range(new_tokens):
            segments = [
                Segment(
                    session_id=stream,
                    start_position=_PROMPT_TOKENS + step,
                    num_tokens=1,
                    sampling=_GREEDY,
                )
                for stream in range(streams)
            ]
            last = [token.token_id or 0 for token in self._run(segments, last)]
        seconds = time.perf_counter() - started
        self._release(range(streams))
        return streams * new_tokens / seconds

    def prompt_tokens_per_second(self, num_tokens: int) -> float:
        """Tokens of a prompt by the time that it takes."""
        prompt = [(1000 + 31 * i) % 40000 for i in range(num_tokens)]
        segment = Segment(session_id=0, start_position=0, num_tokens=num_tokens, sampling=_GREEDY)
        started = time.perf_counter()
        self._run([segment], prompt)
        seconds = time.perf_counter() - started
        self._release([0])
        return num_tokens / seconds

    def perplexity(self, texts: Sequence[Sequence[int]], *, rows: int) -> float:
        """exp of the mean negative log-likelihood of each token but the first of each text.

        Args:
            texts: token ids, of one length.
            rows: tokens of each text in a step.
        """
        scores: list[float] = []
        length = len(texts[0]) - 1
        for start in range(0, length, rows):
            end = min(start + rows, length)
            segments = [
                Segment(
                    session_id=session,
                    start_position=start,
                    num_tokens=end - start,
                    target_token_ids=tuple(text[start + 1 : end + 1]),
                )
                for session, text in enumerate(texts)
            ]
            token_ids = [token for text in texts for token in text[start:end]]
            for sampled in self._run(segments, token_ids):
                scores.extend(score.logprob for score in sampled.target_scores)
        self._release(range(len(texts)))
        return math.exp(-sum(scores) / len(scores))

    def _run(self, segments: Sequence[Segment], token_ids: Sequence[int]) -> list[SampledToken]:
        step = Step(
            step_id=self._next_step_id, segments=tuple(segments), token_ids=tuple(token_ids)
        )
        self._next_step_id += 1
        return list(self.engine.run(step, None).tokens)

    def _release(self, sessions: Sequence[int]) -> None:
        self.engine.run(Step(step_id=0, release_session_ids=tuple(sessions)), None)

    def _trim(self, num_bytes: int) -> None:
        self._since_trim += num_bytes
        if self._since_trim > _TRIM_BYTES:
            self._since_trim = 0
            give_back_freed_memory()


def main() -> None:
    """Load, answer a little, print what the process holds."""
    model, dtype, quantize = sys.argv[1:]
    torch.set_num_threads(2)
    spec = load_model_spec(model)
    process = psutil.Process()
    before = process.memory_info().rss
    whole = WholeModel(spec, dtype=dtype, quantize=quantize)
    # The largest so far; what a load takes for a while is in it.
    peak = _peak_bytes()
    whole.tokens_per_second(1, 4)
    give_back_freed_memory()
    after = process.memory_info().rss
    size = sum(file.stat().st_size for file in _files(spec))
    print(
        json.dumps(
            {
                "weight_bytes": whole.engine.stage.weight_bytes,
                "growth_bytes": after - before,
                "peak_bytes": max(peak, after) - before,
                "file_bytes": size,
            }
        )
    )


def _peak_bytes() -> int:
    """The most that this program has held; getrusage counts what the parent held as it forked."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    lines = status.read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024


def _files(spec: ModelSpec) -> set[Path]:
    return {info.file for info in spec.tensors.values()}


if __name__ == "__main__":
    main()
