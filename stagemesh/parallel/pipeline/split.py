"""Cutting a model into stages.

    counts = even_counts(10, num_stages=4)                      # [3, 3, 2, 2]
    stages = split_sequential(model, counts=[1, 5, 4])          # or uneven, as you like
    stages = split_llama(model, counts=counts)                  # embed | layers | norm + head

Stages use the very modules of the model, under the names that they have in it: their state dicts
together are the model's. With interleaving make R * v stages; rank r takes stages[r::R].
"""

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from stagemesh.errors import ConfigError, UnsupportedModel
from stagemesh.schedule.schedule import check_sizes


def even_counts(num_layers: int, *, num_stages: int) -> list[int]:
    """Layers of each stage: nearly equal, the first stages have one more.

    Raises:
        ConfigError: there are fewer layers than stages.
    """
    check_sizes(num_stages=num_stages)
    if num_layers < num_stages:
        raise ConfigError(f"{num_layers} layers cannot fill {num_stages} stages")
    size, num_larger = divmod(num_layers, num_stages)
    return [size + (stage < num_larger) for stage in range(num_stages)]


def split_layers(layers: Sequence[nn.Module], *, counts: Sequence[int]) -> list[nn.Sequential]:
    """Stages of consecutive layers; each layer is named by its index in `layers`.

    Raises:
        ConfigError: the counts do not add up to the layers, or one is below 1.
    """
    named = list(enumerate(layers))
    return [
        nn.Sequential(OrderedDict((str(index), layer) for index, layer in named[start:end]))
        for start, end in _ranges(len(layers), counts)
    ]


def split_sequential(model: nn.Sequential, *, counts: Sequence[int]) -> list[nn.Sequential]:
    """Stages of a Sequential, whose parts keep their names.

    Raises:
        ConfigError: as `split_layers`.
    """
    named = list(model.named_children())
    return [
        nn.Sequential(OrderedDict(named[start:end])) for start, end in _ranges(len(named), counts)
    ]


class LlamaStage(nn.Module):
    """A part of a LlamaForCausalLM of transformers: embedding, some layers, norm and head.

    Takes token ids [B, T] on the first stage and hidden states [B, T, D] on others; gives hidden
    states, on the last stage logits [B, T, V]. Attention is causal, positions count from 0.
    """

    def __init__(self, model: Any, *, start_layer: int, end_layer: int) -> None:
        """Take a part of a model.

        Args:
            model: the LlamaForCausalLM.
            start_layer: the first layer; the stage with layer 0 has the embedding.
            end_layer: behind the last; the stage with the last layer has norm and head.

        Raises:
            UnsupportedModel: its attention is causal only with a mask that we do not make.
        """
        super().__init__()
        if model.config._attn_implementation == "eager":
            raise UnsupportedModel(
                "attention 'eager' is not causal without a mask; load the model with "
                "attn_implementation='sdpa'"
            )
        body = model.model
        num_layers = len(body.layers)
        self.is_first = start_layer == 0
        self.is_last = end_layer == num_layers
        self.model: Any = nn.Module()
        if self.is_first:
            self.model.embed_tokens = body.embed_tokens
        self.model.layers = nn.ModuleDict(
            {str(index): body.layers[index] for index in range(start_layer, end_layer)}
        )
        self.model.rotary_emb = body.rotary_emb
        self._is_tied = model.config.tie_word_embeddings
        if self.is_last:
            self.model.norm = body.norm
            self.lm_head: Any = _head_of(model, shares_embedding=self.is_first)

    @property
    def tied_parameters(self) -> list[nn.Parameter]:
        """What the first and the last stage share, for PipelineParallel; none on other stages."""
        if not self._is_tied or self.is_first == self.is_last:
            return []
        return [self.model.embed_tokens.weight if self.is_first else self.lm_head.weight]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Run the part."""
        hidden = self.model.embed_tokens(inputs) if self.is_first else inputs
        positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        rotary = self.model.rotary_emb(hidden, positions)
        for layer in self.model.layers.values():
            hidden = layer(hidden, position_embeddings=rotary, position_ids=positions)
        if not self.is_last:
            return hidden
        logits: torch.Tensor = self.lm_head(self.model.norm(hidden))
        return logits


def split_llama(model: Any, *, counts: Sequence[int]) -> list[LlamaStage]:
    """Stages of a LlamaForCausalLM with so many layers each.

    Where the model ties head and embedding, the last stage gets a copy of the table: give both
    stages' `tied_parameters` to PipelineParallel, which keeps the copies equal.

    Raises:
        ConfigError: as `split_layers`.
    """
    return [
        LlamaStage(model, start_layer=start, end_layer=end)
        for start, end in _ranges(len(model.model.layers), counts)
    ]


def _head_of(model: Any, *, shares_embedding: bool) -> nn.Module:
    head: nn.Linear = model.lm_head
    if not model.config.tie_word_embeddings or shares_embedding:
        return head
    copy = nn.Linear(head.in_features, head.out_features, bias=False, device="meta")
    copy.weight = nn.Parameter(head.weight.detach().clone())
    return copy


def _ranges(num_layers: int, counts: Sequence[int]) -> list[tuple[int, int]]:
    if any(count < 1 for count in counts) or sum(counts) != num_layers:
        raise ConfigError(
            f"counts must be positive and add up to {num_layers} layers, got {list(counts)}"
        )
    edges = [sum(counts[:index]) for index in range(len(counts) + 1)]
    return list(itertools.pairwise(edges))
