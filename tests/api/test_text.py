"""Text in streams: whole characters, and no part of a stop string."""

from typing import Any

import pytest

from tests.api.scripted_engine import alphabet, fixed
from tests.api.support import CHAT, COMPLETIONS, END, finish_reasons, joined, open_api, text_of

BOTH = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
MIXED = "A\U0001f336B\u010fC"


@BOTH
async def test_characters_of_several_tokens_arrive_whole(path: str) -> None:
    async with open_api(fixed([*MIXED.encode(), END])) as api:
        whole = await api.ask(path, max_tokens=50)
        chunks = await api.stream(path, max_tokens=50)
        assert text_of(whole["choices"][0]) == joined(chunks) == MIXED
        assert "\ufffd" not in joined(chunks)


@BOTH
async def test_a_character_that_is_cut_by_the_limit_is_the_same_in_both_modes(path: str) -> None:
    async with open_api(fixed([*MIXED.encode(), END])) as api:
        whole = await api.ask(path, max_tokens=3)
        chunks = await api.stream(path, max_tokens=3)
        assert text_of(whole["choices"][0]) == joined(chunks)
        assert joined(chunks) in ("A", "A\ufffd")
        assert whole["choices"][0]["finish_reason"] == "length"
        assert whole["usage"]["completion_tokens"] == 3


@BOTH
@pytest.mark.parametrize(
    ("stop", "text", "reason", "num_tokens"),
    [
        (["DEFGHIJ"], "", "stop", 7),
        (["FG"], "DE", "stop", 4),
        (["FX"], "DEFGHIJK", "length", 8),
        (["KL"], "DEFGHIJK", "length", 8),
        (["Z", "GH", "HI"], "DEF", "stop", 5),
    ],
)
async def test_stop_strings_over_several_tokens(
    path: str, stop: list[str], text: str, reason: str, num_tokens: int
) -> None:
    async with open_api(fixed([*b"DEFGHIJKLMNOP"])) as api:
        whole = await api.ask(path, stop=stop, max_tokens=8)
        chunks = await api.stream(
            path, stop=stop, max_tokens=8, stream_options={"include_usage": True}
        )
        assert text_of(whole["choices"][0]) == joined(chunks) == text
        assert [whole["choices"][0]["finish_reason"]] == finish_reasons(chunks) == [reason]
        assert whole["usage"] == chunks[-1]["usage"]
        assert whole["usage"]["completion_tokens"] == num_tokens


async def test_a_stop_string_ends_the_work() -> None:
    async with open_api(alphabet()) as api:
        await api.ask(COMPLETIONS, stop="FG", max_tokens=2000)
        assert api.engine.num_active == 0
        assert api.engine.num_drawn < 10


async def test_a_stop_string_is_not_looked_for_in_the_echoed_prompt() -> None:
    async with open_api(alphabet()) as api:
        answer = await api.ask(COMPLETIONS, prompt="ABC", echo=True, stop="B", max_tokens=2)
        assert answer["choices"][0]["text"] == "ABCDE"


@pytest.mark.parametrize(
    ("prompt", "text"), [("ABC", "ABCDE"), ([65, 66, 67], "ABCDE"), ([256, 67], "CDE")]
)
async def test_echo_puts_the_prompt_first(prompt: Any, text: str) -> None:
    async with open_api(alphabet()) as api:
        fields: dict[str, Any] = {"prompt": prompt, "echo": True, "max_tokens": 2, "n": 2}
        whole = await api.ask(COMPLETIONS, **fields)
        chunks = await api.stream(COMPLETIONS, **fields)
        assert [c["text"] for c in whole["choices"]] == [text, text]
        assert [joined(chunks, index=index) for index in range(2)] == [text, text]
        whole = await api.ask(COMPLETIONS, **(fields | {"echo": False}))
        assert whole["choices"][0]["text"] == "DE"


async def test_echo_without_tokens_asks_the_model_for_nothing() -> None:
    async with open_api(alphabet()) as api:
        answer = await api.ask(COMPLETIONS, prompt="ABC", echo=True, max_tokens=0)
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("ABC", "length")
        assert answer["usage"]["completion_tokens"] == 0
        assert api.engine.requests == []


async def test_a_choice_that_stopped_draws_no_more_while_others_go_on() -> None:
    async with open_api(alphabet()) as api:
        answer = await api.ask(COMPLETIONS, prompt=["C", "H"], stop="FG", max_tokens=50)
        reasons = [choice["finish_reason"] for choice in answer["choices"]]
        assert reasons == ["stop", "length"]
        assert answer["usage"]["completion_tokens"] == 4 + 50
        assert api.engine.num_drawn <= 4 + 50 + 1
