"""Leave only a stage's parts in a family's model."""

from torch import nn
from transformers import PreTrainedModel

from stagemesh.models.outline import Outline, base_of
from stagemesh.models.placeholders import Elsewhere, NoAddition, OneSide, Passthrough


def prune(
    model: PreTrainedModel, outline: Outline, kept: range, *, is_first: bool, is_last: bool
) -> None:
    """Put placeholders where other stages have their parts.

    Args:
        model: on the meta device, whole.
        outline: of its family.
        kept: the stage's layers.
        is_first: whether the stage embeds.
        is_last: whether it has the head.
    """
    base = base_of(model)
    width = model.config.get_text_config().hidden_size
    layers: nn.ModuleList = base.get_submodule(outline.layers)  # type: ignore[assignment]
    dtype = next(model.parameters()).dtype
    for index in range(len(layers)):
        if index not in kept:
            layers[index] = Passthrough.instead_of(layers[index], in_tuple=outline.in_tuple)
    if not (is_first and is_last):
        for name, before, after in outline.both:
            one_side = OneSide(
                base.get_submodule(name),
                num_before=before,
                num_after=after,
                is_first=is_first,
                is_last=is_last,
            )
            base.register_forward_pre_hook(one_side.begin)
            put(base, name, one_side)
    if not is_first:
        if hasattr(base, "embedding_multiplier"):
            # Applied inside the model's forward; the first stage has done it.
            setattr(base, "embedding_multiplier", 1.0)  # noqa: B010 -- a float, not a module
        for name in outline.before:
            put(base, name, Passthrough(width=width))
        for name in outline.added:
            put(base, name, NoAddition(width=width, dtype=dtype))
        for name in outline.unused:
            put(base, name, Elsewhere(name))
        model.set_input_embeddings(Elsewhere("token embedding"))
    if not is_last:
        for name in outline.after:
            put(base, name, Passthrough())
        model.set_output_embeddings(Elsewhere("output head"))  # type: ignore[no-untyped-call]
        for name, child in model.named_children():
            if child is not base and any(True for _ in child.parameters()):
                setattr(model, name, Elsewhere("output head"))


def put(base: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the submodule of this dotted name."""
    parent, _, attribute = name.rpartition(".")
    setattr(base.get_submodule(parent), attribute, module)
