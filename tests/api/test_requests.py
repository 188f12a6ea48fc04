"""What a request may say, and how it is told what is wrong."""

import dataclasses
import json
from typing import Any

import pytest

from tests.api.scripted_engine import fixed
from tests.api.support import CHAT, COMPLETIONS, error_of, open_api, served_model

NAN, INF = float("nan"), float("inf")


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


WRONG_SAMPLING = [
    ("temperature", -3),
    ("temperature", NAN),
    ("temperature", INF),
    ("temperature", "hot"),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 7),
    ("top_p", -1),
    ("top_p", NAN),
    ("top_k", -1),
    ("min_p", 1.5),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 2.5),
    ("max_tokens", "5"),
    ("max_completion_tokens", 0),
    ("n", -1),
    ("n", 0),
    ("seed", 1.5),
    ("seed", 2**64),
    ("stream", "yes"),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("name", "value"), WRONG_SAMPLING)
async def test_a_wrong_sampling_value_is_named_and_the_next_request_works(
    path: str, name: str, value: Any
) -> None:
    async with open_api() as api:
        error = await api.refused(path, **{name: value})
        assert error["param"] == name
        assert name in error["message"]
        assert api.engine.requests == []
        await api.ask(path, max_tokens=1)


async def test_numbers_that_json_cannot_write_are_refused_by_name() -> None:
    async with open_api() as api:
        for number in (b"NaN", b"1e999", b"-Infinity"):
            body = b'{"model":"m","prompt":"C","temperature":' + number + b"}"
            error = error_of(await api.client.post(COMPLETIONS, content=body), status=400)
            assert error["param"] == "temperature"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_values_at_the_border_are_accepted(path: str) -> None:
    async with open_api() as api:
        await api.ask(
            path, temperature=2, top_p=1e-9, top_k=0, min_p=1, n=1, seed=-(2**63), max_tokens=1
        )
        await api.ask(path, temperature=0, top_p=1, top_k=1000, seed=2**64 - 1, max_tokens=1)
        first, second = (request.sampling for request in api.engine.requests)
        assert (first.temperature, first.top_p, first.seed) == (2.0, 1e-9, 2**63)
        assert (second.temperature, second.top_k, second.seed) == (0.0, 1000, 2**64 - 1)


async def test_defaults_of_the_model_come_before_those_of_openai() -> None:
    settings = {"temperature": 0.5, "top_k": 20, "top_p": 0.75, "min_p": 0.25}
    served = served_model()
    spec = dataclasses.replace(served.spec, generation_defaults=settings)
    async with open_api(served=[dataclasses.replace(served, spec=spec)]) as api:
        await api.ask(CHAT, max_tokens=1)
        await api.ask(COMPLETIONS, max_tokens=1, temperature=0, top_k=0, min_p=0, top_p=1)
        silent, outspoken = (request.sampling for request in api.engine.requests)
        assert {name: getattr(silent, name) for name in settings} == settings
        assert (outspoken.temperature, outspoken.top_k) == (0.0, 0)
        assert (outspoken.min_p, outspoken.top_p) == (0.0, 1.0)


async def test_defaults_are_those_of_openai() -> None:
    async with open_api(fixed([65])) as api:
        await api.ask(CHAT, temperature=None, top_p=None, n=None, max_tokens=None, stop=None)
        await api.ask(COMPLETIONS)
        chat, completion = api.engine.requests
        assert (chat.sampling.temperature, chat.sampling.top_p) == (1.0, 1.0)
        assert chat.max_tokens == 4096 - len(chat.prompt_token_ids)
        assert completion.max_tokens == 16


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ("{", None, "invalid_json"),
        ("", None, "invalid_json"),
        ("[]", None, "invalid_value"),
        ("[" * 100_000, None, "invalid_json"),
        ('{"model":"m"}', "messages", "missing_required_parameter"),
        ('{"model":"m","messages":[]}', "messages", "invalid_value"),
        ('{"messages":[{"role":"user","content":"x"}]}', "model", "missing_required_parameter"),
        (
            '{"model":"m","messages":[{"role":"wizard","content":"x"}]}',
            "messages[0].role",
            "invalid_value",
        ),
        (
            '{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}',
            None,
            "invalid_json",
        ),
    ],
)
async def test_a_wrong_body_has_openais_error_shape(
    body: str, param: str | None, code: str
) -> None:
    async with open_api() as api:
        error = error_of(await api.client.post(CHAT, content=body.encode()), status=400)
        assert (error["param"], error["code"]) == (param, code)


