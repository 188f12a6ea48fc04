"""Answers, streamed and whole: they are the same answer in OpenAI's two forms."""

from typing import Any

import pytest

from stagemesh.errors import CapacityExceeded, NotReady, PeerLost, StageFailed, StagemeshError
from tests.api.scripted_engine import fixed, flat
from tests.api.support import (
    CHAT,
    COMPLETIONS,
    END,
    Api,
    error_of,
    finish_reasons,
    joined,
    open_api,
    served_model,
    sse_events,
    strict_json,
    text_of,
)

BOTH = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
LETTERS = flat([*b"abcdefghijklmnopqrstuvwxyz"])


async def test_the_chunks_of_a_chat_are_exactly_openais() -> None:
    async with open_api(fixed([*b"ab", END])) as api:
        chunks = await api.stream(CHAT)
        heads = [{k: v for k, v in chunk.items() if k != "choices"} for chunk in chunks]
        assert heads[0] == {
            "id": heads[0]["id"],
            "object": "chat.completion.chunk",
            "created": heads[0]["created"],
            "model": "m",
        }
        assert heads[0]["id"].startswith("chatcmpl-")
        assert all(head == heads[0] for head in heads)
        rest = {"index": 0, "logprobs": None}
        assert [chunk["choices"] for chunk in chunks] == [
            [{**rest, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}],
            [{**rest, "delta": {"content": "a"}, "finish_reason": None}],
            [{**rest, "delta": {"content": "b"}, "finish_reason": None}],
            [{**rest, "delta": {}, "finish_reason": "stop"}],
        ]


async def test_the_chunks_of_a_completion_are_exactly_openais() -> None:
    async with open_api(fixed([*b"ab", END])) as api:
        chunks = await api.stream(COMPLETIONS)
        assert {chunk["object"] for chunk in chunks} == {"text_completion"}
        rest = {"index": 0, "logprobs": None}
        assert [chunk["choices"] for chunk in chunks] == [
            [{**rest, "text": "a", "finish_reason": None}],
            [{**rest, "text": "b", "finish_reason": None}],
            [{**rest, "text": "", "finish_reason": "stop"}],
        ]


async def test_whole_answers_have_openais_fields() -> None:
    async with open_api(fixed([*b"ab", END])) as api:
        chat = await api.ask(CHAT)
        assert set(chat) == {"id", "object", "created", "model", "choices", "usage"}
        assert chat["object"] == "chat.completion"
        assert chat["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "ab", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ]
        completion = await api.ask(COMPLETIONS)
        assert completion["object"] == "text_completion"
        assert completion["choices"] == [
            {"index": 0, "text": "ab", "logprobs": None, "finish_reason": "stop"}
        ]


@BOTH
async def test_usage_is_streamed_only_when_asked_for(path: str) -> None:
    async with open_api() as api:
        chunks = await api.stream(path, max_tokens=4, stream_options={"include_usage": True})
        *others, last = chunks
        usage = last["usage"]
        assert last["choices"] == []
        assert usage["completion_tokens"] == 4
        assert usage["total_tokens"] == usage["prompt_tokens"] + 4
        assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in others)
        assert usage == (await api.ask(path, max_tokens=4))["usage"]
        for options in (None, {}, {"include_usage": False}):
            plain = await api.stream(path, max_tokens=4, stream_options=options)
            assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in plain)


@BOTH
@pytest.mark.parametrize(
    ("max_tokens", "reason", "num_tokens", "text"),
    [
        (50, "stop", 6, "abcde"),
        (6, "stop", 6, "abcde"),
        (5, "length", 5, "abcde"),
        (3, "length", 3, "abc"),
    ],
)
async def test_the_finish_reason_says_why_and_comes_once(
    path: str, max_tokens: int, reason: str, num_tokens: int, text: str
) -> None:
    async with open_api(fixed([*b"abcde", END])) as api:
        whole = await api.ask(path, max_tokens=max_tokens)
        assert whole["choices"][0]["finish_reason"] == reason
        assert text_of(whole["choices"][0]) == text
        # The token that ends the sequence counts, and has no text.
        assert whole["usage"]["completion_tokens"] == num_tokens
        chunks = await api.stream(
            path, max_tokens=max_tokens, stream_options={"include_usage": True}
        )
        assert finish_reasons(chunks) == [reason]
        assert chunks[-2]["choices"][0]["finish_reason"] == reason
        assert joined(chunks) == text
        assert chunks[-1]["usage"] == whole["usage"]


