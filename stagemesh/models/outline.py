"""What a family's forward does before, between and after its layers, found by running it.

    embedding -> [scale, positions, norm, ...] -> layers -> [norm, ...] -> head

The forward of the meta model is run with layers that pass their input on, and the calls of the
modules around them are watched. So families need neither a pipeline plan in transformers nor code
here. What cannot be seen as a call of a module (a scale in the forward, say) is found by
`identity_check` when a stage is built.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from stagemesh.errors import UnsupportedModel
from stagemesh.models.placeholders import Passthrough, is_activation

# How the code of a family that makes other assumptions than ours fails when it is first run.
FAMILY_ERRORS = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)

_NUM_PROBES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """The parts of a family's model; names are relative to its base model."""

    layers: str
    """The list of layers."""
    in_tuple: bool
    """Whether a layer returns a tuple that begins with the activation."""
    before: tuple[str, ...]
    """Modules through which the activation goes before the first layer."""
    added: tuple[str, ...]
    """Modules whose output is added to the activation before the first layer: position tables."""
    after: tuple[str, ...]
    """Modules through which the activation goes after the last layer."""
    unused: tuple[str, ...]
    """Modules with parameters that a stage after the first does not call."""
    both: tuple[tuple[str, int, int], ...]
    """Modules without parameters through which it goes on both sides, and how often on each."""


@dataclass(slots=True)
class _Calls:
    """What was seen of one module's calls."""

    num_before: int = 0
    num_after: int = 0
    takes_activation: bool = False
    gives_activation: bool = False
    reaches_layers: bool = False


def find_outline(model: PreTrainedModel) -> Outline:
    """Run the meta model once and sort its modules.

    Raises:
        UnsupportedModel: the family's forward cannot be run on an activation, or what its modules
            do cannot be divided between stages.
    """
    base = base_of(model)
    config = model.config.get_text_config()
    layers_name = find_layers(model)
    failures: list[str] = []
    for in_tuple in (False, True):
        watch = _Watch(base, layers_name, width=config.hidden_size, in_tuple=in_tuple)
        try:
            with watch.running():
                _, output = run_around_layers(
                    model, device=torch.device("meta"), dtype=next(model.parameters()).dtype
                )
        except FAMILY_ERRORS as error:
            failures.append(f"{type(error).__name__}: {error}")
            continue
        if watch.num_layer_calls != config.num_hidden_layers:
            failures.append(
                f"its forward calls layers {watch.num_layer_calls} times for "
                f"{config.num_hidden_layers} layers"
            )
        elif output.shape == (1, _NUM_PROBES, config.hidden_size):
            return watch.outline(model.config.model_type)
        else:
            failures.append(f"its output has the shape {list(output.shape)}")
    raise UnsupportedModel(
        f"{model.config.model_type}: its forward does not run in stages: {failures[0]}"
    )


def base_of(model: PreTrainedModel) -> PreTrainedModel:
    """The part of a causal language model that has all but the head.

    Raises:
        UnsupportedModel: it has none.
    """
    base: Any = model.base_model
    if base is not model:
        found: PreTrainedModel = base
        return found
    # In some families the prefix is not the attribute's name.
    for child in model.children():
        if isinstance(child, PreTrainedModel):
            return child
    raise UnsupportedModel(f"{model.config.model_type}: its class has no base model")


