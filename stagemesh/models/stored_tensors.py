"""What a stage's parameters are made of in the checkpoint.

Checkpoints of many families hold other tensors than transformers' classes have parameters: under
older names, or one for each expert where the class has all experts of a layer in one. transformers
converts them as it loads, by tables of its own (`transformers.conversion_mapping`). The same tables
are used here, for the tensors of a stage alone.
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from stagemesh.checkpoint.tensor_info import TensorInfo
from stagemesh.errors import CheckpointError
from stagemesh.models.tensor_cut import AnyCut, ExpertCut, Once, Range, TensorCut
from stagemesh.models.weights import WeightReader


@dataclass(slots=True)
class _Recipe:
    """Tensors of the files that make up one or more parameters."""

    converter: WeightConverter
    name: str
    """The first parameter."""
    sources: dict[str, list[TensorInfo]] = field(default_factory=dict)
    """By the pattern of the converter that they match, in natural order of their names."""


class StoredTensors:
    """The tensors of a stage, by the parameters that they make up.

    Args:
        model: pruned, on the meta device.
        infos: of the stage's tensors, as the files have them.
        path: of the checkpoint, in errors.
    """

    def __init__(self, model: PreTrainedModel, infos: Iterable[TensorInfo], *, path: Path) -> None:
        self._model = model
        self._path = path
        self._direct: dict[str, TensorInfo] = {}
        self._recipes: dict[str, _Recipe] = {}
        self._made: dict[str, torch.Tensor] = {}
        self._sort(sorted(infos, key=lambda info: dot_natural_key(info.name)))

    def __contains__(self, name: str) -> bool:
        return name in self._direct or name in self._recipes

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        reader: WeightReader,
        dtype: torch.dtype,
        cut: AnyCut | None,
    ) -> torch.Tensor:
        """A parameter's values, or a rank's part of them.

        Args:
            name: of the parameter.
            shape: of all of it.
            reader: reads the files.
            dtype: of the result.
            cut: which part.

        Raises:
            CheckpointError: a tensor is missing or has another shape.
        """
        if name in self._direct:
            return read_cut(self._direct[name], name, shape, reader=reader, dtype=dtype, cut=cut)
        if name not in self._recipes:
            raise CheckpointError(f"{self._path}: the checkpoint has no tensor {name}")
        recipe = self._recipes[name]
        parts = _cut_experts(recipe, cut, shape)
        if parts is not None:
            return self._convert(recipe, reader, dtype, parts)[name]
        if name not in self._made:
            self._made |= self._convert(recipe, reader, dtype, {})
        whole = self._made.pop(name, None)
        if whole is None or tuple(whole.shape) != shape:
            got = None if whole is None else list(whole.shape)
            raise CheckpointError(
                f"{self._path}: what the checkpoint holds for {name} has shape {got}, "
                f"the model needs {list(shape)}"
            )
        # Made with other parameters, which may be wanted in another dtype.
        return apply_cut(whole, cut).to(dtype)

    def sources(self, name: str) -> list[TensorInfo]:
        """The tensors of the files that make up a parameter; empty where there are none."""
        if name in self._direct:
            return [self._direct[name]]
        recipe = self._recipes.get(name)
        return [] if recipe is None else [i for infos in recipe.sources.values() for i in infos]

    def direct(self, name: str) -> TensorInfo | None:
        """The tensor that is the parameter as it stands, maybe under another name."""
        return self._direct.get(name)

    def of_experts(
        self, name: str, shape: tuple[int, ...], *, cut: ExpertCut | None
    ) -> list[list[tuple[TensorInfo, TensorCut]]] | None:
        """The tensors of which each expert's matrix is made, one below the other.

        Args:
            name: of a parameter [experts, rows, columns].
            shape: of all of it.
            cut: which part of each expert is wanted.

        Returns:
            None where the files do not have whole rows of each expert in tensors of their own.
        """
        recipe = self._recipes.get(name)
        if recipe is None or len(shape) != 3:
            return None
        whole = ExpertCut(axis=1, ranges=_halves(recipe, shape))
        parts = _cut_experts(recipe, cut or whole, shape)
        if parts is None:
            return None
        columns = [recipe.sources[pattern] for pattern in parts]
        if any(len(infos) != shape[0] or len(infos[0].shape) != 2 for infos in columns):
            return None
        return [
            [(info, part) for info, part in zip(infos, parts.values(), strict=True)]
            for infos in zip(*columns, strict=True)
        ]

    def _sort(self, infos: list[TensorInfo]) -> None:
        wanted = dict(self._model.state_dict())
        mapping = get_model_conversion_mapping(self._model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        prefix = self._model.base_model_prefix
        for info in infos:
            if info.name in wanted:
                self._direct[info.name] = info
                continue
            name, pattern = rename_source_key(info.name, renamings, converters, prefix, wanted)
            if pattern is not None:
                self._add(info, name, pattern, converters, wanted)
            elif name in wanted:
                self._direct.setdefault(name, info)

    def _add(
        self,
        info: TensorInfo,
        name: str,
        pattern: str,
        converters: list[WeightConverter],
        wanted: dict[str, Any],
    ) -> None:
        converter = next(entry for entry in converters if pattern in entry.source_patterns)
        first = converter.target_patterns[0]
        names = [name.replace(first, target) for target in converter.target_patterns]
        if not any(target in wanted for target in names):
            return
        recipe = self._recipes.get(names[0]) or _Recipe(copy.deepcopy(converter), names[0])
        for target in names:
            self._recipes[target] = recipe
        recipe.sources.setdefault(pattern, []).append(info)

    def _convert(
        self,
        recipe: _Recipe,
        reader: WeightReader,
        dtype: torch.dtype,
        parts: dict[str, TensorCut],
    ) -> dict[str, torch.Tensor]:
        for pattern, infos in recipe.sources.items():
            for info in infos:
                tensor: Any = reader.read(info, dtype, cut=parts.get(pattern))
                recipe.converter.add_tensor(recipe.name, info.name, pattern, tensor)
        made = recipe.converter.convert(recipe.name, model=self._model, config=self._model.config)
        return {
            name: (value[0] if isinstance(value, list) else value).to(dtype).contiguous()
            for name, value in made.items()
        }


def read_cut(
    info: TensorInfo,
    name: str,
    shape: tuple[int, ...],
    *,
    reader: WeightReader,
    dtype: torch.dtype,
    cut: AnyCut | None,
) -> torch.Tensor:
    """A tensor of the files, or a part of it, checked against the parameter's shape.

    Raises:
        CheckpointError: the shape is another one.
    """
    if tuple(info.shape) != shape:
        raise CheckpointError(
            f"{info.file}: tensor {info.source_name} has shape {list(info.shape)}, the model's "
            f"{name} needs {list(shape)}"
        )
    if cut is None or isinstance(cut, TensorCut):
        return reader.read(info, dtype, cut=cut)
    if isinstance(cut, ExpertCut) and not info.stored.is_transposed and len(shape) - cut.axis <= 2:
        height = (-1,) if cut.axis < len(shape) - 1 else shape[-2:-1]
        parts = [
            part.view(*shape[:-2], *height, part.shape[-1])
            for part in (reader.read(info, dtype, cut=c) for c in cut.of_rows(shape))
        ]
        return torch.cat(parts, dim=cut.axis) if len(parts) > 1 else parts[0]
    return apply_cut(reader.read(info, dtype), cut)


def apply_cut(whole: torch.Tensor, cut: AnyCut | None) -> torch.Tensor:
    """A rank's part of a tensor that has been read as a whole."""
    if isinstance(cut, ExpertCut):
        return cut.apply(whole)
    if isinstance(cut, Once):
        return whole if cut.is_here else torch.zeros_like(whole)
    if cut is None:
        return whole
    if cut.rows is not None:
        whole = torch.cat([whole[start:end] for start, end in cut.rows])
    if cut.columns is not None:
        whole = whole[..., cut.columns[0] : cut.columns[1]]
    return whole.contiguous()


