"""The official openai client against a real cluster."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletionMessageParam

from tests.cluster.asking import endless_model, expected_text
from tests.cluster.test_api import fail_once_at, walk
from tests.support.checkpoints import write_chain_model
from tests.support.cluster import Cluster, start_cluster

HI: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
]


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    # The template ends with a line break, from which the answer begins.
    successors = walk(ord("\n"), *b"hey you") | {ord("C"): ord("h")}
    folder = write_chain_model(tmp_path / "m", successors=successors, max_position_embeddings=256)
    async with start_cluster(folder, name="greeter") as running:
        yield running


@pytest_asyncio.fixture
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with sdk(cluster) as client:
        yield client


def sdk(cluster: Cluster) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{cluster.api_url}/v1", api_key="unused", max_retries=0, timeout=20
    )


# "y" occurs twice in the walk, and its last successor is "o".
ANSWER = "heyou"


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["greeter"]
    assert (await client.models.retrieve("greeter")).id == "greeter"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="greeter", messages=HI, temperature=0, logprobs=True, top_logprobs=2
    )
    (choice,) = answer.choices
    assert choice.message.content == ANSWER
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(ANSWER) + 1
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [entry.token for entry in choice.logprobs.content] == list(ANSWER)
    assert choice.logprobs.content[0].top_logprobs[0].token == "h"


async def test_chat_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="greeter",
        messages=HI,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert text == ANSWER
    assert [reason for reason in reasons if reason] == ["stop"]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(ANSWER) + 1
    assert not chunks[-1].choices


async def test_the_streaming_helper(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(
        model="greeter", messages=HI, temperature=0, max_completion_tokens=9
    ) as stream:
        answer = await stream.get_final_completion()
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"


async def test_completions(client: openai.AsyncOpenAI) -> None:
    fields: dict[str, Any] = {"model": "greeter", "prompt": "C", "temperature": 0}
    answer = await client.completions.create(**fields, max_tokens=9, echo=True, logprobs=1)
    assert answer.choices[0].text == "C" + ANSWER
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["C", *ANSWER]
    stream = await client.completions.create(**fields, max_tokens=3, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == ANSWER[:3]
    two = await client.completions.create(**(fields | {"prompt": ["C", "\n"]}), n=2, stop="y")
    assert [choice.text for choice in two.choices] == ["he"] * 4


async def test_wrong_requests_raise_the_clients_own_errors(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt-9' does not exist"):
        await client.chat.completions.create(model="gpt-9", messages=HI)
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        await client.chat.completions.create(model="greeter", messages=HI, temperature=-3)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="256 tokens") as long:
        await client.completions.create(model="greeter", prompt="C" * 300)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="json_object"):
        await client.chat.completions.create(
            model="greeter", messages=HI, response_format={"type": "json_object"}
        )
    answer = await client.chat.completions.create(model="greeter", messages=HI, temperature=0)
    assert answer.choices[0].message.content == ANSWER


async def test_a_failure_in_a_stream_raises_and_the_next_request_works(tmp_path: Path) -> None:
    async with start_cluster(endless_model(tmp_path)) as cluster, sdk(cluster) as client:
        fail_once_at(cluster, stage=1, num_calls=11)
        texts: list[str] = []

        async def read() -> None:
            stream = await client.completions.create(
                model="model", prompt="A", temperature=0, max_tokens=50, stream=True
            )
            async for chunk in stream:
                texts.append(chunk.choices[0].text)  # noqa: PERF401 -- kept when it raises

        with pytest.raises(openai.APIError, match="the injected failure"):
            await read()
        assert "".join(texts) == expected_text(10)
        answer = await client.completions.create(
            model="model", prompt="A", temperature=0, max_tokens=12
        )
        assert answer.choices[0].text == expected_text(12)


async def test_without_nodes_the_client_is_told_to_come_back(tmp_path: Path) -> None:
    folder = endless_model(tmp_path)
    async with start_cluster(folder, num_nodes=0) as cluster, sdk(cluster) as client:
        with pytest.raises(openai.InternalServerError, match="not ready") as error:
            await client.completions.create(model="model", prompt="A")
        assert error.value.status_code == 503
