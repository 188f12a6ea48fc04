"""Fill a stage's parameters from the checkpoint; tied heads."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from stagemesh.errors import CheckpointError
from stagemesh.model_spec import TensorInfo
from stagemesh.models.buffers import stored_buffer_names
from stagemesh.models.identity_check import Elsewhere
from stagemesh.models.tensor_cut import TensorCut
from stagemesh.models.weights import WeightReader


def fill_parameters(
    model: PreTrainedModel,
    infos: dict[str, TensorInfo],
    reader: WeightReader,
    *,
    path: Path,
    device: torch.device,
    keep_tied: bool,
    cuts: Mapping[str, TensorCut],
) -> None:
    """Read each parameter and stored buffer that the model has from the checkpoint.

    Args:
        model: on the meta device, pruned.
        infos: the stage's tensors by name.
        reader: reads them.
        path: of the checkpoint, in errors.
        device: where the parameters go.
        keep_tied: the head shares the embedding's memory when the checkpoint has no head.
        cuts: by parameter name, of which only a part is read.

    Raises:
        CheckpointError: a parameter is missing in the checkpoint or has another shape.
    """
    embedding = model.get_input_embeddings()
    head = _head(model)
    head_name = _name_of(model, head)
    tied_source = None
    if head_name is not None and f"{head_name}.weight" not in infos:
        tied_source = next(
            (n for n in infos if n.endswith(("embed_tokens.weight", "wte.weight"))), None
        )
    buffers = {name: model.get_buffer(name) for name in stored_buffer_names(model)}
    for name, parameter in [*model.named_parameters(remove_duplicate=False), *buffers.items()]:
        is_tied_head = head_name is not None and name == f"{head_name}.weight" and tied_source
        if is_tied_head and keep_tied:
            continue
        info = infos.get(tied_source if is_tied_head and tied_source else name)
        if info is None:
            raise CheckpointError(f"{path}: the checkpoint has no tensor {name}")
        if tuple(info.shape) != tuple(parameter.shape):
            raise CheckpointError(
                f"{info.file}: tensor {info.source_name} has shape {list(info.shape)}, the model's "
                f"{name} needs {list(parameter.shape)}"
            )
        tensor = reader.read(info, parameter.dtype, cut=cuts.get(name)).to(device)
        parent, _, leaf = name.rpartition(".")
        value = tensor if name in buffers else nn.Parameter(tensor, requires_grad=False)
        setattr(model.get_submodule(parent), leaf, value)
    if keep_tied and tied_source is not None:
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
