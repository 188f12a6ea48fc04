"""Where a model's first weights come from: a seed, or files. By name, so any rank asks for its own.

Names are those of transformers; a tied head has the values of the embedding.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from stagemesh.errors import CheckpointError, UnsupportedModel
from stagemesh.model_spec import ModelSpec
from stagemesh.models.weights import WeightReader
from stagemesh.training.seeds import generator_of

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class WeightSource(Protocol):
    """Gives the whole values of parameters."""

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A parameter's values, float32, in memory of their own."""


class FreshWeights:
    """Random ones as transformers has them for a new Llama, but the same for any topology.

    Each parameter has random numbers of its own, so that no rank has to make those of others.
    """

    def __init__(self, model: Mapping[str, Any], *, seed: int) -> None:
        """For a model, by the content of its config.json."""
        self._std = float(model.get("initializer_range", 0.02))
        self._is_tied = bool(model.get("tie_word_embeddings"))
        self._seed = seed

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Ones for norms, zeros for biases, else a normal distribution."""
        if len(shape) == 1:
            return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        if name == HEAD and self._is_tied:
            name = EMBEDDING
        generator = generator_of(self._seed, name)
        return torch.empty(shape).normal_(std=self._std, generator=generator)


class FileWeights:
    """Those of a model's files, of either format."""

    def __init__(self, spec: ModelSpec) -> None:
        """Read from a model.

        Raises:
            UnsupportedModel: it has something that its config.json cannot say.
        """
        if spec.rope_frequency_factors is not None:
            raise UnsupportedModel(
                f"{spec.path}: its rope factors are a tensor, which a config.json cannot hold"
            )
        self._spec = spec
        self._reader = WeightReader(spec)

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The file's values.

        Raises:
            CheckpointError: there are none, or they have another shape.
        """
        info = self._spec.tensors.get(name)
        if info is None and name == HEAD:
            info = self._spec.tensors.get(EMBEDDING)
        if info is None:
            raise CheckpointError(f"{self._spec.path}: the checkpoint has no tensor {name}")
        if tuple(info.shape) != shape:
            raise CheckpointError(
                f"{info.file}: tensor {info.source_name} has shape {list(info.shape)}, the model's "
                f"{name} needs {list(shape)}"
            )
        return self._reader.read(info, torch.float32)
