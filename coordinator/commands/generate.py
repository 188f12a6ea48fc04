"""`coordinator generate`: one answer, streamed to the terminal, with its speed."""

import json
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import click
import httpx
from rich.console import Console

from coordinator.commands.options import (
    deployment_config,
    json_option,
    local_options,
    model_options,
    placement_options,
)
from coordinator.commands.render import LoadBars, plan_json
from coordinator.config import CoordinatorConfig
from coordinator.local_cluster import LocalCluster, LocalClusterConfig, local_cluster, wait_ready
from stagemesh.cli_support import guarded, log_options, run_until_signalled
from stagemesh.errors import CommError, ConfigError, StagemeshError

_CONNECT_SECONDS = 5.0
_TOKEN_SECONDS = 150.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What is asked."""

    text: str
    system: str | None
    max_tokens: int
    temperature: float
    seed: int | None

    def body(self, model: str) -> dict[str, Any]:
        """The chat completion request."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return {
            "model": model,
            "messages": [*system, {"role": "user", "content": self.text}],
            "max_completion_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@dataclass(slots=True)
class Answer:
    """What came, and how fast."""

    text: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_token_seconds: float = 0.0
    total_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decode speed: tokens after the first by the time after it."""
        rest = self.total_seconds - self.first_token_seconds
        return (
            (self.completion_tokens - 1) / rest if self.completion_tokens > 1 and rest > 0 else 0.0
        )


@click.command("generate")
@click.argument("prompt")
@click.option("--nodes", type=int, help="Start a local cluster of so many nodes for this answer.")
@click.option("--api", default="http://127.0.0.1:8000", show_default=True, help="A running API.")
@click.option("--api-key", envvar="STAGEMESH_API_KEY", help="Key of a running API.")
@click.option("--system", help="System message.")
@click.option("--max-tokens", type=int, default=256, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True)
@click.option("--seed", type=int)
@model_options
@placement_options(objective=None)
@local_options
@log_options
@json_option
@click.pass_context
def command(
    context: click.Context,
    /,
    *,
    prompt: str,
    nodes: int | None,
    api: str,
    api_key: str | None,
    system: str | None,
    max_tokens: int,
    temperature: float,
    seed: int | None,
    threads: int | None,
    memory: int | None,
    device: str,
    log_level: str,
    log_format: str,
    as_json: bool,
    **model: Any,
) -> None:
    """Answer PROMPT."""
    asked = Prompt(
        text=prompt, system=system, max_tokens=max_tokens, temperature=temperature, seed=seed
    )
    is_default_model = context.get_parameter_source("model") is click.core.ParameterSource.DEFAULT

    def start() -> int:
        if nodes is None:
            name = None if is_default_model else model["name"] or model["model"]
            return run_until_signalled(
                _ask_running(asked, api=api, api_key=api_key, model=name, as_json=as_json)
            )
        config = LocalClusterConfig(
            coordinator=CoordinatorConfig(
                deployments=(deployment_config(**model),),
                http_port=0,
                rpc_bind="127.0.0.1:0",
            ),
            num_nodes=nodes,
            threads=threads,
            memory_bytes=memory,
            device=device,
        )
        return run_until_signalled(_ask_local(asked, config, as_json=as_json))

    guarded(start, log_format=log_format, log_level="warning" if log_level == "info" else log_level)


async def _ask_local(prompt: Prompt, config: LocalClusterConfig, *, as_json: bool) -> int:
    console = Console(stderr=as_json)
    console.print(f"starting {config.num_nodes} node daemons on this machine", style="dim")
    async with local_cluster(config) as cluster:
        deployment = await _wait_shown(cluster, console)
        answer = await _show_answer(
            prompt,
            api=cluster.coordinator.api_url,
            api_key=None,
            model=deployment.name,
            console=None if as_json else console,
        )
        extra = {} if deployment.plan is None else plan_json(deployment.name, deployment.plan)
        _report(answer, console, extra=extra, as_json=as_json)
    return 0


async def _wait_shown(cluster: LocalCluster, console: Console) -> Any:
    coordinator = cluster.coordinator
    with LoadBars(console) as bars:
        await wait_ready(coordinator, on_poll=bars.update, nodes=cluster.nodes)
        deployment = next(iter(coordinator.cluster.deployments.values()))
        bars.finish(deployment)
    return deployment


async def _ask_running(
    prompt: Prompt, *, api: str, api_key: str | None, model: str | None, as_json: bool
) -> int:
    console = Console(stderr=as_json)
    answer = await _show_answer(
        prompt,
        api=api,
        api_key=api_key,
        model=model or await _first_model(api, api_key),
        console=None if as_json else console,
    )
    _report(answer, console, extra={}, as_json=as_json)
    return 0


async def _show_answer(
    prompt: Prompt, *, api: str, api_key: str | None, model: str, console: Console | None
) -> Answer:
    """Stream the answer to the console, where there is one."""
    answer = Answer()
    started = time.monotonic()
    async for text in _stream(prompt.body(model), answer, api=api, api_key=api_key):
        if not answer.text:
            answer.first_token_seconds = time.monotonic() - started
        answer.text += text
        if console is not None:
            console.out(text, end="", highlight=False)
    answer.total_seconds = time.monotonic() - started
    if console is not None:
        console.out("")
    return answer


def _client(api: str, api_key: str | None) -> httpx.AsyncClient:
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    timeout = httpx.Timeout(_TOKEN_SECONDS, connect=_CONNECT_SECONDS)
    # Without trust_env: a proxy set for the web has no business with a cluster's API.
    return httpx.AsyncClient(base_url=api, headers=headers, timeout=timeout, trust_env=False)


async def _first_model(api: str, api_key: str | None) -> str:
    async with _client(api, api_key) as client:
        response = await _guard(client.get("/v1/models"), api)
        _raise_for_error(response.status_code, response.content)
        models = response.json()["data"]
    if not models:
        raise ConfigError(f"the API at {api} serves no model")
    return str(models[0]["id"])


async def _guard(call: Any, api: str) -> httpx.Response:
    try:
        response = await call
    except httpx.TransportError as error:
        raise CommError(
            f"cannot reach the API at {api}: {str(error) or type(error).__name__}; start one with "
            "'coordinator up' or 'coordinator serve', or ask for a local cluster with --nodes 3"
        ) from error
    assert isinstance(response, httpx.Response)
    return response


async def _stream(
    body: dict[str, Any], answer: Answer, *, api: str, api_key: str | None
) -> AsyncGenerator[str, None]:
    """Yield the answer's text; fill in usage and finish reason."""
    async with _client(api, api_key) as client:
        request = client.build_request("POST", "/v1/chat/completions", json=body)
        response = await _guard(client.send(request, stream=True), api)
        try:
            if response.status_code != 200:
                _raise_for_error(response.status_code, await response.aread())
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise StagemeshError(event["error"]["message"])
                if event.get("usage"):
                    answer.prompt_tokens = event["usage"]["prompt_tokens"]
                    answer.completion_tokens = event["usage"]["completion_tokens"]
                for choice in event["choices"]:
                    answer.finish_reason = choice["finish_reason"] or answer.finish_reason
                    if choice["delta"].get("content"):
                        yield choice["delta"]["content"]
        except httpx.TransportError as error:
            raise CommError(
                f"the API at {api} broke off: {str(error) or type(error).__name__}"
            ) from error
        finally:
            await response.aclose()


def _raise_for_error(status: int, content: bytes) -> None:
    if status == 200:
        return
    try:
        message = json.loads(content)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = content[:200].decode(errors="replace")
    raise StagemeshError(f"the API answered {status}: {message}")


def _report(answer: Answer, console: Console, *, extra: dict[str, Any], as_json: bool) -> None:
    if as_json:
        figures = {
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
            "first_token_seconds": round(answer.first_token_seconds, 4),
            "tokens_per_second": round(answer.tokens_per_second, 2),
        }
        click.echo(json.dumps({**figures, **({"placement": extra} if extra else {})}))
        return
    console.print(
        f"[dim]{answer.completion_tokens} tokens, {answer.tokens_per_second:.1f} tokens/s, "
        f"time to first token {answer.first_token_seconds * 1000:.0f} ms[/dim]",
        highlight=False,
    )
