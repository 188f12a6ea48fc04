"""Token sequences through a real coordinator and real nodes, against transformers alone."""

import asyncio
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.cluster.asking import until
from tests.cluster.test_families import SUPPORTED
from tests.support.checkpoints import tiny_model as tiny_transformer
from tests.support.checkpoints import write_byte_tokenizer, write_tiny_checkpoint, write_tiny_gguf
from tests.support.cluster import start_cluster, tiny_model
from tests.support.stage_chain import StageChain, reference_tokens
from tests.text.builders import byte_vocabulary

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32]


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
async def test_stages_give_the_tokens_of_one_process(tmp_path: Path, num_stages: int) -> None:
    folder = tiny_model(tmp_path)
    async with start_cluster(folder, num_nodes=num_stages) as cluster:
        assert cluster.deployment.plan is not None
        assert cluster.deployment.plan.num_stages == num_stages
        tokens = await cluster.generate(PROMPT, 12)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert tokens == reference_tokens(model, PROMPT, 12)


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "granite", "llama"])
@pytest.mark.parametrize("max_step_tokens", [3, 512])
async def test_families_over_the_network(tmp_path: Path, family: str, max_step_tokens: int) -> None:
    config: dict[str, Any] = SUPPORTED[family]
    if family == "llama":
        config = {"tie_word_embeddings": True}
    folder = tiny_model(tmp_path, family, **config)
    model = tiny_transformer(family, vocab_size=260, **config)
    async with start_cluster(folder, num_nodes=3, max_step_tokens=max_step_tokens) as cluster:
        prompts = [PROMPT, PROMPT[:2], [*PROMPT, *PROMPT]]
        at_once = await asyncio.gather(*(cluster.generate(prompt, 12) for prompt in prompts))
    assert at_once == [reference_tokens(model, prompt, 12) for prompt in prompts]


async def test_a_gguf_file_over_the_network(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path, extra=_add_tokens)
    async with start_cluster(path, num_nodes=2) as cluster:
        tokens = await cluster.generate(PROMPT, 12)
    assert tokens == reference_tokens(tiny_transformer("llama"), PROMPT, 12)


def _add_tokens(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    tokens = [*byte_vocabulary()][:99]
    writer.add_token_list([*tokens, tokens[65] + tokens[66]])
    writer.add_token_types([gguf.TokenType.NORMAL] * 100)
    writer.add_token_merges([f"{tokens[65]} {tokens[66]}"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
async def test_activations_of_half_precision_travel_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    folder = tiny_model(tmp_path)
    expected, _ = StageChain(folder, dtype=dtype).generate(PROMPT, 12)
    async with start_cluster(folder, num_nodes=3, dtype=dtype) as cluster:
        assert await cluster.generate(PROMPT, 12) == expected


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


async def test_more_stages_than_layers_leave_nodes_unused(tmp_path: Path) -> None:
    folder = write_byte_tokenizer(
        write_tiny_checkpoint(tmp_path / "m", num_layers=2, vocab_size=260)
    )
    async with start_cluster(folder, num_nodes=3) as cluster:
        assert cluster.deployment.plan is not None
        assert cluster.deployment.plan.num_stages == 2
        assert len(cluster.deployment.plan.unused_node_ids) == 1
        tokens = await cluster.generate(PROMPT, 12)
    assert tokens == reference_tokens(
        tiny_transformer("llama", num_layers=2, vocab_size=260), PROMPT, 12
    )


async def test_a_family_that_is_refused_says_so_in_the_state_of_the_model(tmp_path: Path) -> None:
    folder = write_byte_tokenizer(write_tiny_checkpoint(tmp_path / "m", "ctrl", vocab_size=260))
    async with start_cluster(folder, num_nodes=2, wait=False) as cluster, cluster.http() as client:
        await until(lambda: cluster.deployment.phase == "failed")
        assert "ctrl: its forward changes the activation" in cluster.deployment.detail
        body = {"model": cluster.deployment.name, "prompt": "A", "max_tokens": 1}
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 503
        assert "ctrl" in response.json()["error"]["message"]
        assert cluster.kv_used_bytes() == cluster.num_sessions() == 0
