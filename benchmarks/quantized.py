"""Weights in 32, 16, 8 and 4 bits: tokens per second, memory and perplexity, in one run.

    fp32, bf16, int8, int4   the sample model as a safetensors checkpoint in float32
    Q4_1 file                the sample's GGUF file, held as it is (`--quantize auto`)

The checkpoint is written from the file, so all rows have the same weights to begin with, and 32
bits are what the others are compared with. The low-bit rows run in float32. The weights were
rounded to 4 bits once, by who made the file: that int4 loses little says less of it than of a
model that never was.

Perplexity is of the language reference that Python ships (`pydoc_data.topics`, English prose with
some code), twice: with 512 tokens a step, as a prompt is read, and with 8 texts of a token a step,
as eight streams are decoded, since many and few rows go through different kernels. Memory is of a
process of its own for each row.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.quantized_engine import WholeModel
from benchmarks.report import Floor, at_least, at_most, median, parser, report
from coordinator.text.tokenizer import load_tokenizer
from stagemesh.model_spec import ModelSpec, load_model_spec
from stagemesh.models.weights import WeightReader

_SAMPLE = "smollm2-135m-instruct"
_TOPICS = ("compound", "execmodel", "import")
_TEXT_TOKENS = 2048
_WINDOW = 512
_STREAM_TOKENS = 65
_CHILD_SECONDS = 120.0
_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A row of the table."""

    name: str
    dtype: str = "float32"
    quantize: str = "none"
    is_file: bool = False
    """Whether it reads the sample's own file."""


FORMATS = (
    Format(name="fp32"),
    Format(name="bf16", dtype="bfloat16"),
    Format(name="int8", quantize="int8"),
    Format(name="int4", quantize="int4"),
    Format(name="Q4_1 file", quantize="auto", is_file=True),
)


def write_in_float32(spec: ModelSpec, folder: Path) -> None:
    """The model of a GGUF file as a safetensors checkpoint."""
    reader = WeightReader(spec)
    tensors = {name: reader.read(info, torch.float32) for name, info in spec.tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(spec.config))


def memory_of(model: str, wanted: Format) -> dict[str, int]:
    """What a process that runs the format holds."""
    command = [sys.executable, "-m", "benchmarks.quantized_engine"]
    done = subprocess.run(
        [*command, model, wanted.dtype, wanted.quantize],
        capture_output=True,
        text=True,
        check=True,
        timeout=_CHILD_SECONDS,
    )
    sizes: dict[str, int] = json.loads(done.stdout)
    return sizes


def texts_of(ids: Sequence[int], length: int, count: int) -> list[list[int]]:
    """`count` pieces of one length."""
    return [list(ids[i * length : (i + 1) * length]) for i in range(count)]


def perplexities(model: WholeModel, ids: Sequence[int]) -> tuple[float, float]:
    """With many rows a step, and with eight."""
    windows = texts_of(ids, _WINDOW, _TEXT_TOKENS // _WINDOW)
    # The windows have one length, so the mean of their logarithms is the text's.
    many = [model.perplexity([window], rows=_WINDOW) for window in windows]
    product = torch.tensor(many, dtype=torch.float64).log().mean().exp()
    return float(product), model.perplexity(texts_of(ids, _STREAM_TOKENS, 8), rows=1)


def measure(spec: ModelSpec, checkpoint: ModelSpec, rounds: int) -> list[dict[str, Any]]:
    """All rows."""
    text = "".join(topics[topic] for topic in _TOPICS)
    ids = load_tokenizer(spec).encode(text, add_special_tokens=False)[:_TEXT_TOKENS]
    places = [spec if wanted.is_file else checkpoint for wanted in FORMATS]
    memory = [memory_of(str(p.path), f) for p, f in zip(places, FORMATS, strict=True)]
    models = [
        WholeModel(place, dtype=wanted.dtype, quantize=wanted.quantize)
        for place, wanted in zip(places, FORMATS, strict=True)
    ]
    quality = [perplexities(model, ids) for model in models]
    speeds: list[list[tuple[float, float, float]]] = [[] for _ in models]
    for _ in range(rounds):
        for model, found in zip(models, speeds, strict=True):
            found.append(
                (
                    model.tokens_per_second(1, 24),
                    model.tokens_per_second(8, 8),
                    model.prompt_tokens_per_second(_WINDOW),
                )
            )
    rows = []
    for index, wanted in enumerate(FORMATS):
        one, eight, prompt = (median(column) for column in zip(*speeds[index], strict=True))
        paired = list(zip(speeds[index], speeds[0], strict=True))
        rows.append(
            {
                "what": wanted.name,
                "1 stream tokens/s": one,
                "8 streams tokens/s": eight,
                "prompt tokens/s": prompt,
                "1 stream x": median([ours[0] / fp32[0] for ours, fp32 in paired]),
                "8 streams x": median([ours[1] / fp32[1] for ours, fp32 in paired]),
                "weights MB": memory[index]["weight_bytes"] / 1e6,
                "growth MB": memory[index]["growth_bytes"] / 1e6,
                "peak MB": memory[index]["peak_bytes"] / 1e6,
                "of the file": memory[index]["growth_bytes"] / memory[index]["file_bytes"],
                "perplexity": quality[index][0],
                "perplexity, 8 rows": quality[index][1],
            }
        )
    return rows


def floors_of(rows: Sequence[dict[str, Any]]) -> list[Floor]:
    """What must hold."""
    fp32, _, int8, int4, file = rows
    keys = ("perplexity", "perplexity, 8 rows")
    worst = {row["what"]: max(row[key] / fp32[key] for key in keys) for row in (int8, int4, file)}
    return [
        at_most("perplexity of int8 over fp32", worst["int8"], 1.01),
        at_most("perplexity of the Q4_1 file over fp32", worst["Q4_1 file"], 1.02),
        at_most("memory of the Q4_1 file over the file", file["of the file"], 2.0),
        at_least("one stream, int8 over fp32", int8["1 stream x"], 1.0),
        at_least("one stream, int4 over fp32", int4["1 stream x"], 1.0),
        at_least("one stream, Q4_1 file over fp32", file["1 stream x"], 1.0),
    ]


def main() -> None:
    """Parse the command line and run."""
    options = parser(__doc__ or "")
    options.set_defaults(rounds=_ROUNDS)
    arguments = options.parse_args()
    torch.set_num_threads(2)
    spec = load_model_spec(_SAMPLE)
    with tempfile.TemporaryDirectory() as folder:
        write_in_float32(spec, Path(folder))
        rows = measure(spec, load_model_spec(folder), arguments.rounds)
    report("weights in few bits", rows, floors_of(rows), as_json=arguments.json)


if __name__ == "__main__":
    main()
