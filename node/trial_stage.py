"""A stage of a tiny random model, to measure what steps take whatever the model's size."""

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from stagemesh.inference import attention
from stagemesh.inference.stage_engine import StageEngine
from stagemesh.models.builder import StageModel
from stagemesh.models.packed_linear import can_pack, pack_linears
from stagemesh.steps import SamplingParams, Segment, Step

_KV_LIMIT_BYTES = 2**26
_HIDDEN, _HEADS, _KV_HEADS, _VOCAB = 64, 4, 2, 256


class TrialStage:
    """Decodes one token per call, through the same engine that serves.

    Args:
        num_layers: layers of the model, whose arithmetic is negligible.
        device: where to run.
    """

    def __init__(self, num_layers: int, *, device: torch.device) -> None:
        attention.register()
        self._engine = StageEngine(
            _stage_model(num_layers, device=device), kv_limit_bytes=_KV_LIMIT_BYTES
        )
        self._position = 0

    def step(self) -> None:
        """One decode step of one session."""
        segment = Segment(
            session_id=1,
            start_position=self._position,
            num_tokens=1,
            sampling=SamplingParams(),
        )
        self._position += 1
        self._engine.run(Step(step_id=0, segments=(segment,), token_ids=(1,)), None)


def _stage_model(num_layers: int, *, device: torch.device) -> StageModel:
    config = AutoConfig.for_model(
        "llama",
        num_hidden_layers=num_layers,
        hidden_size=_HIDDEN,
        intermediate_size=2 * _HIDDEN,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KV_HEADS,
        vocab_size=_VOCAB,
        tie_word_embeddings=False,
        use_cache=False,
    )
    config._attn_implementation = attention.ATTENTION_NAME
    # In torch's default dtype: for any other, transformers changes the whole process's default.
    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=torch.get_default_dtype()
    )
    nn.Module.to(model, device=device, dtype=torch.float32)
    model.train(mode=False).requires_grad_(requires_grad=False)
    if can_pack(device):
        pack_linears(model)
    return StageModel(
        model=model,
        device=device,
        start_layer=0,
        end_layer=num_layers,
        is_first=True,
        is_last=True,
        dtype=torch.float32,
        num_kv_heads=_KV_HEADS,
        head_dim=_HIDDEN // _HEADS,
        weight_bytes=0,
        read_bytes=0,
    )
