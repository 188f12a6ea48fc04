"""The HTTP API over a real coordinator and real nodes, with models whose answers are known."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from coordinator.api.logprobs import IMPOSSIBLE_LOGPROB
from stagemesh.steps import Step
from tests.api.support import (
    CHAT,
    COMPLETIONS,
    error_of,
    finish_reasons,
    joined,
    sse_events,
    strict_json,
    text_of,
)
from tests.cluster.asking import endless_model, expected_text, until
from tests.support.checkpoints import (
    IM_END,
    edit_config,
    edit_tensors,
    write_byte_tokenizer,
    write_chain_model,
    write_flat_model,
)
from tests.support.cluster import Cluster, start_cluster, tiny_model
from tests.support.stage_chain import reference_logits, reference_tokens

LETTERS = {code: code + 1 for code in range(ord("A"), ord("Z"))}
PEPPER = [*b"@A", 0xF0, 0x9F, 0x8C, 0xB6, *b"B", 0xC4, 0x8F, *b"C"]
PEPPER_TEXT = "A\U0001f336B\u010fC"


def walk(*tokens: int) -> dict[int, int]:
    return dict(pairwise(tokens))


class Api:
    """Requests to the served model, greedy unless they say otherwise."""

    def __init__(self, cluster: Cluster, client: httpx.AsyncClient) -> None:
        self.cluster = cluster
        self.client = client

    def body(self, path: str, **fields: Any) -> dict[str, Any]:
        base: dict[str, Any] = {"model": "model", "temperature": 0}
        if path == CHAT:
            base["messages"] = [{"role": "user", "content": "Hi"}]
        else:
            base["prompt"] = "C"
        return base | fields

    async def post(self, path: str, **fields: Any) -> httpx.Response:
        return await self.client.post(path, json=self.body(path, **fields))

    async def ask(self, path: str, **fields: Any) -> dict[str, Any]:
        response = await self.post(path, **fields)
        assert response.status_code == 200, response.text
        return strict_json(response.text)

    async def stream(self, path: str, **fields: Any) -> list[dict[str, Any]]:
        response = await self.post(path, stream=True, **fields)
        assert response.status_code == 200, response.text
        events = sse_events(response.text)
        assert events[-1] == "[DONE]"
        return [strict_json(event) for event in events[:-1]]

    async def both(self, path: str, **fields: Any) -> tuple[str, str, int]:
        """Text, finish reason and completion tokens, which are the same streamed and whole."""
        whole = await self.ask(path, **fields)
        chunks = await self.stream(path, stream_options={"include_usage": True}, **fields)
        (choice,) = whole["choices"]
        assert joined(chunks) == text_of(choice)
        assert finish_reasons(chunks) == [choice["finish_reason"]]
        assert chunks[-1]["usage"] == whole["usage"]
        usage = whole["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        return text_of(choice), choice["finish_reason"], usage["completion_tokens"]


@contextlib.asynccontextmanager
async def serving(folder: Path, *, num_nodes: int = 2, **settings: Any) -> AsyncIterator[Api]:
    async with (
        start_cluster(folder, num_nodes=num_nodes, name="model", **settings) as cluster,
        cluster.http() as client,
    ):
        yield Api(cluster, client)


EOS_CASES = {
    "a list in generation_config.json": ([50, 12], 60, "F", 12),
    "the second of the list": ([12, 50], 60, "F", 12),
    "config.json only": ([], 12, "F", 12),
    "config.json, others elsewhere": ([50, 51], 12, "F", 12),
    "a list in config.json": ([], [50, 12], "F", 12),
    "the tokenizer only": ([], None, "F", ord("F")),
    "none of them": ([], 60, "Z", None),
}


@pytest.mark.parametrize("case", EOS_CASES)
async def test_each_known_end_token_ends_an_answer(tmp_path: Path, case: str) -> None:
    generation, config, named, end = EOS_CASES[case]
    folder = write_chain_model(
        tmp_path / "m", successors=walk(*range(9, 59)), eos_token_ids=generation or (59,)
    )
    if not generation:
        (folder / "generation_config.json").write_text("{}")
    edit_config(folder, {"eos_token_id": config})
    # Token 70 is the letter F, and the walk goes from 20 straight to it where it is the end.
    if end == ord("F"):
        edit_tensors(folder, lambda all_: all_ | {"lm_head.weight": _head(walk(9, 10, 11, 70))})
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"eos_token": named}))
    async with serving(folder) as api:
        text, reason, count = await api.both(COMPLETIONS, prompt=[9], max_tokens=40)
    if end is None:
        assert (reason, count) == ("length", 40)
        assert text == bytes(range(10, 50)).decode()
    else:
        assert (text, reason, count) == ("\n\x0b", "stop", 3)


def _head(successors: dict[int, int]) -> torch.Tensor:
    head = torch.zeros(260, 260)
    for token, successor in successors.items():
        head[successor, token] = 1.0
    return head


async def test_characters_of_several_tokens(tmp_path: Path) -> None:
    folder = write_chain_model(tmp_path / "m", successors=walk(*PEPPER))
    async with serving(folder) as api:
        assert await api.both(COMPLETIONS, prompt="@", max_tokens=40) == (PEPPER_TEXT, "stop", 10)
        chunks = await api.stream(COMPLETIONS, prompt="@", max_tokens=40)
        assert "\ufffd" not in json.dumps(chunks, ensure_ascii=False)
        text, reason, count = await api.both(COMPLETIONS, prompt="@", max_tokens=3)
        assert text in ("A", "A\ufffd")
        assert (reason, count) == ("length", 3)


async def test_stop_strings_over_several_tokens(tmp_path: Path) -> None:
    async with serving(write_chain_model(tmp_path / "m", successors=LETTERS)) as api:
        for stop, text, reason in (
            (["DEFGHIJ"], "", "stop"),
            (["FG"], "DE", "stop"),
            ("FG", "DE", "stop"),
            (["X", "HI", "GH"], "DEF", "stop"),
            (["FX"], "DEFGHIJKLM", "length"),
            (["LMN"], "DEFGHIJKLM", "length"),
        ):
            got = await api.both(COMPLETIONS, stop=stop, max_tokens=10)
            assert got[:2] == (text, reason)
        # A stop string ends the work on the nodes, too.
        await until(lambda: api.cluster.num_sessions() == 0, seconds=1)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_reasons_and_counts(tmp_path: Path, path: str) -> None:
    # The template ends with a line break, from which the walk begins.
    successors = walk(ord("\n"), *b"hello") | {ord("C"): ord("h")}
    successors = {**successors, ord("l"): ord("o")}
    async with serving(write_chain_model(tmp_path / "m", successors=successors)) as api:
        assert await api.both(path, max_tokens=50) == ("helo", "stop", 5)
        assert await api.both(path, max_tokens=3) == ("hel", "length", 3)


async def test_seeds_fix_the_text_whatever_the_placement(tmp_path: Path) -> None:
    folder = write_byte_tokenizer(write_flat_model(tmp_path / "m", vocab_size=260))
    edit_config(folder, {"eos_token_id": None})
    texts = []
    for num_nodes in (1, 2):
        async with serving(folder, num_nodes=num_nodes) as api:

            async def text(api: Api = api, **fields: Any) -> str:
                fields |= {"temperature": 1, "max_tokens": 20}
                answer = await api.ask(COMPLETIONS, **fields)
                return text_of(answer["choices"][0])

            assert len({await text(seed=42) for _ in range(5)}) == 1
            assert await text(seed=42) != await text(seed=7)
            assert await text() != await text()
            tokens = await api.cluster.generate([1, 2, 3], 20, temperature=1.0, seed=42)
            assert len(set(tokens)) > 10
            texts.append((await text(seed=42), await text(seed=7), tokens))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_two_choices(tmp_path: Path, path: str) -> None:
    folder = write_byte_tokenizer(write_flat_model(tmp_path / "m", vocab_size=260))
    fields = {"n": 2, "temperature": 1, "seed": 3, "max_tokens": 6}
    async with serving(folder) as api:
        whole = await api.ask(path, **fields)
        chunks = await api.stream(path, **fields)
        alone = [await api.ask(path, **(fields | {"n": 1, "seed": 3 + i})) for i in range(2)]
    texts = [text_of(choice) for choice in whole["choices"]]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    assert [joined(chunks, index=i) for i in range(2)] == texts
    assert [finish_reasons(chunks, index=i) for i in range(2)] == [["length"], ["length"]]
    assert [text_of(answer["choices"][0]) for answer in alone] == texts
    assert texts[0] != texts[1]
    assert whole["usage"]["completion_tokens"] == 12


async def test_impossible_tokens_leave_the_json_strict(tmp_path: Path) -> None:
    folder = write_chain_model(tmp_path / "m", successors={})
    # So large that the product with the activation overflows to minus infinity.
    head = torch.full((260, 260), -3e38)
    head[ord("D")] = 0.0
    head[ord("D"), ord("C")] = 1.0
    head[ord("D"), ord("\n")] = 1.0
    head[ord("E")] = 0.0
    edit_tensors(folder, lambda all_: all_ | {"lm_head.weight": head})
    async with serving(folder) as api:
        chat = await api.ask(CHAT, logprobs=True, top_logprobs=5, max_tokens=1)
        (entry,) = chat["choices"][0]["logprobs"]["content"]
        assert entry["token"] == "D"
        assert entry["logprob"] == pytest.approx(0.0, abs=1e-6)
        assert [top["token"] for top in entry["top_logprobs"]][:2] == ["D", "E"]
        assert all(top["logprob"] >= IMPOSSIBLE_LOGPROB for top in entry["top_logprobs"])
        for options, tokens in (
            ({}, "D"),
            ({"echo": True}, "XCD"),
            ({"echo": True, "max_tokens": 0}, "XC"),
        ):
            fields = {"max_tokens": 1, "logprobs": 5, "prompt": "XC", **options}
            whole = await api.ask(COMPLETIONS, **fields)
            logprobs = whole["choices"][0]["logprobs"]
            assert logprobs["tokens"] == list(tokens)
            values = [value for value in logprobs["token_logprobs"] if value is not None]
            assert all(IMPOSSIBLE_LOGPROB <= value <= 0 for value in values)
            if "echo" in options:
                assert logprobs["token_logprobs"][0] is None
                assert logprobs["token_logprobs"][1] == IMPOSSIBLE_LOGPROB
            chunks = await api.stream(COMPLETIONS, **fields)
            assert joined(chunks) == text_of(whole["choices"][0])


async def test_echo_with_logprobs_equals_transformers(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = "Whatever the placement"
    ids = list(prompt.encode())
    async with serving(folder, num_nodes=3, max_step_tokens=7) as api:
        fields = {"prompt": prompt, "max_tokens": 4, "echo": True, "logprobs": 3}
        answer = await api.ask(COMPLETIONS, **fields)
        tokens = await api.cluster.generate(ids, 4)
        scored = await api.ask(COMPLETIONS, **(fields | {"max_tokens": 0}))
    logprobs = answer["choices"][0]["logprobs"]
    whole = ids + tokens
    expected = torch.log_softmax(reference_logits(model, whole[:-1]), dim=-1)
    got = torch.tensor(logprobs["token_logprobs"][1:])
    rows = torch.arange(len(whole) - 1)
    torch.testing.assert_close(got, expected[rows, whole[1:]], rtol=0, atol=1e-4)
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    for top, row, token in zip(logprobs["top_logprobs"][1:], expected, whole[1:], strict=True):
        best = sorted(row.topk(3).values.tolist())
        assert sorted(top.values())[-3:] == pytest.approx(best, abs=1e-4)
        assert pytest.approx(float(row[token]), abs=1e-4) in top.values()
    prompt_scores = logprobs["token_logprobs"][1 : len(ids)]
    assert scored["choices"][0]["text"] == prompt
    assert scored["usage"]["completion_tokens"] == 0
    assert scored["choices"][0]["logprobs"]["token_logprobs"][1:] == pytest.approx(prompt_scores)


async def test_the_borders_of_the_context(tmp_path: Path) -> None:
    successors = walk(*range(100, 160))
    folder = write_chain_model(tmp_path / "m", successors=successors, max_position_embeddings=32)
    async with serving(folder) as api:

        async def ask(length: int, max_tokens: int) -> httpx.Response:
            return await api.post(COMPLETIONS, prompt=[100] * length, max_tokens=max_tokens)

        for length in (40, 32):
            error = error_of(await ask(length, 5), status=400)
            assert error["code"] == "context_length_exceeded"
            assert "32 tokens" in error["message"]
            assert f"{length} tokens" in error["message"]
        for length, asked, expected in ((30, 10, 2), (31, 1, 1), (31, 9, 1), (2, 30, 30)):
            answer = strict_json((await ask(length, asked)).text)
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["usage"] == {
                "prompt_tokens": length,
                "completion_tokens": expected,
                "total_tokens": length + expected,
            }
        await until(lambda: api.cluster.kv_used_bytes() == 0, seconds=1)


async def assert_work_ends(cluster: Cluster) -> None:
    """Within a second no node has a session, and from then on no step is computed."""
    await until(lambda: cluster.num_sessions() == 0, seconds=1)
    assert cluster.kv_used_bytes() == 0
    # The step that released the last session counts once it has ended.
    await asyncio.sleep(0.1)
    steps = cluster.num_steps()
    await asyncio.sleep(0.2)
    assert cluster.num_steps() == steps


async def test_a_client_that_leaves_a_stream_ends_its_work(tmp_path: Path) -> None:
    async with serving(endless_model(tmp_path)) as api:
        fields = api.body(COMPLETIONS, prompt="A", max_tokens=2000, stream=True)
        async with api.client.stream("POST", COMPLETIONS, json=fields) as response:
            lines = response.aiter_lines()
            for _ in range(3):
                await anext(lines)
            assert api.cluster.num_sessions() == 2
        answer = await api.ask(COMPLETIONS, prompt="A", max_tokens=12)
        assert text_of(answer["choices"][0]) == expected_text(12)
        await assert_work_ends(api.cluster)


async def test_a_client_that_leaves_a_whole_answer_ends_its_work(tmp_path: Path) -> None:
    async with serving(endless_model(tmp_path)) as api:
        fields = api.body(COMPLETIONS, prompt="A", max_tokens=4000)
        with pytest.raises(httpx.ReadTimeout):
            await api.client.post(COMPLETIONS, json=fields, timeout=0.5)
        await assert_work_ends(api.cluster)
        assert api.cluster.num_steps() < 2 * 4000
        answer = await api.ask(COMPLETIONS, prompt="A", max_tokens=12)
        assert text_of(answer["choices"][0]) == expected_text(12)


def fail_once_at(cluster: Cluster, *, stage: int, num_calls: int) -> None:
    """Let a stage's engine raise at its `num_calls`-th step from now, once."""
    assert cluster.deployment.plan is not None
    node = cluster.nodes[cluster.deployment.plan.stages[stage].node_id]
    (deployment,) = node.daemon.servicer._deployments.values()
    engine = deployment.runner.engine
    run, calls = engine.run, 0

    def failing(step: Step, activation: torch.Tensor | None) -> Any:
        nonlocal calls
        calls += bool(step.segments)
        if calls == num_calls and step.segments:
            engine.run = run  # type: ignore[method-assign]
            raise RuntimeError("the injected failure")
        return run(step, activation)

    engine.run = failing  # type: ignore[method-assign]


