"""Where an answer ends, and which prompts fit."""

from typing import Any

import pytest

from tests.api.scripted_engine import alphabet, fixed
from tests.api.support import CHAT, COMPLETIONS, END, open_api, served_model, text_of


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("F", "DE"),
        (["F"], "DE"),
        (["F", ""], "DE"),
        (["Z", "E"], "D"),
        ("", "DEFGH"),
        ([], "DEFGH"),
        (None, "DEFGH"),
        ([""], "DEFGH"),
    ],
)
async def test_stop_takes_a_string_a_list_or_nothing(path: str, stop: Any, text: str) -> None:
    async with open_api(fixed([*b"DEFGHIJ"])) as api:
        answer = await api.ask(path, stop=stop, max_tokens=5)
        assert text_of(answer["choices"][0]) == text


@pytest.mark.parametrize("stop", [[None], 7, list("abcde"), {"a": 1}, ["x" * 2000]])
async def test_a_wrong_stop_is_refused(stop: Any) -> None:
    async with open_api() as api:
        assert (await api.refused(COMPLETIONS, stop=stop))["param"] == "stop"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"max_completion_tokens": 5}, 5),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 5, "max_tokens": 9}, 5),
        ({"max_completion_tokens": 9, "max_tokens": 5}, 9),
    ],
)
async def test_the_newer_token_limit_wins(path: str, fields: dict[str, int], limit: int) -> None:
    async with open_api() as api:
        answer = await api.ask(path, **fields)
        assert answer["usage"]["completion_tokens"] == limit
        assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "num_generated"),
    [(40, 5, None), (32, 1, None), (33, None, None), (30, 10, 2), (31, 1, 1), (1, 10**15, 31)],
)
async def test_prompts_at_the_border_of_the_context(
    num_prompt: int, max_tokens: int | None, num_generated: int | None
) -> None:
    async with open_api(alphabet(), served=[served_model(max_context_tokens=32)]) as api:
        fields: dict[str, Any] = {"prompt": [65] * num_prompt, "max_tokens": max_tokens}
        if num_generated is None:
            error = await api.refused(COMPLETIONS, **fields)
            assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
            assert "32" in error["message"]
            assert str(num_prompt) in error["message"]
            return
        answer = await api.ask(COMPLETIONS, **fields)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"] == {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
        }


async def test_a_chat_that_is_too_long_names_its_messages() -> None:
    async with open_api(served=[served_model(max_context_tokens=32)]) as api:
        error = await api.refused(CHAT, messages=[{"role": "user", "content": "x" * 40}])
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


async def test_each_form_of_prompt() -> None:
    async with open_api() as api:
        texts = []
        for prompt in ("AC", [65, 67], ["AC", "X"], [[65, 67], [88]], ["AC", [88]]):
            answer = await api.ask(COMPLETIONS, prompt=prompt, max_tokens=2, temperature=0)
            assert [choice["index"] for choice in answer["choices"]] == list(
                range(len(answer["choices"]))
            )
            texts.append([choice["text"] for choice in answer["choices"]])
        assert texts == [["DE"], ["DE"], ["DE", "YZ"], ["DE", "YZ"], ["DE", "YZ"]]


async def test_usage_counts_a_prompt_once_and_every_choice() -> None:
    async with open_api() as api:
        answer = await api.ask(COMPLETIONS, prompt=["AB", "CDE"], n=3, max_tokens=4)
        assert len(answer["choices"]) == 6
        assert answer["usage"] == {
            "prompt_tokens": 5,
            "completion_tokens": 24,
            "total_tokens": 29,
        }


async def test_end_tokens_come_from_model_and_tokenizer() -> None:
    async with open_api() as api:
        await api.ask(COMPLETIONS, max_tokens=1)
        assert api.engine.requests[0].stop_token_ids == {END}
