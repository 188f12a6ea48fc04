"""The official `openai` client against a real server."""

from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam

from stagemesh.errors import CapacityExceeded, StageFailed
from tests.api.scripted_engine import fixed
from tests.api.support import END, Api, listening, open_api

HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]


@pytest_asyncio.fixture
async def api() -> AsyncIterator[Api]:
    async with open_api(fixed([*b"hello", END]), api_keys=frozenset({"secret"})) as api:
        yield api


@pytest_asyncio.fixture
async def client(api: Api) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        listening(api.app) as url,
        openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="secret", max_retries=0, timeout=10
        ) as client,
    ):
        yield client


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["m"]
    assert (await client.models.retrieve("m")).id == "m"


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="m", messages=HI, n=2, logprobs=True, top_logprobs=2
    )
    assert [choice.message.content for choice in answer.choices] == ["hello", "hello"]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    logprobs = answer.choices[1].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == [*"hello"]


async def test_chat_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="m", messages=HI, stream=True, stream_options={"include_usage": True}
    )
    chunks: list[ChatCompletionChunk] = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "hello"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 6


async def test_completions(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="m", prompt=["A", "B"], max_tokens=3, echo=True, logprobs=1
    )
    assert [choice.text for choice in answer.choices] == ["Ahel", "Bhel"]
    stream = await client.completions.create(model="m", prompt="A", max_tokens=3, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "hel"


async def test_wrong_requests_raise_the_clients_own_errors(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt-9' does not exist") as not_found:
        await client.chat.completions.create(model="gpt-9", messages=HI)
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="temperature") as bad_request:
        await client.chat.completions.create(model="m", messages=HI, temperature=-3)
    assert bad_request.value.param == "temperature"
    stranger = client.with_options(api_key="wrong")
    with pytest.raises(openai.AuthenticationError, match="Incorrect API key"):
        await stranger.chat.completions.create(model="m", messages=HI)


async def test_a_full_queue_is_a_rate_limit(client: openai.AsyncOpenAI, api: Api) -> None:
    api.engine.fail_with, api.engine.fail_at = CapacityExceeded("the queue is full"), 1
    with pytest.raises(openai.RateLimitError, match="the queue is full"):
        await client.chat.completions.create(model="m", messages=HI, stream=True)


async def test_a_failure_in_a_stream_raises_and_the_next_request_works(
    client: openai.AsyncOpenAI, api: Api
) -> None:
    api.engine.fail_with = StageFailed("stage 1 on node b failed: boom", node_id="b", stage=1)
    api.engine.fail_at = 4
    chunks: list[ChatCompletionChunk] = []

    async def read_all() -> None:
        stream = await client.chat.completions.create(model="m", messages=HI, stream=True)
        async for chunk in stream:
            chunks.append(chunk)  # noqa: PERF401 -- what came before the failure is kept

    with pytest.raises(openai.APIError, match="boom"):
        await read_all()
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hel"
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks)
    answer = await client.chat.completions.create(model="m", messages=HI)
    assert answer.choices[0].message.content == "hello"