@pytest.mark.parametrize("stage", [0, 1])
async def test_a_stage_that_fails_in_mid_stream(tmp_path: Path, stage: int) -> None:
    async with serving(endless_model(tmp_path)) as api:
        assert api.cluster.deployment.plan is not None
        node_id = api.cluster.deployment.plan.stages[stage].node_id
        fail_once_at(api.cluster, stage=stage, num_calls=11)
        response = await api.post(COMPLETIONS, prompt="A", max_tokens=50, stream=True)
        events = [strict_json(event) for event in sse_events(response.text)]
        error = events.pop()["error"]
        assert "the injected failure" in error["message"]
        assert node_id in error["message"]
        assert error["type"] == "server_error"
        assert all("error" not in event for event in events)
        assert joined(events) == expected_text(10)
        assert finish_reasons(events) == []
        answer = await api.ask(COMPLETIONS, prompt="A", max_tokens=12)
        assert text_of(answer["choices"][0]) == expected_text(12)
        await assert_work_ends(api.cluster)


async def test_a_failed_step_harms_no_answer_that_is_not_in_it(tmp_path: Path) -> None:
    async with serving(endless_model(tmp_path)) as api:
        fail_once_at(api.cluster, stage=1, num_calls=1)
        error = error_of(await api.post(COMPLETIONS, prompt="A", max_tokens=9), status=500)
        assert "the injected failure" in error["message"]
        answers = await asyncio.gather(
            *(api.ask(COMPLETIONS, prompt="A", max_tokens=9 + i) for i in range(4))
        )
        texts = [text_of(answer["choices"][0]) for answer in answers]
        assert texts == [expected_text(9 + i) for i in range(4)]
        await assert_work_ends(api.cluster)


