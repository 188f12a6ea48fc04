"""Values for the buffers that no checkpoint holds: rotary frequencies, embedding scales.

They are computed by the family's own `_init_weights`, as transformers does for a model that it
loads without allocating it first.
"""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from stagemesh.errors import UnsupportedModel


def stored_buffer_names(model: nn.Module) -> list[str]:
    """Names of the buffers that checkpoints hold beside the parameters."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return [name for name in model.state_dict() if name not in parameters]


def materialize_buffers(model: PreTrainedModel, *, device: torch.device) -> None:
    """Give each buffer that is still on the meta device memory and its value.

    Raises:
        UnsupportedModel: the family's code leaves a buffer or a parameter without values.
    """
    for name, module in model.named_modules():
        missing = [n for n, b in module.named_buffers(recurse=False) if b.is_meta]
        if missing:
            _compute(model, module, missing, name=name, device=device)
    left = [
        name
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if tensor.is_meta
    ]
    if left:
        raise UnsupportedModel(f"{model.config.model_type}: no values for {', '.join(left)}")


@torch.no_grad()
def _compute(
    model: PreTrainedModel,
    module: nn.Module,
    missing: list[str],
    *,
    name: str,
    device: torch.device,
) -> None:
    for parameter in module.parameters(recurse=False):
        # transformers' mark of what a checkpoint gave and initialisation must not touch.
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    # What is not computed keeps what it was filled with, and so differs between the two times.
    first = _initialised(model, module, missing, fill=0, device=device)
    second = _initialised(model, module, missing, fill=1, device=device)
    left = [
        buffer_name
        for buffer_name, before, after in zip(missing, first, second, strict=True)
        if after.is_meta or not torch.equal(before, after) or bool(torch.isnan(after).any())
    ]
    if left:
        raise UnsupportedModel(
            f"{model.config.model_type}: {name} ({type(module).__name__}) has buffers "
            f"({', '.join(left)}) that are in no checkpoint and that stagemesh cannot compute"
        )


def _initialised(
    model: PreTrainedModel,
    module: nn.Module,
    names: list[str],
    *,
    fill: int,
    device: torch.device,
) -> list[torch.Tensor]:
    """The buffers as the family's `_init_weights` leaves them, from memory full of `fill`."""
    for name in names:
        fresh = torch.full_like(getattr(module, name), fill, device=device)
        module.register_buffer(name, fresh, persistent=False)
    with guard_torch_init_functions():
        model._init_weights(module)  # type: ignore[no-untyped-call]
    return [getattr(module, name) for name in names]
