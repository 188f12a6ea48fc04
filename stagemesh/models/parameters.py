"""Fill a stage's parameters from the checkpoint; tied heads."""

from collections.abc import Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from stagemesh.model_spec import TensorInfo
from stagemesh.models.buffers import stored_buffer_names
from stagemesh.models.placeholders import Elsewhere
from stagemesh.models.stored_tensors import StoredTensors, read_cut
from stagemesh.models.tensor_cut import AnyCut
from stagemesh.models.weights import WeightReader


def fill_parameters(
    model: PreTrainedModel,
    stored: StoredTensors,
    reader: WeightReader,
    *,
    table: TensorInfo,
    device: torch.device,
    keep_tied: bool,
    cuts: Mapping[str, AnyCut],
) -> None:
    """Read each parameter and stored buffer that the model has from the checkpoint.

    Args:
        model: on the meta device, pruned.
        stored: the stage's tensors.
        reader: reads them.
        table: the token table, which is the head where the checkpoint has no other.
        device: where the parameters go.
        keep_tied: the head shares the embedding's memory when the checkpoint has no head.
        cuts: by parameter name, of which only a part is read.

    Raises:
        CheckpointError: a parameter is missing in the checkpoint or has another shape.
    """
    embedding = model.get_input_embeddings()
    head = _head(model)
    head_name = _name_of(model, head)
    tied_name = None if head_name is None else f"{head_name}.weight"
    if tied_name is not None and tied_name in stored:
        tied_name = None
    buffers = {name: model.get_buffer(name) for name in stored_buffer_names(model)}
    for name, parameter in [*model.named_parameters(remove_duplicate=False), *buffers.items()]:
        if name == tied_name and keep_tied:
            continue
        shape, dtype, cut = tuple(parameter.shape), parameter.dtype, cuts.get(name)
        if name == tied_name:
            tensor = read_cut(table, name, shape, reader=reader, dtype=dtype, cut=cut)
        else:
            tensor = stored.read(name, shape, reader=reader, dtype=dtype, cut=cut)
        parent, _, leaf = name.rpartition(".")
        moved = tensor.to(device)
        value = moved if name in buffers else nn.Parameter(moved, requires_grad=False)
        setattr(model.get_submodule(parent), leaf, value)
    if keep_tied and tied_name is not None:
        assert head is not None
        head.weight = embedding.weight


def _head(model: PreTrainedModel) -> nn.Module | None:
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return head


def _name_of(model: nn.Module, module: nn.Module | None) -> str | None:
    if module is None or isinstance(module, Elsewhere):
        return None
    return next((name for name, child in model.named_modules() if child is module), None)


def untie_for_packing(model: PreTrainedModel) -> None:
    """Give a tied head its own parameter object: packing re-lays the head, the table must stay."""
    head, embedding = _head(model), model.get_input_embeddings()
    if isinstance(head, nn.Linear) and head.weight is getattr(embedding, "weight", None):
        head.weight = nn.Parameter(head.weight.data, requires_grad=False)
