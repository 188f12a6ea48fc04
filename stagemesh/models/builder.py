"""Build one stage of a model from the family's own transformers class.

The class is built on the meta device, so nothing is allocated; layers outside [start_layer,
end_layer) become pass-throughs, embedding, final norm and head stay only where the stage needs
them, and exactly the parameters that remain are read from the checkpoint.
"""

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from stagemesh.errors import CheckpointError, ConfigError, UnsupportedModel
from stagemesh.model_spec import ModelSpec
from stagemesh.models.buffers import materialize_buffers
from stagemesh.models.identity_check import Elsewhere, Passthrough, modules_after_layers
from stagemesh.models.packed_linear import PackedLinear, can_pack, pack_linears
from stagemesh.models.parameters import fill_parameters, untie_for_packing
from stagemesh.models.tensor_parallel import TensorGroup, apply_tensor_plan, check_spread_norms
from stagemesh.models.tp_plan import TensorPlan, plan_tensor_parallel
from stagemesh.models.weights import WeightReader

logger = logging.getLogger(__name__)

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Run dtypes by the name that plans and requests use."""

# These scale with the longest sequence of a batch, so a batch would change each sequence's text.
_BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
_KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StageModel:
    """A stage ready to run."""

    model: PreTrainedModel
    """The causal language model with only this stage's parts."""
    device: torch.device
    """Where it is."""
    start_layer: int
    end_layer: int
    is_first: bool
    is_last: bool
    dtype: torch.dtype
    num_kv_heads: int
    """Key/value heads held here."""
    head_dim: int
    weight_bytes: int
    """Bytes of parameters held."""
    read_bytes: int
    """Bytes of model files read."""
    tensor_group: TensorGroup | None = None
    """The ranks that run the stage together; None for one alone."""


def build_stage(
    spec: ModelSpec,
    *,
    start_layer: int,
    end_layer: int,
    dtype: str,
    device: torch.device,
    attention: str,
    on_bytes: Callable[[int], None] | None = None,
    tensor_group: TensorGroup | None = None,
) -> StageModel:
    """Build and load layers [start_layer, end_layer) of the model.

    Args:
        spec: the model's headers.
        start_layer: first layer.
        end_layer: one past the last layer.
        dtype: a key of `DTYPES`.
        device: where the stage runs.
        attention: name of the registered attention and mask functions.
        on_bytes: called with the size of each tensor read, from this thread.
        tensor_group: the ranks that run the stage together; each builds and loads its own part.

    Raises:
        ConfigError: the dtype or the layer range is not one.
        UnsupportedModel: the family cannot be run in stages, or not by several ranks.
        CheckpointError: a parameter is missing in the checkpoint or has another shape.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if not 0 <= start_layer < end_layer <= spec.num_layers:
        raise ConfigError(
            f"layers [{start_layer}, {end_layer}) are not within the model's [0, {spec.num_layers})"
        )
    is_first, is_last = start_layer == 0, end_layer == spec.num_layers
    config = _config(spec, attention=attention)
    model = _on_meta(config, DTYPES[dtype])
    _prune(model, range(start_layer, end_layer), is_first=is_first, is_last=is_last)
    plan = _plan_tensors(model, tensor_group, name=spec.name)
    reader = WeightReader(spec, on_bytes=on_bytes)
    infos = {info.name: info for info in spec.tensors_for_stage(start_layer, end_layer)}
    fill_parameters(
        model,
        infos,
        reader,
        path=spec.path,
        device=device,
        keep_tied=is_first and is_last,
        cuts=plan.cuts if plan is not None else {},
    )
    materialize_buffers(model, device=device)
    _apply_rope_factors(model, spec)
    model.train(mode=False).requires_grad_(requires_grad=False)
    if can_pack(device):
        untie_for_packing(model)
    if plan is not None and tensor_group is not None:
        apply_tensor_plan(model, plan, group=tensor_group)
    if can_pack(device):
        pack_linears(model)
    text = config.get_text_config()
    return StageModel(
        model=model,
        device=device,
        start_layer=start_layer,
        end_layer=end_layer,
        is_first=is_first,
        is_last=is_last,
        dtype=DTYPES[dtype],
        num_kv_heads=(
            getattr(text, "num_key_value_heads", None) or text.num_attention_heads
            if tensor_group is None
            else tensor_group.num_kv_heads
        ),
        head_dim=spec.head_dim,
        weight_bytes=_weight_bytes(model),
        read_bytes=reader.read_bytes,
        tensor_group=tensor_group,
    )


def _plan_tensors(
    model: PreTrainedModel, group: TensorGroup | None, *, name: str
) -> TensorPlan | None:
    """What this rank has of each parameter; None when it is alone and has all."""
    if group is None:
        return None
    plan = plan_tensor_parallel(model, shares=group.shares, rank=group.rank, name=name)
    check_spread_norms(model, plan, name=name)
    return plan


def _config(spec: ModelSpec, *, attention: str) -> PretrainedConfig:
    """The family's config object, checked for what stages cannot do."""
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
    config._attn_implementation = attention
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


def _on_meta(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    try:
        with torch.device("meta"):
            # Always in torch's default dtype: for any other, transformers changes the default,
            # which is the whole process's, and other threads would build and compute with it.
            model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, dtype=torch.get_default_dtype()
            )
    except (KeyError, ValueError, TypeError) as error:
        raise UnsupportedModel(
            f"transformers cannot build {config.model_type} as a causal language model: {error}"
        ) from error
    if not model._supports_attention_backend:
        raise UnsupportedModel(
            f"{config.model_type}: its class does not use transformers' attention interface, so "
            "its attention cannot run on stagemesh's KV cache"
        )
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    config.dtype = dtype
    return model


def _prune(model: PreTrainedModel, kept: range, *, is_first: bool, is_last: bool) -> None:
    """Leave only the stage's parts in the model."""
    base = model.base_model
    plan = getattr(model.config, "base_model_pp_plan", None)
    if not plan or "layers" not in plan or base is model:
        raise UnsupportedModel(
            f"{model.config.model_type}: transformers gives no pipeline plan for this family"
        )
    layers: nn.ModuleList = base.get_submodule("layers")  # type: ignore[assignment]
    for index in range(len(layers)):
        if index not in kept:
            layers[index] = Passthrough()
    if not is_first:
        if hasattr(base, "embedding_multiplier"):
            # Applied inside the model's forward; the first stage has done it.
            setattr(base, "embedding_multiplier", 1.0)  # noqa: B010 -- a float, not a module
        model.set_input_embeddings(Elsewhere("token embedding"))
    if not is_last:
        for name in modules_after_layers(model):
            setattr(base, name, Passthrough())
        model.set_output_embeddings(Elsewhere("output head"))  # type: ignore[no-untyped-call]


def _apply_rope_factors(model: PreTrainedModel, spec: ModelSpec) -> None:
    """Divide the rotary frequencies by the factors that a GGUF file carries as a tensor."""
    factors = spec.rope_frequency_factors
    if factors is None:
        return
    for name, frequencies in model.named_buffers():
        if name.rpartition(".")[2] not in ("inv_freq", "original_inv_freq"):
            continue
        if frequencies.shape != (len(factors),):
            raise CheckpointError(
                f"{spec.path}: {len(factors)} rope factors for {frequencies.numel()} frequencies"
            )
        frequencies.div_(torch.tensor(factors, device=frequencies.device))


def _weight_bytes(model: nn.Module) -> int:
    packed = sum(m.weight_bytes for m in model.modules() if isinstance(m, PackedLinear))
    return packed + sum(p.numel() * p.element_size() for p in model.parameters())
