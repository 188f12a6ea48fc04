"""The sample model on a real cluster against transformers' own generate in one process.

The reference is a LlamaForCausalLM in memory whose weights and sizes come from the GGUF file by
gguf-py alone: its reader, its dequantisation, and the q/k rows put back by numpy. It shares no code
with ours and is built in about two seconds, where transformers' own GGUF loader takes thirty.
"""

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import gguf
import httpx
import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from coordinator.text.chat_template import load_chat_template
from coordinator.text.tokenizer import load_tokenizer
from stagemesh.model_spec import load_model_spec
from stagemesh.models.weights import WeightReader
from tests.cluster.asking import until
from tests.support.cluster import Cluster, start_cluster
from tests.support.stage_chain import reference_tokens

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

SAMPLE = "smollm2-135m-instruct"
NUM_TOKENS = 16
LAYERS = {1: [30], 2: [15, 15], 3: [10, 10, 10], 4: [8, 8, 7, 7]}

PLAIN = [
    "Once upon a time there was",
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "1, 2, 3, 5, 8, 13,",
    "Dear Sir or Madam,\n\nI am writing to you because",
    "na\u00efve caf\u00e9 \u2014 \u65e5\u672c\u8a9e\u306e\u6587\u7ae0 and",
    "Water boils at 100 degrees and freezes at",
    " ".join(["The quick brown fox jumps over the lazy dog."] * 6),
    "In the beginning the Universe was created. " * 9,
    "A list of colours: red, green, blue, yellow, orange, purple, " * 13,
]
CHATS = [
    "Hi",
    "What is gravity?",
    "Write a haiku about the sea.",
    "Count from one to ten in words, please.",
    "Which is larger, 9.11 or 9.9? Explain in one sentence.",
    "Translate 'good morning' to Spanish, French and German.",
    "Give me three tips for a healthy breakfast. " * 3,
    "Summarise: " + "The river rose in the night and took the bridge with it. " * 6,
    "Continue this story: " + "There was a king who had three daughters. " * 10,
    "Fix the grammar: " + "he go to school every days and he like it much. " * 13,
]


@functools.cache
def prompts() -> list[list[int]]:
    """Token ids of ten plain and ten chat prompts."""
    spec = load_model_spec(SAMPLE)
    tokenizer, template = load_tokenizer(spec), load_chat_template(spec)
    assert template is not None
    chats = [
        template.render([{"role": "user", "content": text}], add_generation_prompt=True)
        for text in CHATS
    ]
    ids = [tokenizer.encode(text, add_special_tokens=True) for text in PLAIN]
    ids += [tokenizer.encode(text, add_special_tokens=False) for text in chats]
    return [list(prompt) for prompt in ids]