def _cut_experts(
    recipe: _Recipe, cut: AnyCut | None, shape: tuple[int, ...]
) -> dict[str, TensorCut] | None:
    """The part of each expert's own tensors, where these are only stacked and joined.

    [experts, joined rows, columns] is made of one [rows, columns] for each expert and pattern.

    Returns:
        None where the parameter must be made as a whole.
    """
    kinds = [type(operation) for operation in recipe.converter.operations]
    if not isinstance(cut, ExpertCut) or kinds[:1] != [MergeModulelist] or len(shape) != 3:
        return None
    patterns = recipe.converter.source_patterns
    if kinds == [MergeModulelist] and len(patterns) == 1 and len(cut.ranges) == 1:
        part = cut.ranges[0]
        return {patterns[0]: TensorCut(rows=(part,)) if cut.axis == 1 else TensorCut(columns=part)}
    if kinds != [MergeModulelist, Concatenate] or cut.axis != 1 or not _is_of_rows(recipe, shape):
        return None
    height = shape[1] // len(patterns)
    parts = {}
    for index, (pattern, (start, end)) in enumerate(zip(patterns, cut.ranges, strict=False)):
        parts[pattern] = TensorCut(rows=((start - index * height, end - index * height),))
    is_whole = len(patterns) == len(cut.ranges) and set(parts) == set(recipe.sources)
    return parts if is_whole else None


def _halves(recipe: _Recipe, shape: tuple[int, ...]) -> tuple[Range, ...]:
    """All rows of an expert, tensor by tensor."""
    count = len(recipe.converter.source_patterns)
    height = shape[1] // count
    return tuple((index * height, (index + 1) * height) for index in range(count))


def _is_of_rows(recipe: _Recipe, shape: tuple[int, ...]) -> bool:
    operations: list[Any] = recipe.converter.operations
    merge, join = operations
    height = shape[1] // len(recipe.converter.source_patterns)
    return (merge.dim, join.dim) == (0, 1) and all(
        tuple(info.shape) == (height, shape[2])
        for infos in recipe.sources.values()
        for info in infos
    )
