"""The parts of a stage that can be compiled, as its own steps call them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from stagemesh.errors import UnsupportedModel
from stagemesh.inference.compiled.layer_call import note_call
from stagemesh.inference.compiled.linear_forms import ROW_COUNTS
from stagemesh.inference.compiled.units import UnitKind, describe
from stagemesh.models.builder import StageModel
from stagemesh.models.outline import base_of

FEW_TOKENS = 5
MANY_TOKENS = ROW_COUNTS[-1] + 3
"""Tokens of the two steps whose calls are compared: sizes that differ are token axes."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A layer or the head."""

    module: nn.Module
    layer: int | None
    """Model-wide index; None for the head."""
    kind: UnitKind
    sample: Arguments
    """Of a call with `MANY_TOKENS`."""

    @property
    def name(self) -> str:
        """For people."""
        return "the head" if self.layer is None else f"layer {self.layer}"


def note_units(stage: StageModel, run: Callable[[int], None]) -> list[Unit]:
    """Run two steps and note how the stage's layers and its head are called.

    Args:
        stage: eager.
        run: computes a step of so many tokens, with logits for all of them.

    Raises:
        UnsupportedModel: what the family does cannot be compiled apart from the step.
    """
    if stage.has_own_attention:
        raise UnsupportedModel("the family's own code computes attention")
    modules = dict(_modules(stage))
    calls: dict[int, list[Arguments]] = {}
    for count in (FEW_TOKENS, MANY_TOKENS):
        with _watched(modules) as seen:
            run(count)
        for key, arguments in seen.items():
            calls.setdefault(key, []).append(arguments)
    units = []
    for key, module in modules.items():
        if len(calls.get(key, ())) != 2:
            raise UnsupportedModel(f"{type(module).__name__} is not called once a step")
        layer = None if key < 0 else key
        kind = describe(module, layer=layer, call=note_call(*calls[key]))
        units.append(Unit(module=module, layer=layer, kind=kind, sample=calls[key][1]))
    return units


def _modules(stage: StageModel) -> Iterator[tuple[int, nn.Module]]:
    """Layers by their index, and the head as -1."""
    assert stage.outline is not None
    layers: Any = base_of(stage.model).get_submodule(stage.outline.layers)
    for index in range(stage.start_layer, stage.end_layer):
        yield index, layers[index]
    head: nn.Module | None = stage.model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if stage.is_last and type(head) is nn.Linear:
        yield -1, head


@contextmanager
def _watched(modules: dict[int, nn.Module]) -> Iterator[dict[int, Arguments]]:
    seen: dict[int, Arguments] = {}

    def watch(key: int) -> Any:
        def see(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if key in seen:
                raise UnsupportedModel(f"{type(_module).__name__} is called twice a step")
            seen[key] = (args, kwargs)

        return see

    hooks = [
        module.register_forward_pre_hook(watch(key), with_kwargs=True)
        for key, module in modules.items()
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