async def test_rounds_of_short_and_long_prompts(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = [[3, 14, 15, 92, 65], [35, 89, 79, 32, 38, 46, 26, 43, 38], [1, 2, 3, 4, 5]]
    expected = [reference_tokens(model, prompt, 8) for prompt in prompts]
    async with start_cluster(folder) as cluster:
        for _ in range(20):
            assert [await cluster.generate(prompt, 8) for prompt in prompts] == expected
        await assert_work_ends(cluster)


async def test_prompts_of_one_request_equal_their_own_requests(tmp_path: Path) -> None:
    async with serving(tiny_model(tmp_path)) as api:
        prompts = [[7, 8], [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46]]
        answer = await api.ask(COMPLETIONS, prompt=prompts, max_tokens=10)
        alone = [await api.ask(COMPLETIONS, prompt=prompt, max_tokens=10) for prompt in prompts]
    texts = [text_of(choice) for choice in answer["choices"]]
    assert texts == [text_of(one["choices"][0]) for one in alone]
    assert answer["usage"]["prompt_tokens"] == 13


async def test_a_node_that_joins_during_an_answer_changes_nothing(tmp_path: Path) -> None:
    async with serving(endless_model(tmp_path)) as api:
        plan = api.cluster.deployment.plan
        fields = api.body(COMPLETIONS, prompt="A", max_tokens=200, stream=True)
        chunks: list[dict[str, Any]] = []
        async with api.client.stream("POST", COMPLETIONS, json=fields) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunks.append(strict_json(line.removeprefix("data: ")))
                if len(chunks) == 10:
                    await api.cluster.add_node("late")
        assert joined(chunks) == expected_text(200)
        assert finish_reasons(chunks) == ["length"]
        assert api.cluster.deployment.plan == plan
        answer = await api.ask(COMPLETIONS, prompt="A", max_tokens=12)
        assert text_of(answer["choices"][0]) == expected_text(12)


async def test_the_end_token_of_the_chat_template_is_no_text(tmp_path: Path) -> None:
    """Neither generation_config.json nor config.json names it: the tokenizer does."""
    folder = write_chain_model(
        tmp_path / "m", successors=walk(ord("\n"), *b"yes", IM_END), eos_token_ids=()
    )
    async with serving(folder) as api:
        assert await api.both(CHAT, max_tokens=9) == ("yes", "stop", 4)