@pytest.fixture(scope="module")
def reference() -> LlamaForCausalLM:
    reader = gguf.GGUFReader(load_model_spec(SAMPLE).path)

    def value(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    config = LlamaConfig(
        vocab_size=reader.tensors[0].data.shape[0],
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=value("attention.head_count"),
        num_key_value_heads=value("attention.head_count_kv"),
        max_position_embeddings=value("context_length"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_theta=value("rope.freq_base"),
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    weights = {tensor.name: tensor for tensor in reader.tensors}
    assert "output.weight" not in weights
    state = {}
    for name, _ in model.named_parameters():
        tensor = weights[names.get_name(name, try_suffixes=(".weight",))]
        data = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if ".q_proj." in name:
            data = put_back(data, config.num_attention_heads)
        if ".k_proj." in name:
            data = put_back(data, config.num_key_value_heads)
        state[name] = torch.from_numpy(np.array(data, order="C"))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def put_back(data: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows from the neighbouring pairs of a GGUF file to the two halves of transformers."""
    pairs = data.reshape(num_heads, -1, 2, data.shape[-1])
    return pairs.swapaxes(1, 2).reshape(data.shape)


@pytest.fixture(scope="module")
def expected(reference: LlamaForCausalLM) -> list[list[int]]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        return [reference_tokens(reference, prompt, NUM_TOKENS) for prompt in prompts()]
    finally:
        torch.set_num_threads(before)


def sample_cluster(num_nodes: int, **settings: Any) -> Any:
    return start_cluster(
        SAMPLE,
        num_nodes=num_nodes,
        max_context_tokens=1024,
        concurrency=8,
        node_settings={"memory_bytes": 2 * 2**30},
        **settings,
    )


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with sample_cluster(2) as running:
        yield running


def test_the_prompts_are_of_many_lengths() -> None:
    lengths = [len(prompt) for prompt in prompts()]
    assert len(lengths) == 20
    assert min(lengths) <= 6
    assert max(lengths) >= 180
    assert len(set(lengths)) >= 15


def test_our_weights_are_those_of_gguf_py(reference: LlamaForCausalLM) -> None:
    spec = load_model_spec(SAMPLE)
    weights = WeightReader(spec)
    parameters = dict(reference.named_parameters())
    assert parameters.keys() == spec.tensors.keys()
    for name, info in spec.tensors.items():
        assert torch.equal(weights.read(info, torch.float32), parameters[name]), name


@pytest.mark.parametrize("num_stages", LAYERS)
async def test_stages_give_the_tokens_of_transformers(
    expected: list[list[int]], num_stages: int
) -> None:
    async with sample_cluster(num_stages) as running:
        assert running.deployment.plan is not None
        sizes = [stage.num_layers for stage in running.deployment.plan.stages]
        assert sizes == LAYERS[num_stages]
        at_once = await asyncio.gather(
            *(running.generate(prompt, NUM_TOKENS) for prompt in prompts())
        )
        assert at_once == expected
        for index in (0, 8, 19) if num_stages in (2, 4) else ():
            assert await running.generate(prompts()[index], NUM_TOKENS) == expected[index]
        await assert_all_freed(running)


# One and three stages of one rank are above. Nine heads in three groups: 2 + 1 on two ranks.
@pytest.mark.parametrize("degrees", [(2,), (3,), (2, 2), (2, 1)])
async def test_ranks_give_the_tokens_of_transformers(
    expected: list[list[int]], degrees: tuple[int, ...]
) -> None:
    chosen = (0, 8, 10, 19)
    async with sample_cluster(sum(degrees), tp=degrees) as running:
        plan = running.deployment.plan
        assert plan is not None
        assert tuple(stage.num_ranks for stage in plan.stages) == degrees
        heads = {stage.shares.query_heads for stage in plan.stages if stage.shares is not None}
        assert heads == ({(3, 3, 3)} if degrees == (3,) else {(6, 3)})
        at_once = await asyncio.gather(
            *(running.generate(prompts()[index], NUM_TOKENS) for index in chosen)
        )
        assert at_once == [expected[index] for index in chosen]
        await assert_all_freed(running)


async def assert_all_freed(running: Cluster) -> None:
    await until(lambda: running.num_sessions() == 0, seconds=2)
    assert running.kv_used_bytes() == 0


async def test_eight_chats_at_once_equal_their_solo_answers(cluster: Cluster) -> None:
    async with cluster.http() as client:
        solo = [await chat(client, text) for text in CHATS[:8]]
        at_once = await asyncio.gather(*(chat(client, text) for text in CHATS[:8]))
    assert at_once == solo
    assert len(set(solo)) == 8


async def test_a_streamed_answer_is_the_whole_answer(cluster: Cluster) -> None:
    async with cluster.http() as client:
        for text in (CHATS[2], PLAIN[5]):
            whole = await chat(client, text, max_tokens=32)
            pieces = [piece async for piece in chat_stream(client, text, max_tokens=32)]
            assert "".join(pieces) == whole
            assert len(pieces) > 10


async def test_fifty_requests_leave_no_memory_behind(cluster: Cluster) -> None:
    assert cluster.kv_used_bytes() == 0

    async def one(index: int) -> None:
        text = CHATS[index % 6]
        if index % 5:
            await cluster.generate(prompts()[10 + index % 6], 1 + index % 4)
        else:
            async with contextlib.aclosing(chat_stream(client, text, max_tokens=200)) as pieces:
                await anext(pieces)  # and goes away

    async with cluster.http() as client:
        for start in range(0, 50, 10):
            await asyncio.gather(*(one(index) for index in range(start, start + 10)))
    await assert_all_freed(cluster)


def body(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {
        "model": SAMPLE,
        "messages": messages,
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        **fields,
    }


async def chat(client: httpx.AsyncClient, text: str, **fields: Any) -> str:
    response = await client.post("/v1/chat/completions", json=body(text, **fields))
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


async def chat_stream(
    client: httpx.AsyncClient, text: str, **fields: Any
) -> AsyncGenerator[str, None]:
    fields |= {"stream": True}
    path = "/v1/chat/completions"
    async with client.stream("POST", path, json=body(text, **fields)) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if not line or line == "data: [DONE]":
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                if choice["delta"].get("content"):
                    yield choice["delta"]["content"]
