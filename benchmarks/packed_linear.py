"""Packed against plain linear layers, by rows and threads.

The shapes are those of the sample model, and of a model with hidden size 2048.
Each shape has as many weights as pass the caches, used in turn, as the layers of a model are.
"""

import itertools
import time
from typing import Any

import torch
from torch import nn

from benchmarks.report import Floor, at_least, median, parser, report
from stagemesh.models.packed_linear import PackedLinear, can_pack, packable_dtypes

_SHAPES = (
    *((1536, 576), (576, 1536), (49152, 576)),
    *((2048, 2048), (5632, 2048), (2048, 5632)),
)
_WEIGHT_BYTES = 10**8
_CALLS = 30


def microseconds(layers: list[Any], x: torch.Tensor, rounds: int) -> list[float]:
    """Median time of a call in each round."""
    cycle = itertools.cycle(layers)
    result = []
    for _ in range(rounds):
        times = []
        for _ in range(_CALLS):
            layer = next(cycle)
            started = time.perf_counter()
            layer(x)
            times.append((time.perf_counter() - started) * 1e6)
        result.append(median(times))
    return result


@torch.inference_mode()
def measure(shape: tuple[int, int], dtype: torch.dtype, threads: int, rounds: int) -> list[Any]:
    """One row of the table per number of rows."""
    torch.set_num_threads(threads)
    out_features, in_features = shape
    count = max(2, _WEIGHT_BYTES // (out_features * in_features * dtype.itemsize))
    plain = [nn.Linear(in_features, out_features, bias=False, dtype=dtype) for _ in range(count)]
    packed = [PackedLinear(layer) for layer in plain]
    rows = []
    for num_rows in (1, 2, 4, 8, 128):
        x = torch.randn(num_rows, in_features, dtype=dtype)
        theirs = microseconds(plain, x, rounds)
        ours = microseconds(packed, x, rounds)
        rows.append(
            {
                "what": f"{out_features} x {in_features} {dtype}, {threads} threads",
                "rows": num_rows,
                "plain us": median(theirs),
                "packed us": median(ours),
                "ratio": median([a / b for a, b in zip(theirs, ours, strict=True)]),
            }
        )
    return rows


def main() -> None:
    """Parse the command line and run."""
    arguments = parser(__doc__ or "").parse_args()
    if not can_pack(torch.device("cpu")):
        raise SystemExit("this build of torch has no packed kernels")
    rows = [
        row
        for threads in (1, 2)
        for dtype in packable_dtypes()
        for shape in _SHAPES
        for row in measure(shape, dtype, threads, arguments.rounds)
    ]
    few = [row["ratio"] for row in rows if row["rows"] <= 8]
    floors: list[Floor] = [at_least("median speed-up of packing, up to 8 rows", median(few), 1.0)]
    report("packed linear layers", rows, floors, as_json=arguments.json)


if __name__ == "__main__":
    main()
