"""What each layer keeps of a token, found on the meta device before a weight is read.

Each layer of the stage runs until it hands its keys to attention. So an attention layer that asks
for what stagemesh does not do is refused here, too.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from stagemesh.errors import UnsupportedModel
from stagemesh.inference import attention
from stagemesh.inference.attention import AttentionSeen, StepContext
from stagemesh.inference.own_attention import own_arguments
from stagemesh.models.family_config import OWN_ATTENTION
from stagemesh.models.kv_shape import KVShape
from stagemesh.models.outline import FAMILY_ERRORS, Outline, base_of
from stagemesh.models.placeholders import Passthrough

_NUM_TOKENS = 2


def probe_kv_shapes(
    model: PreTrainedModel, outline: Outline, layers: range
) -> tuple[KVShape, ...] | None:
    """The shapes of a stage's layers.

    Returns:
        None where a layer needs values before its attention (it picks experts first, say).

    Args:
        model: pruned, on the meta device.
        outline: of its family.
        layers: of the stage.

    Raises:
        UnsupportedModel: attention does not see each layer of the stage once.
    """
    context = StepContext([], first_layer=layers.start)
    try:
        with _stopping_at_attention(model, outline, layers), torch.inference_mode():
            base_of(model)(**_arguments(model, context, is_first=layers.start == 0))
    except NotImplementedError:
        # What torch says of values on the meta device.
        return None
    except FAMILY_ERRORS as error:
        raise UnsupportedModel(
            f"{model.config.model_type}: its attention cannot be run: "
            f"{type(error).__name__}: {error}"
        ) from error
    expected = list(range(len(layers)))
    if context.attended_layers != expected:
        raise UnsupportedModel(
            f"{model.config.model_type}: attention came by layers {context.attended_layers}, "
            f"expected each of {expected} once"
        )
    return tuple(context.kv_shapes)


def _arguments(
    model: PreTrainedModel, context: StepContext, *, is_first: bool
) -> dict[str, object]:
    device = torch.device("meta")
    arguments: dict[str, object] = {
        "position_ids": torch.arange(_NUM_TOKENS, device=device)[None],
        "attention_mask": torch.ones(1, 1, dtype=torch.bool, device=device),
        "use_cache": False,
        attention.STEP_ARGUMENT: context,
    }
    if model.config._attn_implementation == OWN_ATTENTION:
        arguments = own_arguments(context, None, num_tokens=_NUM_TOKENS, device=device)
    if is_first:
        ids = torch.zeros(1, _NUM_TOKENS, dtype=torch.long, device=device)
        return {"input_ids": ids, **arguments}
    width = model.config.get_text_config().hidden_size
    dtype = next(model.parameters()).dtype
    return {"inputs_embeds": torch.zeros(1, _NUM_TOKENS, width, dtype=dtype, device=device)} | (
        arguments
    )


class _UntilAttention(nn.Module):
    """Runs a layer until attention, then passes its input on."""

    def __init__(self, layer: nn.Module, passthrough: Passthrough) -> None:
        super().__init__()
        self._layer = layer
        self._passthrough = passthrough
        for name, value in vars(passthrough).items():
            if not name.startswith("_") and not hasattr(self, name):
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        with suppress(AttentionSeen):
            self._layer(*args, **kwargs)
        return self._passthrough(*args, **kwargs)


@contextmanager
def _stopping_at_attention(model: PreTrainedModel, outline: Outline, kept: range) -> Iterator[None]:
    layers: Any = base_of(model).get_submodule(outline.layers)
    before = {index: layers[index] for index in kept}
    try:
        for index, layer in before.items():
            passing = Passthrough.instead_of(layer, in_tuple=outline.in_tuple)
            layers[index] = _UntilAttention(layer, passing)
        yield
    finally:
        for index, layer in before.items():
            layers[index] = layer
