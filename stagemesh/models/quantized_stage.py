"""Put low-bit layers into a stage: read a matrix in chunks of rows, quantise, pack, next chunk.

So besides the stage's own weights no more than a chunk in floats is held, whatever the size of a
matrix. What `stagemesh.checkpoint.low_bit` says is held in the run dtype is left to
`parameters.fill_parameters`.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from stagemesh.checkpoint.low_bit import GROUP, Form, Role, check_mode, fits_int4, held_form
from stagemesh.model_spec import TensorInfo
from stagemesh.models.low_bit_kernels import LowBitKernels
from stagemesh.models.low_bit_values import (
    BLOCK_ENCODINGS,
    groups_of_blocks,
    quantize_groups,
    quantize_rows,
)
from stagemesh.models.quantized_linear import Int4Linear, Int8Embedding, Int8Linear
from stagemesh.models.tensor_cut import Range, TensorCut
from stagemesh.models.weights import WeightReader

logger = logging.getLogger(__name__)

# Elements of a chunk: 4 MiB in float32.
_CHUNK_ELEMENTS = 2**20
# 4-bit layouts are blocks of so many rows at most.
_BLOCK_ROWS = 64

_WHOLE = TensorCut()


def put_quantized(
    model: PreTrainedModel,
    infos: Mapping[str, TensorInfo],
    reader: WeightReader,
    *,
    quantize: str,
    table: TensorInfo,
    dtype: torch.dtype,
    device: torch.device,
    cuts: Mapping[str, TensorCut],
) -> bool:
    """Replace the linear layers and the token table that are held in low bits, with their weights.

    Args:
        model: on the meta device, pruned.
        infos: the stage's tensors by name.
        reader: reads them.
        quantize: one of `stagemesh.checkpoint.low_bit.QUANTIZE_MODES`.
        table: the token table, which is the head where `infos` has none.
        dtype: run dtype.
        device: where the weights go.
        cuts: by parameter name, of which only a part is held.

    Returns:
        Whether the head is held in low bits.

    Raises:
        ConfigError: the mode is unknown.
        CheckpointError: the file is gone or too short.
    """
    check_mode(quantize)
    if quantize == "none":
        return False
    stage = _Stage(infos, reader, quantize, table, dtype, LowBitKernels.of(device), cuts)
    modules = dict(model.named_modules())
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    low_table: Int8Embedding | None = None
    for name, module in modules.items():
        if module is embedding and isinstance(module, nn.Embedding):
            low_table = stage.embedding(name, module)
            if low_table is not None:
                _put(model, name, low_table)
    is_low_head = False
    for name, module in modules.items():
        # Subclasses of nn.Linear keep their own forward.
        if type(module) is nn.Linear:
            role: Role = "head" if module is head else "layer"
            low = stage.linear(name, module, role=role, low_table=low_table)
            if low is not None:
                _put(model, name, low)
                is_low_head |= module is head
    return is_low_head


class _Stage:
    """Makes the low-bit modules of one stage."""

    def __init__(
        self,
        infos: Mapping[str, TensorInfo],
        reader: WeightReader,
        quantize: str,
        table: TensorInfo,
        dtype: torch.dtype,
        kernels: LowBitKernels,
        cuts: Mapping[str, TensorCut],
    ) -> None:
        self._infos = infos
        self._reader = reader
        self._quantize = quantize
        self._table = table
        self._dtype = dtype
        self._kernels = kernels
        self._cuts = cuts

    def embedding(self, name: str, module: nn.Embedding) -> Int8Embedding | None:
        """The table in 8 bits; None when it is held in the run dtype."""
        info = self._infos.get(f"{name}.weight")
        factor = getattr(module, "scalar_embed_scale", None)
        is_known = type(module) is nn.Embedding or isinstance(factor, float)
        if info is None or self._form(info, "table", module) == "plain":
            return None
        if not is_known:
            logger.info("the token table stays as it is: %s is not known", type(module).__name__)
            return None
        values, scales = self._rows(info, self._cuts.get(f"{name}.weight", _WHOLE))
        scale = None if factor is None else torch.tensor(factor, device=self._kernels.device)
        return Int8Embedding(values, scales, dtype=self._dtype, factor=scale)

    def linear(
        self, name: str, module: nn.Linear, *, role: Role, low_table: Int8Embedding | None
    ) -> nn.Module | None:
        """The layer in low bits; None when it is held in the run dtype."""
        info = self._infos.get(f"{name}.weight")
        is_tied = info is None and role == "head"
        info = self._table if is_tied else info
        if info is None or (form := self._form(info, role, module)) == "plain":
            return None
        bias: Any = module.bias
        if is_tied and low_table is not None:
            shared: tuple[Any, Any] = low_table.weight, low_table.scales
            return Int8Linear(*shared, bias, kernels=self._kernels, shares_weights=True)
        cut = self._cuts.get(f"{name}.weight", _WHOLE)
        if form == "int4" and not _fits(info, cut):
            logger.info("%s is held in 8 bits: its part does not fit the 4-bit kernels", name)
            form = "int8"
        if form == "int8":
            return Int8Linear(*self._rows(info, cut), bias, kernels=self._kernels)
        return Int4Linear(*self._groups(info, cut), bias, kernels=self._kernels)

    def _form(self, info: TensorInfo, role: Role, module: nn.Embedding | nn.Linear) -> Form:
        # A tensor of another shape is refused by who fills the parameters.
        if tuple(info.shape) != tuple(module.weight.shape):
            return "plain"
        return held_form(info, role=role, quantize=self._quantize)

    def _rows(self, info: TensorInfo, cut: TensorCut) -> tuple[torch.Tensor, torch.Tensor]:
        rows, columns = _part_shape(info, cut)
        values = torch.empty((rows, columns), dtype=torch.int8)
        scales = torch.empty(rows, dtype=torch.bfloat16)
        for start, end, part in _chunks(info, cut):
            weight = self._reader.read(info, torch.float32, cut=part)
            values[start:end], scales[start:end] = quantize_rows(weight)
        return values.to(self._kernels.device), scales.to(self._kernels.device)

    def _groups(self, info: TensorInfo, cut: TensorCut) -> tuple[torch.Tensor, torch.Tensor]:
        rows, columns = _part_shape(info, cut)
        is_cpu = self._kernels.device.type == "cpu"
        # A GPU's layout is of whole matrices.
        packed = torch.empty((rows, columns // 2 if is_cpu else columns), dtype=torch.uint8)
        scales_zeros = torch.empty((columns // GROUP, rows, 2), dtype=torch.bfloat16)
        for start, end, part in _chunks(info, cut):
            values, scales_zeros[:, start:end] = self._group_values(info, part)
            packed[start:end] = self._kernels.pack_int4(values) if is_cpu else values
        if is_cpu:
            return packed, scales_zeros
        return self._kernels.pack_int4(packed), scales_zeros.to(self._kernels.device)

    def _group_values(self, info: TensorInfo, part: TensorCut) -> tuple[torch.Tensor, torch.Tensor]:
        stored = info.stored
        if info.encoding in BLOCK_ENCODINGS and not (stored.is_transposed or stored.added):
            return groups_of_blocks(self._reader.read_blocks(info, cut=part), info.encoding)
        return quantize_groups(self._reader.read(info, torch.float32, cut=part))


def _fits(info: TensorInfo, cut: TensorCut) -> bool:
    """Whether the 4-bit kernels take this part, and it begins and ends with a group."""
    start, end = cut.columns or (0, info.shape[1])
    return start % GROUP == 0 and end % GROUP == 0 and fits_int4(*_part_shape(info, cut))


def _part_shape(info: TensorInfo, cut: TensorCut) -> tuple[int, int]:
    start, end = cut.columns or (0, info.shape[1])
    ranges = cut.rows or ((0, info.shape[0]),)
    return sum(last - first for first, last in ranges), end - start


def _chunks(info: TensorInfo, cut: TensorCut) -> Iterator[tuple[int, int, TensorCut]]:
    """The part in chunks of whole blocks of rows: rows [start, end) of it, and where they are."""
    rows, columns = _part_shape(info, cut)
    step = max(_BLOCK_ROWS, _CHUNK_ELEMENTS // columns // _BLOCK_ROWS * _BLOCK_ROWS)
    ranges = cut.rows or ((0, info.shape[0]),)
    for start in range(0, rows, step):
        end = min(start + step, rows)
        here = tuple(_between(ranges, start, end))
        yield start, end, TensorCut(rows=here, columns=cut.columns)


def _between(ranges: tuple[Range, ...], start: int, end: int) -> Iterator[Range]:
    """What lies at [start, end) when the ranges are put one after the other."""
    done = 0
    for first, last in ranges:
        low, high = max(start, done), min(end, done + last - first)
        if low < high:
            yield first + low - done, first + high - done
        done += last - first


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, module)
