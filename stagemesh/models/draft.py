"""A stage before its weights: the family's model without data, and what of the files it reads.

The class is built on the meta device, so nothing is allocated; layers outside [start_layer,
end_layer) become pass-throughs, embedding, final norm and head stay only where the stage needs
them. What remains is what is read.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from stagemesh.errors import ConfigError, StagemeshError, UnsupportedModel
from stagemesh.model_spec import ModelSpec
from stagemesh.models.family_config import build_on_meta, checked_config
from stagemesh.models.kv_shape import KVShape
from stagemesh.models.outline import FAMILY_ERRORS, Outline, find_outline
from stagemesh.models.parameters import fill_parameters
from stagemesh.models.prune import prune
from stagemesh.models.quantized_stage import put_quantized
from stagemesh.models.stored_tensors import StoredTensors
from stagemesh.models.tensor_parallel import check_spread_norms
from stagemesh.models.tp_plan import TensorPlan, plan_tensor_parallel
from stagemesh.models.weights import WeightReader
from stagemesh.placement.tensor_shares import TensorShares

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Run dtypes by the name that plans and requests use."""

KVProbe = Callable[[PreTrainedModel, Outline, range], tuple[KVShape, ...] | None]
"""From a pruned meta model, its outline and the stage's layers to what layers keep, if known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDraft:
    """A stage whose weights are not read yet."""

    spec: ModelSpec
    """The whole model's headers."""
    model: PreTrainedModel
    """With only this stage's parts."""
    outline: Outline
    """What the family's forward does around the layers."""
    start_layer: int
    end_layer: int
    dtype: torch.dtype
    """Run dtype."""
    kv_shapes: tuple[KVShape, ...] | None
    """What layers keep of a token, where a probe knows it."""
    plan: TensorPlan | None
    """What this rank has of each parameter; None when it is alone and has all."""

    @property
    def is_first(self) -> bool:
        """Whether it has the embedding."""
        return self.start_layer == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the final norm and the head."""
        return self.end_layer == self.spec.num_layers

    def read(self, reader: WeightReader, *, quantize: str, device: torch.device) -> None:
        """Fill the model: exactly the parameters that it has are read.

        Args:
            reader: reads the files.
            quantize: how weights are held; see `stagemesh.checkpoint.low_bit`.
            device: where the parameters go.

        Raises:
            ConfigError: the quantisation is not one.
            CheckpointError: a parameter is missing in the checkpoint or has another shape.
        """
        infos = self.spec.tensors_for_stage(self.start_layer, self.end_layer)
        stored = StoredTensors(self.model, infos, path=self.spec.path)
        table = self.spec.groups.embedding
        cuts = self.plan.cuts if self.plan is not None else {}
        is_low_head = put_quantized(
            self.model,
            stored,
            reader,
            quantize=quantize,
            table=table,
            dtype=self.dtype,
            device=device,
            cuts=cuts,
        )
        fill_parameters(
            self.model,
            stored,
            reader,
            table=table,
            device=device,
            keep_tied=self.is_first and self.is_last and not is_low_head,
            cuts=cuts,
        )


def draft_stage(
    spec: ModelSpec,
    *,
    start_layer: int,
    end_layer: int,
    dtype: str,
    attention: str,
    probe: KVProbe | None = None,
    shares: TensorShares | None = None,
    rank: int = 0,
) -> StageDraft:
    """Build layers [start_layer, end_layer) of a model on the meta device.

    Args:
        spec: the model's headers.
        start_layer: first layer.
        end_layer: one past the last layer.
        dtype: a key of `DTYPES`.
        attention: name of the registered attention and mask functions.
        probe: finds out what layers keep of a token.
        shares: of the ranks that run the stage together; None for one alone.
        rank: whose part this is.

    Raises:
        ConfigError: the dtype or the layer range is not one.
        UnsupportedModel: the family cannot be run in stages, or not by several ranks.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if not 0 <= start_layer < end_layer <= spec.num_layers:
        raise ConfigError(
            f"layers [{start_layer}, {end_layer}) are not within the model's [0, {spec.num_layers})"
        )
    layers = range(start_layer, end_layer)
    model = build_on_meta(checked_config(spec), DTYPES[dtype], attention=attention)
    outline = find_outline(model)
    is_last = end_layer == spec.num_layers
    prune(model, outline, layers, is_first=start_layer == 0, is_last=is_last)
    shapes = probe(model, outline, layers) if probe is not None else None
    plan = None
    if shares is not None:
        plan = plan_tensor_parallel(model, shares=shares, rank=rank, name=spec.name)
        check_spread_norms(model, plan, name=spec.name)
    return StageDraft(
        spec=spec,
        model=model,
        outline=outline,
        start_layer=start_layer,
        end_layer=end_layer,
        dtype=DTYPES[dtype],
        kv_shapes=shapes,
        plan=plan,
    )


@contextmanager
def refusing_family_errors(spec: ModelSpec) -> Iterator[None]:
    """Errors of a family's code, which was not written for stages, say so.

    Raises:
        UnsupportedModel: naming the family and the error.
    """
    try:
        yield
    except (StagemeshError, torch.OutOfMemoryError):
        raise
    except FAMILY_ERRORS as error:
        raise UnsupportedModel(
            f"{spec.name}: the code of {spec.config['model_type']} does not run in stages: "
            f"{type(error).__name__}: {error}"
        ) from error
