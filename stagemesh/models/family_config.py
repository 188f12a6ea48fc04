"""A family's config and its class on the meta device, checked for what stages cannot do."""

import copy
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from stagemesh.errors import UnsupportedModel
from stagemesh.model_spec import ModelSpec

OWN_ATTENTION = "eager"
"""transformers' name for attention that the family's own code computes in full."""

# These scale with the longest sequence of a batch, so a batch would change each sequence's text.
_BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
_KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
# Their class says that it supports the attention interface, and yet one of its layers does not.
_COMPUTES_ATTENTION_ITSELF = frozenset({"diffllama", "doge", "nemotron"})


def checked_config(spec: ModelSpec) -> PretrainedConfig:
    """The family's config object.

    Raises:
        UnsupportedModel: transformers refuses it, or it asks for something that cannot be divided.
    """
    content = copy.deepcopy(dict(spec.config))
    try:
        config = AutoConfig.for_model(**content)
    except (KeyError, ValueError, TypeError, StrictDataclassError) as error:
        raise UnsupportedModel(
            f"{spec.name}: transformers refuses the configuration: {error}"
        ) from error
    unknown = set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYER_TYPES
    if unknown:
        raise UnsupportedModel(
            f"{spec.name} ({config.model_type}): layers of type {', '.join(sorted(unknown))} are "
            f"not supported; supported: {', '.join(sorted(_KNOWN_LAYER_TYPES))}"
        )
    _check_rope(config, name=spec.name)
    if getattr(config, "use_bidirectional_attention", None):
        raise UnsupportedModel(
            f"{spec.name} ({config.model_type}): bidirectional attention is not supported"
        )
    # The stage's own cache holds keys and values; transformers' would hold them once more.
    config.use_cache = False
    return config


def _check_rope(config: PretrainedConfig, *, name: str) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    # Families with several kinds of layers have one object for each kind.
    for parameters in (rope, *(inner for inner in rope.values() if isinstance(inner, dict))):
        kind = parameters.get("rope_type", "default")
        if kind in _BATCH_DEPENDENT_ROPE:
            raise UnsupportedModel(
                f"{name}: rope type {kind!r} depends on the longest sequence of a batch and is "
                "not supported"
            )


def build_on_meta(
    config: PretrainedConfig, dtype: torch.dtype, *, attention: str
) -> PreTrainedModel:
    """The family's class without memory; it computes attention through `attention` if it can.

    Raises:
        UnsupportedModel: transformers cannot build it, or it keeps a recurrent state.
    """
    is_own = computes_attention_itself(config)
    config._attn_implementation = OWN_ATTENTION if is_own else attention
    try:
        model = _from_config(config)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise UnsupportedModel(
            f"transformers cannot build {config.model_type} as a causal language model: {error}"
        ) from error
    if model._is_stateful:
        raise UnsupportedModel(
            f"{config.model_type}: its layers keep a recurrent state, which is not supported"
        )
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    config.dtype = dtype
    model.train(mode=False)
    return model


def computes_attention_itself(config: PretrainedConfig) -> bool:
    """Whether the family's class does not use transformers' attention interface.

    Raises:
        UnsupportedModel: transformers has no causal language model of the family.
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(
            f"transformers has no causal language model of the family {config.model_type}"
        )
    family: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    is_listed = config.model_type in _COMPUTES_ATTENTION_ITSELF
    return is_listed or not family._supports_attention_backend


def _from_config(config: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        # Always in torch's default dtype: for any other, transformers changes the default,
        # which is the whole process's, and other threads would build and compute with it.
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.get_default_dtype()
        )
    return model
