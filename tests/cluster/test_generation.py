"""Token sequences through a real coordinator and real nodes, against transformers in one process."""

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.cluster import start_cluster, tiny_model


def reference_tokens(folder: Path, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of transformers' own generate on the same files."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs = torch.tensor([prompt])
    output = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
async def test_stages_give_the_tokens_of_one_process(tmp_path: Path, num_stages: int) -> None:
    folder = tiny_model(tmp_path)
    prompt = [3, 14, 15, 92, 65]
    async with start_cluster(folder, num_nodes=num_stages) as cluster:
        assert cluster.deployment.plan is not None
        assert cluster.deployment.plan.num_stages == num_stages
        tokens = await cluster.generate(prompt, 12)
    assert tokens == reference_tokens(folder, prompt, 12)


async def test_eight_at_once_equal_their_solo_runs(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(0, 100, (length,), generator=generator).tolist() for length in range(3, 27, 3)
    ]
    async with start_cluster(folder, num_nodes=2) as cluster:
        solo = [await cluster.generate(prompt, 12) for prompt in prompts]
        at_once = await asyncio.gather(*(cluster.generate(prompt, 12) for prompt in prompts))
    assert at_once == solo
    assert len({tuple(tokens) for tokens in solo}) == len(solo)
