"""In which form a stage holds each weight when weights are kept in 8 or 4 bits. Torch-free.

Planner and loader ask here, so that what is planned is what is held. The modes of `--quantize`:

    none   all weights in the run dtype
    auto   what a GGUF file has as Q8_0, Q4_0 or Q4_1 stays in 8 or 4 bits, the rest as with none
    int8   the matrices of layers, the head and the token table in 8 bits, whatever the file has
    int4   the matrices of layers in 4 bits; head and token table in 8

A head that is the token table shares its memory. Norms, biases, routers, learned positions and
experts that a file has stacked in one tensor stay in the run dtype. A matrix whose size the 4-bit
kernels do not take is held in 8 bits.
"""

import re
from typing import Literal

from stagemesh.checkpoint.tensor_info import TensorInfo
from stagemesh.errors import ConfigError

QUANTIZE_MODES = ("none", "auto", "int8", "int4")
"""What `--quantize` takes."""

GROUP = 32
"""Values of a row that share a scale and a zero in 4 bits."""

Form = Literal["plain", "int8", "int4"]
"""How a weight is held; "plain" is in the run dtype."""
Role = Literal["layer", "head", "table"]
"""What a matrix does: layer and head multiply, a table is looked up."""

_KEPT: dict[str, Form] = {"Q8_0": "int8", "Q4_0": "int4", "Q4_1": "int4"}
_ASKED: dict[str, Form] = {"int8": "int8", "int4": "int4"}

# The 4-bit kernels work on blocks of so many rows of a matrix.
_INT4_ROWS = 16

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.\d{1,6}\.(.+)$", re.ASCII)
_LEFT_ALONE = re.compile(r"norm|router|(?:^|\.)(?:gate|shared_expert_gate)\.weight$")


def check_mode(quantize: str) -> None:
    """Refuse an unknown mode.

    Raises:
        ConfigError: it is not one of `QUANTIZE_MODES`.
    """
    if quantize not in QUANTIZE_MODES:
        raise ConfigError(f"quantize must be one of {', '.join(QUANTIZE_MODES)}, got {quantize!r}")


def held_form(info: TensorInfo, *, role: Role, quantize: str) -> Form:
    """How a stage holds a tensor.

    Args:
        info: the tensor.
        role: what it is used as.
        quantize: one of `QUANTIZE_MODES`.

    Raises:
        ConfigError: the mode is unknown.
    """
    check_mode(quantize)
    if quantize == "none" or not _can_be_low(info, role):
        return "plain"
    form: Form = _KEPT.get(info.encoding, "plain") if quantize == "auto" else _ASKED[quantize]
    if form == "int4" and (role != "layer" or not fits_int4(*info.shape)):
        return "int8"
    return form


def fits_int4(rows: int, columns: int) -> bool:
    """Whether the 4-bit kernels take a matrix of this size."""
    return rows % _INT4_ROWS == 0 and columns % GROUP == 0


def held_bytes(info: TensorInfo, *, role: Role, quantize: str, element_bytes: int) -> int:
    """Bytes that a stage holds of a tensor.

    Args:
        info: the tensor.
        role: what it is used as.
        quantize: one of `QUANTIZE_MODES`.
        element_bytes: of the run dtype.

    Raises:
        ConfigError: the mode is unknown.
    """
    form = held_form(info, role=role, quantize=quantize)
    if form == "plain":
        return info.num_elements * element_bytes
    rows, columns = info.shape
    # Values, and 16-bit scales: one for each row, or one for each group with its zero.
    if form == "int8":
        return rows * columns + 2 * rows
    return rows * columns // 2 + 4 * rows * (columns // GROUP)


def _can_be_low(info: TensorInfo, role: Role) -> bool:
    if len(info.shape) != 2 or not info.name.endswith(".weight"):
        return False
    if role != "layer":
        return True
    match = _LAYER.search(info.name)
    return match is not None and not _LEFT_ALONE.search(match[1])
