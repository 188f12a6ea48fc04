"""A small stage, alone or shared, to measure what steps take in the engine that serves."""

from collections.abc import Mapping

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from stagemesh.inference import attention
from stagemesh.inference.stage_engine import StageEngine
from stagemesh.models.buffers import materialize_buffers
from stagemesh.models.builder import StageModel
from stagemesh.models.packed_linear import can_pack, pack_linears
from stagemesh.models.tensor_cut import AnyCut, TensorCut
from stagemesh.models.tensor_group import TensorGroup
from stagemesh.models.tensor_parallel import apply_tensor_plan
from stagemesh.models.tp_plan import plan_tensor_parallel
from stagemesh.placement.tensor_shares import TensorShares
from stagemesh.steps import SamplingParams, Segment, Step

_KV_LIMIT_BYTES = 2**26
_VOCAB = 64
# An even number of heads at every width that is measured.
_MOST_HEAD_DIM = 48
_HEADS_PER_KV_HEAD = 2
_MLP_PARTS, _HIDDEN_PARTS = 8, 3
"""The MLP is 8/3 as wide as the model, as in Llama."""
_WEIGHT = 0.01
_DECODED, _PROMPTED = 1, 2


class TrialStage:
    """Runs steps of one session through the same engine that serves.

    Args:
        num_layers: layers of the model.
        device: where to run.
        hidden_size: width of the model, a multiple of 48; at 48 its arithmetic is negligible.
        dtype: run dtype.
        tensor_group: ranks of `trial_shares` that share the stage, all of which make it; None for
            one alone.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        device: torch.device,
        hidden_size: int = 48,
        dtype: torch.dtype = torch.float32,
        tensor_group: TensorGroup | None = None,
    ) -> None:
        attention.register()
        self.layer_parameters = matrix_parameters(hidden_size)
        self.num_layers = num_layers
        self._engine = StageEngine(
            _stage_model(
                num_layers,
                device=device,
                hidden_size=hidden_size,
                dtype=dtype,
                tensor_group=tensor_group,
            ),
            kv_limit_bytes=_KV_LIMIT_BYTES,
        )
        self._position = 0

    def decode(self) -> None:
        """One more token of a sequence."""
        self._run(_DECODED, num_tokens=1, start_position=self._position)
        self._position += 1

    def prefill(self, num_tokens: int) -> None:
        """A prompt of so many tokens."""
        self._run(_PROMPTED, num_tokens=num_tokens, start_position=0, release=(_PROMPTED,))

    def _run(
        self,
        session_id: int,
        *,
        num_tokens: int,
        start_position: int,
        release: tuple[int, ...] = (),
    ) -> None:
        segment = Segment(
            session_id=session_id,
            start_position=start_position,
            num_tokens=num_tokens,
            sampling=SamplingParams(),
        )
        step = Step(
            step_id=0,
            segments=(segment,),
            token_ids=(1,) * num_tokens,
            release_session_ids=release,
        )
        self._engine.run(step, None)


def matrix_parameters(hidden_size: int) -> int:
    """Weights of a layer's matrices."""
    kv_size = hidden_size // _HEADS_PER_KV_HEAD
    mlp_size = hidden_size * _MLP_PARTS // _HIDDEN_PARTS
    return hidden_size * (2 * hidden_size + 2 * kv_size + 3 * mlp_size)


def trial_shares(hidden_size: int, *, num_ranks: int) -> TensorShares:
    """What each of so many ranks has of a trial stage: as even as can be."""
    num_heads = hidden_size // _head_dim(hidden_size)
    return TensorShares.divide(
        num_ranks=num_ranks,
        num_heads=num_heads,
        num_kv_heads=num_heads // _HEADS_PER_KV_HEAD,
        mlp_columns=_mlp_size(hidden_size),
        vocab_size=_VOCAB,
    )


def _head_dim(hidden_size: int) -> int:
    return min(_MOST_HEAD_DIM, hidden_size // 4)


def _mlp_size(hidden_size: int) -> int:
    return hidden_size * _MLP_PARTS // _HIDDEN_PARTS


def _stage_model(
    num_layers: int,
    *,
    device: torch.device,
    hidden_size: int,
    dtype: torch.dtype,
    tensor_group: TensorGroup | None,
) -> StageModel:
    head_dim = _head_dim(hidden_size)
    num_heads = hidden_size // head_dim
    num_kv_heads = num_heads // _HEADS_PER_KV_HEAD
    config = AutoConfig.for_model(
        "llama",
        num_hidden_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=_mlp_size(hidden_size),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        vocab_size=_VOCAB,
        tie_word_embeddings=False,
        use_cache=False,
    )
    config._attn_implementation = attention.ATTENTION_NAME
    with torch.device("meta"):
        # In torch's default dtype: for any other, transformers changes the process's default.
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.get_default_dtype()
        )
    plan = None
    if tensor_group is not None:
        shares, rank = tensor_group.shares, tensor_group.rank
        plan = plan_tensor_parallel(model, shares=shares, rank=rank, name="a trial stage")
    _fill(model, device=device, dtype=dtype, cuts={} if plan is None else plan.cuts)
    materialize_buffers(model, device=device)
    model.train(mode=False).requires_grad_(requires_grad=False)
    if plan is not None and tensor_group is not None:
        apply_tensor_plan(model, plan, group=tensor_group)
    if can_pack(device):
        pack_linears(model)
    return StageModel(
        model=model,
        device=device,
        start_layer=0,
        end_layer=num_layers,
        is_first=True,
        is_last=True,
        dtype=dtype,
        num_kv_heads=num_kv_heads if tensor_group is None else tensor_group.num_kv_heads,
        head_dim=head_dim,
        weight_bytes=0,
        read_bytes=0,
        tensor_group=tensor_group,
    )


def _fill(
    model: nn.Module, *, device: torch.device, dtype: torch.dtype, cuts: Mapping[str, AnyCut]
) -> None:
    """Write to all weights, or they would all be read from one page of zeros."""
    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            shape = _part(parameter.shape, cuts.get(f"{prefix}.{name}"))
            values = torch.full(shape, _WEIGHT, dtype=dtype, device=device)
            module.register_parameter(name, nn.Parameter(values, requires_grad=False))


def _part(shape: torch.Size, cut: AnyCut | None) -> torch.Size:
    """Of a parameter, what a rank has."""
    if cut is None:
        return shape
    assert isinstance(cut, TensorCut), "a Llama's are cut by rows and columns"
    rows, *columns = shape
    if cut.rows is not None:
        rows = sum(end - start for start, end in cut.rows)
    if cut.columns is not None:
        columns = [cut.columns[1] - cut.columns[0]]
    return torch.Size((rows, *columns))
