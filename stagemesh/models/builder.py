"""Build one stage of a model from the family's own transformers class.

The class is built on the meta device, so nothing is allocated; layers outside [start_layer,
end_layer) become pass-throughs, embedding, final norm and head stay only where the stage needs
them, and exactly the parameters that remain are read from the checkpoint.
"""

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from stagemesh.errors import CheckpointError, ConfigError, UnsupportedModel
from stagemesh.model_spec import ModelSpec
from stagemesh.models.buffers import materialize_buffers
from stagemesh.models.family_config import OWN_ATTENTION, build_on_meta, checked_config
from stagemesh.models.half_linear import HalfLinear
from stagemesh.models.kv_shape import KVShape
from stagemesh.models.outline import Outline, find_outline
from stagemesh.models.packed_linear import PackedLinear, can_pack, pack_linears
from stagemesh.models.parameters import fill_parameters, untie_for_packing
from stagemesh.models.prune import prune
from stagemesh.models.quantized_linear import LOW_BIT_MODULES
from stagemesh.models.quantized_stage import put_quantized
from stagemesh.models.stored_tensors import StoredTensors
from stagemesh.models.tensor_group import TensorGroup
from stagemesh.models.tensor_parallel import apply_tensor_plan, check_spread_norms
from stagemesh.models.tp_plan import TensorPlan, plan_tensor_parallel
from stagemesh.models.weights import WeightReader

logger = logging.getLogger(__name__)

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Run dtypes by the name that plans and requests use."""


KVProbe = Callable[[PreTrainedModel, Outline, range], tuple[KVShape, ...] | None]
"""From a pruned meta model, its outline and the stage's layers to what layers keep, if known."""


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
    outline: Outline | None = None
    """What the family's forward does around the layers; None where it has all of them."""
    kv_shapes: tuple[KVShape, ...] | None = None
    """Keys and values of each layer; None where all are of `num_kv_heads` and `head_dim`."""

    @property
    def has_own_attention(self) -> bool:
        """Whether the family's own code computes attention, sequence by sequence."""
        return bool(self.model.config._attn_implementation == OWN_ATTENTION)


def build_stage(
    spec: ModelSpec,
    *,
    start_layer: int,
    end_layer: int,
    dtype: str,
    device: torch.device,
    attention: str,
    probe: KVProbe | None = None,
    on_bytes: Callable[[int], None] | None = None,
    tensor_group: TensorGroup | None = None,
    quantize: str = "none",
    pack: bool = True,
) -> StageModel:
    """Build and load layers [start_layer, end_layer) of the model.

    Args:
        spec: the model's headers.
        start_layer: first layer.
        end_layer: one past the last layer.
        dtype: a key of `DTYPES`.
        device: where the stage runs.
        attention: name of the registered attention and mask functions.
        probe: finds out what layers keep of a token, on the meta device.
        on_bytes: called with the size of each tensor read, from this thread.
        tensor_group: the ranks that run the stage together; each builds and loads its own part.
        quantize: how weights are held; see `stagemesh.checkpoint.low_bit`.
        pack: lay linears out for oneDNN where it has kernels; compiled code wants them plain.

    Raises:
        ConfigError: the dtype, the quantisation or the layer range is not one.
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
    config = checked_config(spec)
    model = build_on_meta(config, DTYPES[dtype], attention=attention)
    outline = find_outline(model)
    prune(model, outline, range(start_layer, end_layer), is_first=is_first, is_last=is_last)
    shapes = probe(model, outline, range(start_layer, end_layer)) if probe is not None else None
    plan = _plan_tensors(model, tensor_group, name=spec.name)
    reader = WeightReader(spec, on_bytes=on_bytes)
    infos = spec.tensors_for_stage(start_layer, end_layer)
    cuts = plan.cuts if plan is not None else {}
    stored = StoredTensors(model, infos, path=spec.path)
    is_low_head = put_quantized(
        model,
        stored,
        reader,
        quantize=quantize,
        table=spec.groups.embedding,
        dtype=DTYPES[dtype],
        device=device,
        cuts=cuts,
    )
    fill_parameters(
        model,
        stored,
        reader,
        table=spec.groups.embedding,
        device=device,
        keep_tied=is_first and is_last and not is_low_head,
        cuts=cuts,
    )
    materialize_buffers(model, device=device)
    _apply_rope_factors(model, spec)
    model.train(mode=False).requires_grad_(requires_grad=False)
    if pack and can_pack(device):
        untie_for_packing(model)
    if plan is not None and tensor_group is not None:
        apply_tensor_plan(model, plan, group=tensor_group)
    if pack and can_pack(device):
        pack_linears(model)
    return StageModel(
        model=model,
        device=device,
        start_layer=start_layer,
        end_layer=end_layer,
        is_first=is_first,
        is_last=is_last,
        dtype=DTYPES[dtype],
        num_kv_heads=spec.num_kv_heads if tensor_group is None else tensor_group.num_kv_heads,
        head_dim=spec.head_dim,
        weight_bytes=_weight_bytes(model),
        read_bytes=reader.read_bytes,
        outline=outline,
        kv_shapes=_held_shapes(shapes, spec, tensor_group),
        tensor_group=tensor_group,
    )


def _held_shapes(
    shapes: tuple[KVShape, ...] | None, spec: ModelSpec, group: TensorGroup | None
) -> tuple[KVShape, ...] | None:
    """What this rank keeps of a token; None where all layers keep what the spec says."""
    plain = KVShape(num_heads=spec.num_kv_heads, key_dim=spec.head_dim, value_dim=spec.head_dim)
    if shapes is None or set(shapes) == {plain}:
        return None
    if group is None:
        return shapes
    if {shape.num_heads for shape in shapes} != {group.shares.num_kv_heads}:
        raise UnsupportedModel(
            f"{spec.name} ({spec.config['model_type']}): its layers have other numbers of KV heads "
            f"than the {group.shares.num_kv_heads} that the ranks share"
        )
    return tuple(dataclasses.replace(shape, num_heads=group.num_kv_heads) for shape in shapes)


def _plan_tensors(
    model: PreTrainedModel, group: TensorGroup | None, *, name: str
) -> TensorPlan | None:
    """What this rank has of each parameter; None when it is alone and has all."""
    if group is None:
        return None
    plan = plan_tensor_parallel(model, shares=group.shares, rank=group.rank, name=name)
    check_spread_norms(model, plan, name=name)
    return plan


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
    held = (PackedLinear, HalfLinear, *LOW_BIT_MODULES)
    packed = sum(m.weight_bytes for m in model.modules() if isinstance(m, held))
    return packed + sum(p.numel() * p.element_size() for p in model.parameters())