@BOTH
async def test_choices_are_told_apart_in_a_stream(path: str) -> None:
    fields: dict[str, Any] = {"n": 3, "temperature": 1, "seed": 3, "max_tokens": 12}
    async with open_api(LETTERS) as api:
        whole = await api.ask(path, **fields)
        chunks = await api.stream(path, **fields)
        texts = [text_of(choice) for choice in whole["choices"]]
        assert len(set(texts)) == 3
        assert [joined(chunks, index=index) for index in range(3)] == texts
        assert [finish_reasons(chunks, index=index) for index in range(3)] == [["length"]] * 3
        # Choice i of seed s is what seed s + i gives alone.
        alone = await api.ask(path, **(fields | {"n": 1, "seed": 5}))
        assert text_of(alone["choices"][0]) == texts[2]


@BOTH
async def test_seeds_repeat_and_their_absence_does_not(path: str) -> None:
    async with open_api(LETTERS) as api:

        async def text(**fields: Any) -> str:
            answer = await api.ask(path, temperature=1, max_tokens=20, **fields)
            return text_of(answer["choices"][0])

        seeded = [await text(seed=42) for _ in range(3)]
        assert len(set(seeded)) == 1
        assert await text(seed=7) != seeded[0]
        assert await text() != await text()


async def test_a_row_of_a_batch_equals_its_own_request() -> None:
    fields: dict[str, Any] = {"temperature": 1, "seed": 11, "max_tokens": 10, "n": 2}
    async with open_api(LETTERS) as api:
        batch = await api.ask(COMPLETIONS, prompt=["AB", "XYZ"], **fields)
        rows = []
        for prompt in ("AB", "XYZ"):
            rows += (await api.ask(COMPLETIONS, prompt=prompt, **fields))["choices"]
        assert [c["text"] for c in batch["choices"]] == [c["text"] for c in rows]


@BOTH
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (NotReady("1 of 2 nodes is missing"), 503, "not_ready"),
        (CapacityExceeded("the queue is full"), 429, "capacity_exceeded"),
        (StageFailed("boom", node_id="b", stage=1), 500, "stage_failed"),
        (PeerLost("node b is gone", node_id="b"), 503, "peer_lost"),
    ],
)
async def test_a_failure_before_the_first_token_has_its_status(
    path: str, stream: bool, error: StagemeshError, status: int, code: str
) -> None:
    async with open_api(fail_with=error, fail_at=1) as api:
        refusal = await api.refused(path, status=status, stream=stream, max_tokens=3)
        assert refusal["code"] == code
        assert str(error) in refusal["message"]
        assert api.engine.num_active == 0
        await api.ask(path, max_tokens=3)


async def test_a_model_that_is_not_ready_is_503() -> None:
    async with open_api(served=[served_model(is_ready=False)]) as api:
        assert "1 of 2 nodes" in (await api.refused(CHAT, status=503))["message"]


async def failing_stream(api: Api, path: str, **fields: Any) -> list[str]:
    response = await api.post(path, stream=True, max_tokens=50, **fields)
    assert response.status_code == 200
    return sse_events(response.text)


@BOTH
async def test_a_failure_on_the_way_is_one_error_event(path: str) -> None:
    error = StageFailed("boom", node_id="b", stage=1, operation="forward")
    async with open_api(fixed([*b"abcdefghijklmnop"]), fail_with=error, fail_at=10) as api:
        events = await failing_stream(api, path, stream_options={"include_usage": True})
        *chunks, last = [strict_json(event) for event in events]
        assert set(last) == {"error"}
        assert last["error"]["code"] == "stage_failed"
        assert "boom" in last["error"]["message"]
        # All that came before the failure was delivered, and nothing says that it is whole.
        assert joined(chunks) == "abcdefghi"
        assert finish_reasons(chunks) == []
        assert api.engine.num_active == 0
        assert finish_reasons(await api.stream(path, max_tokens=2)) == ["length"]


@BOTH
async def test_a_failed_choice_ends_the_others(path: str) -> None:
    error = StageFailed("boom", node_id="b", stage=1)
    async with open_api(LETTERS, fail_with=error, fail_at=3) as api:
        events = await failing_stream(api, path, n=4)
        assert [event for event in events if "error" in strict_json(event)] == events[-1:]
        assert api.engine.num_active == 0
        assert api.engine.num_drawn < 40


@BOTH
async def test_a_whole_answer_that_fails_on_the_way_is_an_error(path: str) -> None:
    error = StageFailed("boom", node_id="b", stage=1)
    async with open_api(fail_with=error, fail_at=10) as api:
        response = await api.post(path, max_tokens=50)
        assert error_of(response, status=500)["code"] == "stage_failed"
