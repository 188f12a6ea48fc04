"""Put low-bit layers into a stage, read by `low_bit_reader`.

What `stagemesh.checkpoint.low_bit` says is held in the run dtype is left to
`parameters.fill_parameters`.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from stagemesh.checkpoint.low_bit import Form, Role, check_mode, fits_int4, held_form
from stagemesh.model_spec import TensorInfo
from stagemesh.models.low_bit_kernels import LowBitKernels
from stagemesh.models.low_bit_reader import LowBitReader, Sources, fit_int4
from stagemesh.models.quantized_experts import LowBitExperts, can_hold_experts
from stagemesh.models.quantized_linear import Int4Linear, Int8Embedding, Int8Linear
from stagemesh.models.stored_tensors import StoredTensors
from stagemesh.models.tensor_cut import AnyCut, ExpertCut, TensorCut
from stagemesh.models.weights import WeightReader

logger = logging.getLogger(__name__)

# Their forward is that of nn.Linear in other words.
_PLAIN_SUBCLASSES = frozenset({"FalconLinear"})


def put_quantized(
    model: PreTrainedModel,
    stored: StoredTensors,
    reader: WeightReader,
    *,
    quantize: str,
    table: TensorInfo,
    dtype: torch.dtype,
    device: torch.device,
    cuts: Mapping[str, AnyCut],
) -> bool:
    """Replace the linear layers, experts and token table that are held in low bits.

    Args:
        model: on the meta device, pruned.
        stored: the stage's tensors.
        reader: reads them.
        quantize: one of `stagemesh.checkpoint.low_bit.QUANTIZE_MODES`.
        table: the token table, which is the head where there is no other.
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
    kernels = LowBitKernels.of(device)
    stage = _Stage(stored, reader, quantize, table, dtype, kernels, cuts)
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
        if can_hold_experts(module):
            experts = stage.experts(name, module)
            if experts is not None:
                _put(model, name, experts)
        if _is_linear(module):
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
        stored: StoredTensors,
        reader: WeightReader,
        quantize: str,
        table: TensorInfo,
        dtype: torch.dtype,
        kernels: LowBitKernels,
        cuts: Mapping[str, AnyCut],
    ) -> None:
        self._stored = stored
        self._reader = reader
        self._low = LowBitReader(reader, kernels)
        self._quantize = quantize
        self._table = table
        self._dtype = dtype
        self._kernels = kernels
        self._cuts = cuts

    def embedding(self, name: str, module: nn.Embedding) -> Int8Embedding | None:
        """The table in 8 bits; None when it is held in the run dtype."""
        full = f"{name}.weight"
        info = self._stored.direct(full)
        if info is None or not _fits(info, module) or self._form([info], "table") == "plain":
            return None
        factor = _factor_of(module)
        if factor is None:
            logger.info("the token table stays as it is: %s is not known", type(module).__name__)
            return None
        values, scales = self._low.rows([(info, self._cut(full))])
        scale = None if factor == 1 else torch.tensor(factor, device=self._kernels.device)
        return Int8Embedding(values, scales, dtype=self._dtype, factor=scale)

    def linear(
        self, name: str, module: Any, *, role: Role, low_table: Int8Embedding | None
    ) -> nn.Module | None:
        """The layer in low bits; None when it is held in the run dtype."""
        full = f"{name}.weight"
        sources = self._stored.sources(full)
        is_tied = not sources and role == "head"
        form = self._form([self._table] if is_tied else sources, role)
        if form == "plain":
            return None
        bias: nn.Parameter | None = module.bias
        if is_tied and low_table is not None:
            shared: tuple[Any, Any] = low_table.weight, low_table.scales
            return Int8Linear(*shared, bias, kernels=self._kernels, shares_weights=True)
        info = self._table if is_tied else self._stored.direct(full)
        if info is None or isinstance(module, Conv1D):
            return self._made_linear(form, full, module)
        if not _fits(info, module):
            return None
        return self._low_linear(form, [(info, self._cut(full))], bias, name)

    def experts(self, name: str, module: nn.Module) -> LowBitExperts | None:
        """The experts in low bits; None when they are held in the run dtype."""
        parts = []
        for parameter in ("gate_up_proj", "down_proj"):
            full = f"{name}.{parameter}"
            cut = self._cuts.get(full)
            sources = self._stored.of_experts(
                full,
                tuple(module.get_parameter(parameter).shape),
                cut=cut if isinstance(cut, ExpertCut) else None,
            )
            if sources is None:
                return None
            form = self._form([info for matrix in sources for info, _ in matrix], "layer")
            if form == "plain":
                return None
            parts.append((form, full, sources))
        gate_up, down = (
            nn.ModuleList(self._low_linear(form, matrix, None, full) for matrix in sources)
            for form, full, sources in parts
        )
        return LowBitExperts(module, gate_up, down)

    def _low_linear(
        self, form: Form, sources: Sources, bias: nn.Parameter | None, name: str
    ) -> Int8Linear | Int4Linear:
        if form == "int4" and not fit_int4(sources):
            logger.info("%s is held in 8 bits: its part does not fit the 4-bit kernels", name)
            form = "int8"
        if form == "int8":
            return Int8Linear(*self._low.rows(sources), bias, kernels=self._kernels)
        return Int4Linear(*self._low.groups(sources), bias, kernels=self._kernels)

    def _made_linear(self, form: Form, full: str, module: Any) -> Int8Linear | Int4Linear:
        """A layer whose matrix has to be made, or turned round, before it is quantised."""
        shape = tuple(module.weight.shape)
        weight = self._stored.read(
            full, shape, reader=self._reader, dtype=torch.float32, cut=self._cuts.get(full)
        )
        if isinstance(module, Conv1D):
            weight = weight.T.contiguous()
        bias: nn.Parameter | None = module.bias
        if form == "int4" and fits_int4(*weight.shape):
            return Int4Linear(*self._low.groups_of(weight), bias, kernels=self._kernels)
        return Int8Linear(*self._low.rows_of(weight), bias, kernels=self._kernels)

    def _cut(self, name: str) -> TensorCut:
        cut = self._cuts.get(name)
        return cut if isinstance(cut, TensorCut) else TensorCut()

    def _form(self, infos: Sequence[TensorInfo], role: Role) -> Form:
        """How a matrix made of these tensors is held: as the widest of them."""
        forms = {held_form(info, role=role, quantize=self._quantize) for info in infos}
        if not forms or "plain" in forms:
            return "plain"
        return "int4" if forms == {"int4"} else "int8"


def _is_linear(module: nn.Module) -> bool:
    """Whether a module computes x @ W.T + b, or x @ W + b; other subclasses may do more."""
    return (
        type(module) is nn.Linear
        or isinstance(module, Conv1D)
        or type(module).__name__ in _PLAIN_SUBCLASSES
    )


def _factor_of(table: nn.Embedding) -> float | None:
    """What a family multiplies its embeddings by; None where its class may do something else."""
    if type(table) is nn.Embedding:
        return 1.0
    for name in ("scalar_embed_scale", "embed_scale"):
        factor = getattr(table, name, None)
        if isinstance(factor, (int, float)):
            return float(factor)
    return None


def _fits(info: TensorInfo, module: Any) -> bool:
    # A tensor of another shape is refused by who fills the parameters.
    return tuple(info.shape) == tuple(module.weight.shape)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, module)
