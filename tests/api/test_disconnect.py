"""A client that goes away ends its request's work, over real connections."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from coordinator.api.limits import ApiLimits
from tests.api.scripted_engine import flat
from tests.api.support import (
    CHAT,
    COMPLETIONS,
    Api,
    error_of,
    finish_reasons,
    joined,
    listening,
    open_api,
    sse_events,
    strict_json,
    until,
)

LETTERS = flat([*b"abcdefghijklmnopqrstuvwxyz"])
BOTH = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])


def body(path: str, **fields: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"model": "m", "seed": 1, "max_tokens": 2000}
    if path == CHAT:
        base["messages"] = [{"role": "user", "content": "Hi"}]
    else:
        base["prompt"] = "C"
    return base | fields


async def assert_work_ends(api: Api) -> None:
    """No request is active within a second, and from then on no token is drawn."""
    await until(lambda: api.engine.num_active == 0)
    drawn = api.engine.num_drawn
    await asyncio.sleep(0.05)
    assert api.engine.num_drawn == drawn
    assert drawn < 1000


@BOTH
@pytest.mark.parametrize("n", [1, 4])
async def test_a_stream_that_is_closed_ends_and_the_next_request_is_right(
    path: str, n: int
) -> None:
    async with (
        open_api(LETTERS, delay_seconds=0.002) as api,
        listening(api.app) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        stream = client.stream("POST", path, json=body(path, stream=True, n=n))
        async with stream as response:
            lines = response.aiter_lines()
            for _ in range(3):
                await anext(lines)
            assert api.engine.num_active == n
        second = await client.post(path, json=body(path, max_tokens=8))
        assert second.status_code == 200
        await assert_work_ends(api)
        alone = await client.post(path, json=body(path, max_tokens=8))
        assert second.json()["choices"] == alone.json()["choices"]


@BOTH
async def test_a_whole_answer_that_nobody_waits_for_ends(path: str) -> None:
    async with open_api(LETTERS, delay_seconds=0.002) as api, listening(api.app) as url:
        async with httpx.AsyncClient(base_url=url) as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.post(path, json=body(path, n=2), timeout=0.2)
        await assert_work_ends(api)


async def test_a_client_that_leaves_before_the_first_token_ends_its_stream() -> None:
    async with open_api(LETTERS, delay_seconds=30) as api, listening(api.app) as url:
        async with httpx.AsyncClient(base_url=url) as client:
            with pytest.raises(httpx.ReadTimeout):
                await client.post(CHAT, json=body(CHAT, stream=True), timeout=0.2)
        await assert_work_ends(api)


async def test_a_client_that_stays_gets_everything() -> None:
    """The negative control: nothing but leaving ends the work early."""
    async with open_api(LETTERS) as api, listening(api.app) as url:
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            response = await client.post(COMPLETIONS, json=body(COMPLETIONS, stream=True))
        events = sse_events(response.text)
        assert events[-1] == "[DONE]"
        chunks = [strict_json(event) for event in events[:-1]]
        assert len(joined(chunks)) == 2000
        assert finish_reasons(chunks) == ["length"]


async def test_a_client_that_reads_nothing_is_given_up() -> None:
    limits = ApiLimits(send_timeout_seconds=0.2)
    fields = body(CHAT, stream=True, max_tokens=4000, n=32)
    async with open_api(LETTERS, limits=limits) as api, listening(api.app) as url:
        host, port = url.removeprefix("http://").split(":")
        # The smallest receive buffer, so that the server feels it soon.
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        content = json.dumps(fields).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        await writer.drain()
        await until(lambda: api.engine.num_active == 32, timeout_seconds=5)
        await until(lambda: api.engine.num_active == 0, timeout_seconds=30)
        assert api.engine.num_drawn < 32 * 4000
        assert not reader.at_eof()
        writer.close()


async def test_a_body_that_does_not_arrive_is_given_up() -> None:
    limits = ApiLimits(body_timeout_seconds=0.1)

    async def slow_body() -> Any:
        yield b'{"model":'
        await asyncio.sleep(1)
        yield b'"m"}'

    async with open_api(limits=limits) as api:
        response = await api.client.post(CHAT, content=slow_body())
        assert error_of(response, status=408)["code"] == "request_timeout"
