"""Log-probabilities: strict JSON, whole and in step with the text."""

import math
from collections.abc import Mapping
from typing import Any

import pytest

from coordinator.api.logprobs import IMPOSSIBLE_LOGPROB, finite_logprob
from tests.api.scripted_engine import alphabet, fixed, flat
from tests.api.support import CHAT, COMPLETIONS, END, joined, open_api, text_of


def two_letters(ids: tuple[int, ...], _prompt_length: int) -> Mapping[int, float]:
    """The next letter, nearly always; "z" else; all others are impossible."""
    return {ids[-1] + 1: 0.0, ord("z"): -30.0}


def chat_tokens(logprobs: dict[str, Any]) -> list[str]:
    return [entry["token"] for entry in logprobs["content"]]


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (-math.inf, IMPOSSIBLE_LOGPROB),
        (math.nan, IMPOSSIBLE_LOGPROB),
        (-1e30, IMPOSSIBLE_LOGPROB),
        (-2.5, -2.5),
        (0.0, 0.0),
    ],
)
def test_what_json_cannot_write_becomes_the_floor(value: float, written: float) -> None:
    assert finite_logprob(value) == written


async def test_impossible_tokens_in_chat() -> None:
    async with open_api(two_letters) as api:
        answer = await api.ask(
            CHAT,
            messages=[{"role": "user", "content": "C"}],
            max_tokens=2,
            temperature=0,
            logprobs=True,
            top_logprobs=5,
        )
        first = answer["choices"][0]["logprobs"]["content"][0]
        assert first["logprob"] == pytest.approx(0.0, abs=1e-6)
        tops = [entry["logprob"] for entry in first["top_logprobs"]]
        assert tops == [0.0, -30.0, -9999.0, -9999.0, -9999.0]
        assert bytes(first["bytes"]).decode() == first["token"] == "^"


@pytest.mark.parametrize("stream", [False, True])
async def test_impossible_tokens_in_completions_with_echo(stream: bool) -> None:
    # "q" cannot follow "C": the model's score of it is NaN.
    fields: dict[str, Any] = {
        "prompt": "BCq",
        "max_tokens": 2,
        "temperature": 0,
        "logprobs": 5,
        "echo": True,
    }
    async with open_api(two_letters) as api:
        if stream:
            chunks = await api.stream(COMPLETIONS, **fields)
            parts = [c["choices"][0]["logprobs"] for c in chunks[:-1]]
            logprobs = {key: [x for part in parts for x in part[key]] for key in parts[0]}
        else:
            logprobs = (await api.ask(COMPLETIONS, **fields))["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["B", "C", "q", "r", "s"]
        assert logprobs["token_logprobs"] == [None, 0.0, -9999.0, 0.0, 0.0]
        assert logprobs["text_offset"] == [0, 1, 2, 3, 4]
        assert logprobs["top_logprobs"][0] is None
        # The token itself is listed, even where it is not among the most likely ones.
        assert logprobs["top_logprobs"][2]["q"] == -9999.0
        assert logprobs["top_logprobs"][3]["r"] == 0.0


async def test_prompts_can_be_scored_without_generating() -> None:
    async with open_api(alphabet()) as api:
        answer = await api.ask(COMPLETIONS, prompt="ABC", max_tokens=0, echo=True, logprobs=0)
        (choice,) = answer["choices"]
        assert choice["logprobs"]["token_logprobs"] == [None, 0.0, 0.0]
        assert choice["logprobs"]["tokens"] == ["A", "B", "C"]
        assert choice["text"] == "ABC"
        assert answer["usage"]["completion_tokens"] == 0


async def test_chosen_scores_only() -> None:
    async with open_api(flat([*b"ab"])) as api:
        answer = await api.ask(COMPLETIONS, max_tokens=3, logprobs=0)
        logprobs = answer["choices"][0]["logprobs"]
        assert logprobs["token_logprobs"] == pytest.approx([-math.log(2)] * 3)
        assert logprobs["top_logprobs"] == [{}, {}, {}]
        chat = await api.ask(CHAT, max_tokens=3, logprobs=True)
        entries = chat["choices"][0]["logprobs"]["content"]
        assert [entry["top_logprobs"] for entry in entries] == [[], [], []]


async def test_parts_of_a_character_are_written_as_bytes() -> None:
    text = "A\U0001f336"
    async with open_api(fixed([*text.encode(), END])) as api:
        answer = await api.ask(CHAT, logprobs=True)
        entries = answer["choices"][0]["logprobs"]["content"]
        assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == text
        assert [entry["token"] for entry in entries] == [
            "A",
            "bytes:\\xf0",
            "bytes:\\x9f",
            "bytes:\\x8c",
            "bytes:\\xb6",
        ]
        completion = await api.ask(COMPLETIONS, logprobs=1)
        assert completion["choices"][0]["logprobs"]["text_offset"] == [0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("stop", "tokens"),
    [(None, "DEFGHI"), ("FG", "DE"), ("GHX", "DEFGHI"), ("D", ""), ("I", "DEFGH")],
)
async def test_scores_belong_to_the_text_that_is_sent(stop: str | None, tokens: str) -> None:
    fields: dict[str, Any] = {"logprobs": True, "stop": stop, "max_tokens": 6}
    async with open_api(fixed([*b"DEFGHIJKL"])) as api:
        choice = (await api.ask(CHAT, **fields))["choices"][0]
        chunks = await api.stream(CHAT, **fields)
        assert "".join(chat_tokens(choice["logprobs"])) == text_of(choice) == tokens
        assert joined(chunks) == tokens
        for chunk in chunks:
            (part,) = chunk["choices"]
            if part["delta"].get("content"):
                assert "".join(chat_tokens(part["logprobs"])) == part["delta"]["content"]
            else:
                assert part["logprobs"] is None


async def test_the_end_token_has_no_score() -> None:
    async with open_api(fixed([*b"ab", END])) as api:
        choice = (await api.ask(CHAT, logprobs=True))["choices"][0]
        assert chat_tokens(choice["logprobs"]) == ["a", "b"]