def find_layers(model: PreTrainedModel) -> str:
    """Name of the list of layers, relative to the base model.

    Raises:
        UnsupportedModel: there is none with an entry for each layer.
    """
    count = model.config.get_text_config().num_hidden_layers
    found: list[str] = [
        name
        for name, module in base_of(model).named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if found:
        return min(found, key=lambda name: name.count("."))
    raise UnsupportedModel(
        f"{model.config.model_type}: its class has no list of {count} layers in a base model"
    )


def run_around_layers(
    model: PreTrainedModel, *, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the base model on an activation that an earlier stage has embedded.

    Returns:
        The activation [1, n, D] and the output.
    """
    width = model.config.get_text_config().hidden_size
    values = torch.linspace(-2, 3, _NUM_PROBES * width, device=device)
    probe = values.view(1, _NUM_PROBES, width).to(dtype)
    output: torch.Tensor = base_of(model)(
        inputs_embeds=probe.clone(),
        position_ids=torch.arange(_NUM_PROBES, device=device)[None],
        attention_mask=torch.ones(1, _NUM_PROBES, dtype=torch.bool, device=device),
        use_cache=False,
    ).last_hidden_state
    return probe, output


class _Watch:
    """Watches the modules beside the layers while a forward runs."""

    def __init__(self, base: nn.Module, layers: str, *, width: int, in_tuple: bool) -> None:
        self.num_layer_calls = 0
        self._base = base
        self._layers = layers
        self._width = width
        self._in_tuple = in_tuple
        self._calls = {name: _Calls() for name in _units(base, layers)}
        self._outputs: list[tuple[str, torch.Tensor]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Layers pass on, modules are watched."""
        hooks = [
            self._base.get_submodule(name).register_forward_hook(
                self._on_call(name), with_kwargs=True
            )
            for name in self._calls
        ]
        layers: Any = self._base.get_submodule(self._layers)
        kept = list(layers)
        for index in range(len(kept)):
            layers[index] = Passthrough.instead_of(kept[index], in_tuple=self._in_tuple)
            layers[index].register_forward_pre_hook(self._on_layer, with_kwargs=True)
        try:
            with torch.inference_mode():
                yield
        finally:
            for index, layer in enumerate(kept):
                layers[index] = layer
            for hook in hooks:
                hook.remove()

    def outline(self, family: str) -> Outline:
        """Sort what was seen.

        Raises:
            UnsupportedModel: the layers share a module with parameters, or one is used on both
                sides of them.
        """
        names: dict[str, list[Any]] = {
            kind: [] for kind in ("before", "added", "after", "unused", "both")
        }
        for name, calls in self._calls.items():
            module = self._base.get_submodule(name)
            kind = _kind(calls, has_parameters=any(True for _ in module.parameters()))
            if kind == "shared":
                raise UnsupportedModel(
                    f"{family}: {name} ({type(module).__name__}) has weights that are used on both "
                    "sides of its layers or by several of them, so it cannot be cut in stages"
                )
            if kind == "both":
                names[kind].append((name, calls.num_before, calls.num_after))
            elif kind is not None:
                names[kind].append(name)
        return Outline(
            layers=self._layers,
            in_tuple=self._in_tuple,
            **{kind: tuple(found) for kind, found in names.items()},
        )

    def _on_call(self, name: str) -> Any:
        def see(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            calls = self._calls[name]
            if self.num_layer_calls:
                calls.num_after += 1
            else:
                calls.num_before += 1
            given = (*args, *kwargs.values())
            calls.takes_activation |= any(is_activation(v, width=self._width) for v in given)
            calls.gives_activation |= (
                isinstance(output, torch.Tensor)
                and output.is_floating_point()
                and output.dim() in (2, 3)
                and output.shape[-1] == self._width
            )
            self._outputs.extend((name, tensor) for tensor in _tensors(output))

        return see

    def _on_layer(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        self.num_layer_calls += 1
        # The activation is the first argument; what comes beside it is for the layers.
        rest = list(_tensors((args[1:], kwargs if args else list(kwargs.values())[1:])))
        for name, output in self._outputs:
            if any(output is tensor for tensor in rest):
                self._calls[name].reaches_layers = True


def _kind(calls: _Calls, *, has_parameters: bool) -> str | None:
    if not calls.num_before and not calls.num_after:
        return "unused" if has_parameters else None
    is_shared = calls.reaches_layers or not calls.gives_activation
    if is_shared or (calls.num_before and calls.num_after):
        if has_parameters:
            return "shared"
        return None if is_shared or not calls.takes_activation else "both"
    if calls.num_after:
        return "after"
    return "before" if calls.takes_activation else "added"


def _units(base: nn.Module, layers: str) -> list[str]:
    """The modules beside the way from the base model down to the list of layers."""
    names: list[str] = []
    path = layers.split(".")
    for depth in range(len(path)):
        parent = ".".join(path[:depth])
        for name, _ in base.get_submodule(parent).named_children():
            if name != path[depth]:
                names.append(f"{parent}.{name}" if parent else name)
    return names


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors(inner)
