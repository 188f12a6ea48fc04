"""Products with weights in 32, 16, 8 and 4 bits, by rows and threads: which kernel is the faster.

    packed float32     what a stage in float32 does; all others are compared with it
    torch's bfloat16   `torch.nn.functional.linear`
    16 bits            what a stage in bfloat16 does (packed for oneDNN, or `HalfLinear`)
    kernel             PyTorch's kernel reads 8 or 4 bits as they lie in memory
    unpacked           tiles of the weights become floats, which the ordinary kernel multiplies
    rule               which of the two `stagemesh.models.low_bit_kernels` takes

Each shape has as many weights as pass the caches, used in turn, as the layers of a model are.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.report import at_most, median, parser, report
from stagemesh.models.low_bit_kernels import LowBitKernels
from stagemesh.models.low_bit_values import quantize_groups, quantize_rows
from stagemesh.models.packed_linear import pack_linears

_SHAPES = ((1536, 576), (576, 1536))
_ROWS = (1, 4, 8, 16, 32, 64, 128, 512)
_WEIGHT_ELEMENTS = 3 * 10**7
_CALL_SECONDS = 0.1
_LEAST_CALLS = 3
_NEVER, _ALWAYS = 0, 2**31


def microseconds(call: Callable[[Any], object], weights: Sequence[Any]) -> float:
    """Median time of a call, each with the next weight."""
    cycle = itertools.cycle(weights)
    call(next(cycle))
    times: list[float] = []
    end = time.perf_counter() + _CALL_SECONDS
    while len(times) < _LEAST_CALLS or time.perf_counter() < end:
        weight = next(cycle)
        started = time.perf_counter()
        call(weight)
        times.append((time.perf_counter() - started) * 1e6)
    return median(times)


class Weights:
    """The same matrices in all forms.

    Args:
        out_features: rows of each.
        in_features: columns of each.
    """

    def __init__(self, out_features: int, in_features: int) -> None:
        count = _WEIGHT_ELEMENTS // (out_features * in_features)
        self._kernels = LowBitKernels.of(torch.device("cpu"))
        floats = [0.05 * torch.randn(out_features, in_features) for _ in range(count)]
        self._float32 = _packed(floats)
        self._plain = [weight.bfloat16() for weight in floats]
        self._bfloat16 = _packed([weight.clone() for weight in self._plain])
        self._int8 = [quantize_rows(weight) for weight in floats]
        groups = [quantize_groups(weight) for weight in floats]
        self._int4 = [(self._kernels.pack_int4(values), scales) for values, scales in groups]

    def measure(self, x: torch.Tensor) -> dict[str, float]:
        """Microseconds of a product with x [T, in] by form and way."""
        half = x.bfloat16()
        found = {
            "packed float32": microseconds(lambda layer: layer(x), self._float32),
            "torch's bfloat16": microseconds(
                lambda weight: nn.functional.linear(half, weight), self._plain
            ),
            "16 bits": microseconds(lambda layer: layer(half), self._bfloat16),
        }
        for way, limit in (("kernel", _ALWAYS), ("unpacked", _NEVER)):
            kernels = replace(self._kernels, int8_rows=limit, int4_rows=limit)
            found[f"8 bits, {way}"] = microseconds(
                partial(_multiply, kernels.matmul_int8, x), self._int8
            )
            found[f"4 bits, {way}"] = microseconds(
                partial(_multiply, kernels.matmul_int4, x), self._int4
            )
        return found

    def takes_kernel(self, num_rows: int) -> dict[int, bool]:
        """By bits, whether the rule takes the kernel for so many rows."""
        return {8: num_rows <= self._kernels.int8_rows, 4: num_rows <= self._kernels.int4_rows}


def _multiply(
    product: Callable[..., torch.Tensor], x: torch.Tensor, weight: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    return product(x, *weight)


def _packed(weights: Sequence[torch.Tensor]) -> list[nn.Module]:
    layers = nn.ModuleList()
    for weight in weights:
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
        layers.append(layer)
    pack_linears(layers)
    return list(layers)


@torch.inference_mode()
def measure(rounds: int) -> list[dict[str, Any]]:
    """One row of the table for each number of threads and rows: means of the shapes."""
    shapes = [(Weights(*shape), shape[1]) for shape in _SHAPES]
    rows = []
    for threads, num_rows in itertools.product((1, 2), _ROWS):
        torch.set_num_threads(threads)
        sums: list[dict[str, float]] = []
        for _ in range(rounds):
            found = [weights.measure(torch.randn(num_rows, width)) for weights, width in shapes]
            sums.append({key: sum(times[key] for times in found) for key in found[0]})
        row: dict[str, Any] = {"what": f"{threads} threads", "rows": num_rows}
        row |= {key: median([times[key] for times in sums]) / len(shapes) for key in sums[0]}
        for bits, takes_kernel in shapes[0][0].takes_kernel(num_rows).items():
            row[f"{bits} bits, rule"] = "kernel" if takes_kernel else "unpacked"
        rows.append(row)
    return rows


def lost_by_the_rule(row: dict[str, Any], bits: int) -> float:
    """Time of the way that the rule takes over that of the faster one."""
    times = {way: float(row[f"{bits} bits, {way}"]) for way in ("kernel", "unpacked")}
    return times[row[f"{bits} bits, rule"]] / min(times.values())


def main() -> None:
    """Parse the command line and run."""
    options = parser(__doc__ or "")
    options.set_defaults(rounds=3)
    arguments = options.parse_args()
    rows = measure(arguments.rounds)
    floors = [
        at_most(
            f"{bits} bits, the rule's way over the faster one, mean",
            sum(lost_by_the_rule(row, bits) for row in rows) / len(rows),
            1.1,
        )
        for bits in (8, 4)
    ]
    floors.append(
        at_most(
            "16 bits over packed float32, mean",
            sum(row["16 bits"] / row["packed float32"] for row in rows) / len(rows),
            1.0,
        )
    )
    report("kernels by rows, microseconds", rows, floors, as_json=arguments.json)


if __name__ == "__main__":
    main()
