"""Does a family touch the activation outside of its layers? Then it cannot be cut in stages.

A later stage runs the model's whole forward on the activation of the stage before. If the forward
scales, shifts or casts what it is given before the first layer or after the last module of the
pipeline plan, each stage would do it once more, and the text would be fluent nonsense.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from stagemesh.errors import UnsupportedModel


class Passthrough(nn.Module):
    """Stands where another stage's layer was: returns what it is given."""

    def forward(self, hidden_states: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        """Return the activation [1, T, D] unchanged."""
        return hidden_states


class Elsewhere(nn.Module):
    """Stands where a module of another stage was; using it is a bug or an unsupported family."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        """Raise."""
        raise UnsupportedModel(f"this stage has no {self._name}, but the model's forward uses it")


def modules_after_layers(model: PreTrainedModel) -> list[str]:
    """What transformers' pipeline plan of the family runs on the last stage, after the layers."""
    names = list(model.config.base_model_pp_plan or ())
    return names[names.index("layers") + 1 :]


@torch.inference_mode()
def check_identity(model: PreTrainedModel, *, dtype: torch.dtype, device: torch.device) -> None:
    """Run a later stage's forward with pass-throughs for all of its parts.

    Raises:
        UnsupportedModel: it does not return its input bit for bit.
    """
    hidden_size = model.config.get_text_config().hidden_size
    probe = torch.linspace(-2, 3, 2 * hidden_size, device=device).view(1, 2, -1).to(dtype)
    with _all_passing(model):
        output = model.base_model(
            inputs_embeds=probe.clone(),
            position_ids=torch.arange(2, device=device)[None],
            attention_mask=torch.ones(1, 1, dtype=torch.bool, device=device),
            use_cache=False,
        ).last_hidden_state
    if output.dtype != dtype or not torch.equal(output, probe):
        raise UnsupportedModel(
            f"{model.config.model_type}: its forward changes the activation outside of its layers, "
            "so it cannot be cut in stages; serve it on one node"
        )


@contextmanager
def _all_passing(model: PreTrainedModel) -> Iterator[None]:
    base = model.base_model
    layers: nn.ModuleList = base.get_submodule("layers")  # type: ignore[assignment]
    kept = list(layers)
    after = {name: base.get_submodule(name) for name in modules_after_layers(model)}
    try:
        for index in range(len(kept)):
            layers[index] = Passthrough()
        for name in after:
            setattr(base, name, Passthrough())
        yield
    finally:
        for index, layer in enumerate(kept):
            layers[index] = layer
        for name, module in after.items():
            setattr(base, name, module)