async def test_a_body_of_many_wrong_messages_is_one_error() -> None:
    async with open_api() as api:
        body = json.dumps({"model": "m", "messages": [0] * 1_000_000}).encode()
        error = error_of(await api.client.post(CHAT, content=body), status=400)
        assert error["param"] == "messages[0]"
        assert len(error["message"]) < 200


async def test_unknown_paths_models_and_methods() -> None:
    async with open_api() as api:
        error = error_of(await api.client.get("/v1/foo"), status=404)
        assert error["code"] == "unknown_url"
        error = error_of(await api.client.get(CHAT), status=405)
        assert error["code"] == "method_not_allowed"
        for path in (CHAT, COMPLETIONS):
            error = await api.refused(path, status=404, model="gpt-9")
            assert (error["code"], error["param"]) == ("model_not_found", "model")
            assert "'gpt-9'" in error["message"]
            assert "'m'" in error["message"]


async def test_content_parts_and_null_give_the_same_prompt_as_strings() -> None:
    parts = [
        user("A"),
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "B"}, {"type": "text", "text": "C"}],
        },
        {"role": "assistant", "content": None},
        {"role": "assistant"},
        user([{"type": "text", "text": "D"}]),
    ]
    strings = [
        user("A"),
        {"role": "assistant", "content": "BC"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": ""},
        user("D"),
    ]
    async with open_api() as api:
        await api.ask(CHAT, messages=parts, max_tokens=1)
        await api.ask(CHAT, messages=strings, max_tokens=1)
        await api.ask(CHAT, messages=[*strings[:-1], user("E")], max_tokens=1)
        first, second, other = (request.prompt_token_ids for request in api.engine.requests)
        assert first == second
        assert first != other


async def test_the_template_writes_the_only_bos() -> None:
    async with open_api() as api:
        answer = await api.ask(CHAT, max_tokens=1)
        (request,) = api.engine.requests
        assert bytes(request.prompt_token_ids[1:]) == b"[user]Hi\n[assistant]"
        assert request.prompt_token_ids[0] == 256
        assert answer["usage"]["prompt_tokens"] == len(request.prompt_token_ids)


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (user([{"type": "image_url", "image_url": {"url": "data:"}}]), "image_url"),
        (user([{"type": "text"}]), "text"),
        (user([7]), "type"),
        (user(None), "null"),
        ({"role": "user"}, "null"),
        (user(7), "string"),
        ({"role": "tool", "content": "x"}, "tool"),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, "tool_calls"),
    ],
)
async def test_a_wrong_message_is_refused_with_its_reason(
    message: dict[str, Any], named: str
) -> None:
    async with open_api() as api:
        error = await api.refused(CHAT, messages=[user("A"), message])
        assert error["param"].startswith("messages[1].")
        assert named in error["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("name", "value", "is_accepted"),
    [
        ("response_format", {"type": "json_schema", "schema": {"type": "object"}}, False),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}, False),
        ("response_format", {"type": "yaml"}, False),
        ("response_format", "json", False),
        ("response_format", {}, False),
        ("response_format", {"type": "text"}, True),
        ("response_format", None, True),
        ("presence_penalty", 0.5, False),
        ("frequency_penalty", -1, False),
        ("presence_penalty", 0, True),
        ("frequency_penalty", 0.0, True),
        ("logit_bias", {"50": 3}, False),
        ("logit_bias", {}, True),
        ("user", "somebody", True),
        ("metadata", {"a": "b"}, True),
        ("a_field_of_next_year", {"a": 1}, True),
    ],
)
async def test_features_that_we_lack_are_refused_unless_they_change_nothing(
    path: str, name: str, value: Any, is_accepted: bool
) -> None:
    async with open_api() as api:
        if is_accepted:
            await api.ask(path, max_tokens=1, **{name: value})
            return
        error = await api.refused(path, **{name: value})
        assert error["param"] == name
        if value not in ("json", {}, {"type": "yaml"}):
            assert error["code"] == "unsupported_value"
            assert "unsupported" in error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"tools": [{"type": "function"}]}, "tools"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"logprobs": 3}, "logprobs"),
        (COMPLETIONS, {"logprobs": True}, "logprobs"),
        (COMPLETIONS, {"suffix": "x"}, "suffix"),
        (COMPLETIONS, {"best_of": 3, "n": 2}, "best_of"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
        (COMPLETIONS, {"prompt": [260]}, "prompt"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt"),
        (COMPLETIONS, {"n": 129}, "n"),
        (COMPLETIONS, {"prompt": ["a"] * 129}, "prompt"),
    ],
)
async def test_fields_of_one_endpoint_are_checked(
    path: str, fields: dict[str, Any], param: str
) -> None:
    async with open_api() as api:
        assert (await api.refused(path, **fields))["param"] == param
        assert api.engine.requests == []
