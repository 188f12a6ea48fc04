"""Does a family touch the activation outside of its layers? Then it cannot be cut in stages.

A later stage runs the model's whole forward on the activation of the stage before. If the forward
scales, shifts or casts what it is given before the first layer or after the last module of the
pipeline plan, each stage would do it once more, and the text would be fluent nonsense.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from stagemesh.errors import UnsupportedModel
from stagemesh.models.outline import Outline, base_of, run_around_layers
from stagemesh.models.placeholders import Passthrough
from stagemesh.models.prune import put


@torch.inference_mode()
def check_identity(
    model: PreTrainedModel, *, outline: Outline, dtype: torch.dtype, device: torch.device
) -> None:
    """Run a later stage's forward with pass-throughs for all of its parts.

    Raises:
        UnsupportedModel: it does not return its input bit for bit.
    """
    with _all_passing(model, outline):
        probe, output = run_around_layers(model, device=device, dtype=dtype)
    if output.dtype != dtype or not torch.equal(output, probe):
        raise UnsupportedModel(
            f"{model.config.model_type}: its forward changes the activation outside of its layers, "
            "so it cannot be cut in stages; serve it on one node"
        )


@contextmanager
def _all_passing(model: PreTrainedModel, outline: Outline) -> Iterator[None]:
    base = base_of(model)
    layers: nn.ModuleList = base.get_submodule(outline.layers)  # type: ignore[assignment]
    kept = list(layers)
    passing = (*outline.after, *(name for name, _, _ in outline.both))
    after = {name: base.get_submodule(name) for name in passing}
    try:
        for index, layer in enumerate(kept):
            layers[index] = Passthrough.instead_of(layer, in_tuple=outline.in_tuple)
        for name in after:
            put(base, name, Passthrough())
        yield
    finally:
        for index, layer in enumerate(kept):
            layers[index] = layer
        for name, module in after.items():
            put(base, name, module)
