"""Requests to a served chain model that writes BABABA... for as long as it is asked to."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import httpx

from tests.support.checkpoints import write_chain_model

CONTEXT_TOKENS = 4096


def endless_model(folder: Path, **settings: Any) -> Path:
    """A model called "model" that answers "A" with "BABABA...", whatever the placement."""
    return write_chain_model(
        folder / "model",
        successors={ord("A"): ord("B"), ord("B"): ord("A")},
        max_position_embeddings=CONTEXT_TOKENS,
        **settings,
    )


def expected_text(num_tokens: int) -> str:
    return ("BA" * num_tokens)[:num_tokens]


async def ask(client: httpx.AsyncClient, num_tokens: int = 8, **fields: Any) -> httpx.Response:
    body = {"model": "model", "prompt": "A", "max_tokens": num_tokens, "temperature": 0, **fields}
    return await client.post("/v1/completions", json=body)


async def assert_answers(client: httpx.AsyncClient, num_tokens: int = 8) -> None:
    response = await ask(client, num_tokens)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["text"] == expected_text(num_tokens)


async def stream(client: httpx.AsyncClient, num_tokens: int) -> AsyncGenerator[str | dict, None]:
    """Yield texts as they come; an error event is yielded as its object, and is the last."""
    body = {
        "model": "model",
        "prompt": "A",
        "max_tokens": num_tokens,
        "temperature": 0,
        "stream": True,
    }
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            yield json.loads(await response.aread())["error"]
            return
        async for line in response.aiter_lines():
            if line in ("", "data: [DONE]"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                yield event["error"]
            elif event["choices"] and event["choices"][0]["text"]:
                yield event["choices"][0]["text"]


async def stream_to_end(client: httpx.AsyncClient, num_tokens: int) -> tuple[str, dict | None]:
    """The text of a whole stream and the error that ended it, if one did."""
    text, error = "", None
    async for event in stream(client, num_tokens):
        assert error is None, "an error is the last event"
        if isinstance(event, dict):
            error = event
        else:
            text += event
    return text, error


async def until(condition: Callable[[], Any], *, seconds: float = 10.0) -> float:
    """Wait for a condition; returns the seconds it took, and fails when it takes too long."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, f"not true within {seconds} s"
        await asyncio.sleep(0.02)
    return time.monotonic() - started


async def until_health(client: httpx.AsyncClient, status: int, *, seconds: float = 10.0) -> float:
    """Poll /health until it answers `status`; returns the seconds it took."""
    started = time.monotonic()
    while (await client.get("/health")).status_code != status:
        assert time.monotonic() - started < seconds, f"/health not {status} within {seconds} s"
        await asyncio.sleep(0.05)
    return time.monotonic() - started
