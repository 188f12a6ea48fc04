"""A model of transformers: keyword arguments, results that are no tensors, and checkpointing."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stagemesh.comm.process_group import ProcessGroup
from stagemesh.parallel.fsdp.fsdp import Fsdp
from stagemesh.parallel.fsdp.full_state import full_state_dict
from tests.parallel.fsdp.training import config, distance
from tests.support.ranks import run_ranks

CONFIG = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
    use_cache=False,
)
TOKENS = torch.arange(24).reshape(4, 6) % 32


def steps(model: Any, tokens: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


# It has another name in some versions of transformers, and this one in all.
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_llama(is_checkpointed: bool) -> None:
    torch.manual_seed(0)
    alone = LlamaForCausalLM(CONFIG)
    start = {name: value.clone() for name, value in alone.state_dict().items()}
    steps(alone, TOKENS)

    def on_rank(group: ProcessGroup) -> dict[str, torch.Tensor]:
        module = LlamaForCausalLM(CONFIG)
        module.load_state_dict(start)
        if is_checkpointed:
            module.gradient_checkpointing_enable()
        model = Fsdp(module, process_group=group, config=config())
        assert model.unit_names == ["", *(f"model.layers.{index}" for index in range(3))]
        steps(model.train(), TOKENS.chunk(group.size)[group.rank])
        return full_state_dict(model)

    for state in run_ranks(2, on_rank):
        assert distance(state, alone.state_dict()) < 1e-5
        assert distance(state, start) > 1e-3
