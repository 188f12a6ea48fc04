"""Build one stage of a model from the family's own transformers class.

The class is built on the meta device, so nothing is allocated; layers outside [start_layer,
end_layer) become pass-throughs, embedding, final norm and head stay only where the stage needs
them, and exactly the parameters that remain are read from the checkpoint.
"""

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from stagemesh.errors import CheckpointError, ConfigError, UnsupportedModel
from stagemesh.model_spec import ModelSpec, TensorInfo
from stagemesh.models.buffers import materialize_buffers, stored_buffer_names
from stagemesh.models.identity_check import Passthrough, modules_after_layers
from stagemesh.models.packed_linear import PackedLinear, can_pack, pack_linears
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


class Elsewhere(nn.Module):
    """Stands where a module of another stage was; using it is a bug or an unsupported family."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        """Raise."""
        raise UnsupportedModel(f"this stage has no {self._name}, but the model's forward uses it")


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
    head_dim: int
    weight_bytes: int
    """Bytes of parameters held."""
    read_bytes: int
    """Bytes of model files read."""


def build_stage(
    spec: ModelSpec,
    *,
    start_layer: int,
    end_layer: int,
    dtype: str,
    device: torch.device,
    attention: str,
    on_bytes: Callable[[int], None] | None = None,
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

    Raises:
        ConfigError: the dtype or the layer range is not one.
        UnsupportedModel: the family cannot be run in stages.
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
    reader = WeightReader(spec, on_bytes=on_bytes)
    infos = {info.name: info for info in spec.tensors_for_stage(start_layer, end_layer)}
    _fill(model, infos, reader, path=spec.path, device=device, keep_tied=is_first and is_last)
    materialize_buffers(model, device=device)
    _apply_rope_factors(model, spec)
    model.train(mode=False).requires_grad_(requires_grad=False)
    if can_pack(device):
        _untie_for_packing(model)
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
        num_kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        head_dim=spec.head_dim,
        weight_bytes=_weight_bytes(model),
        read_bytes=reader.read_bytes,
    )


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


def _fill(
    model: PreTrainedModel,
    infos: dict[str, TensorInfo],
    reader: WeightReader,
    *,
    path: Path,
    device: torch.device,
    keep_tied: bool,
) -> None:
    """Read each remaining parameter and stored buffer from the checkpoint."""
    embedding = model.get_input_embeddings()
    head = _head(model)
    head_name = _name_of(model, head)
    tied_source = None
    if head_name is not None and f"{head_name}.weight" not in infos:
        tied_source = next(
            (n for n in infos if n.endswith(("embed_tokens.weight", "wte.weight"))), None
        )
    buffers = {name: model.get_buffer(name) for name in stored_buffer_names(model)}
    for name, parameter in [*model.named_parameters(remove_duplicate=False), *buffers.items()]:
        is_tied_head = head_name is not None and name == f"{head_name}.weight" and tied_source
        if is_tied_head and keep_tied:
            continue
        info = infos.get(tied_source if is_tied_head and tied_source else name)
        if info is None:
            raise CheckpointError(f"{path}: the checkpoint has no tensor {name}")
        if tuple(info.shape) != tuple(parameter.shape):
            raise CheckpointError(
                f"{info.file}: tensor {info.source_name} has shape {list(info.shape)}, the model's "
                f"{name} needs {list(parameter.shape)}"
            )
        tensor = reader.read(info, parameter.dtype).to(device)
        parent, _, leaf = name.rpartition(".")
        value = tensor if name in buffers else nn.Parameter(tensor, requires_grad=False)
        setattr(model.get_submodule(parent), leaf, value)
    if keep_tied and tied_source is not None:
        assert head is not None
        head.weight = embedding.weight


def _head(model: PreTrainedModel) -> nn.Module | None:
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return head


def _name_of(model: nn.Module, module: nn.Module | None) -> str | None:
    if module is None or isinstance(module, Elsewhere):
        return None
    return next((name for name, child in model.named_modules() if child is module), None)


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


def _untie_for_packing(model: PreTrainedModel) -> None:
    """Give a tied head its own parameter object: packing re-lays the head, the table must stay."""
    head, embedding = _head(model), model.get_input_embeddings()
    if isinstance(head, nn.Linear) and head.weight is getattr(embedding, "weight", None):
        head.weight = nn.Parameter(head.weight.data, requires_grad=False)
