"""Build one stage of a model: a draft of the family's own transformers class, then its weights."""

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from stagemesh.errors import CheckpointError, UnsupportedModel
from stagemesh.model_spec import ModelSpec
from stagemesh.models.buffers import materialize_buffers
from stagemesh.models.draft import KVProbe, draft_stage
from stagemesh.models.family_config import OWN_ATTENTION
from stagemesh.models.half_linear import HalfLinear
from stagemesh.models.kv_shape import KVShape
from stagemesh.models.outline import Outline
from stagemesh.models.packed_linear import PackedLinear, can_pack, pack_linears
from stagemesh.models.parameters import untie_for_packing
from stagemesh.models.quantized_linear import LOW_BIT_MODULES
from stagemesh.models.tensor_group import TensorGroup
from stagemesh.models.tensor_parallel import apply_tensor_plan
from stagemesh.models.weights import WeightReader

logger = logging.getLogger(__name__)


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
    group = tensor_group
    draft = draft_stage(
        spec,
        start_layer=start_layer,
        end_layer=end_layer,
        dtype=dtype,
        attention=attention,
        probe=probe,
        shares=None if group is None else group.shares,
        rank=0 if group is None else group.rank,
    )
    model, plan = draft.model, draft.plan
    reader = WeightReader(spec, on_bytes=on_bytes)
    draft.read(reader, quantize=quantize, device=device)
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
        is_first=draft.is_first,
        is_last=draft.is_last,
        dtype=draft.dtype,
        num_kv_heads=spec.num_kv_heads if tensor_group is None else tensor_group.num_kv_heads,
        head_dim=spec.head_dim,
        weight_bytes=_weight_bytes(model),
        read_bytes=reader.read_bytes,
        outline=draft.outline,
        kv_shapes=_held_shapes(draft.kv_shapes, spec, tensor_group),
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
