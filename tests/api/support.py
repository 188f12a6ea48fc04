"""A byte-level tokenizer, an app over a `ScriptedEngine`, and a real server for it."""

import asyncio
import functools
import json
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import tokenizers
import uvicorn
from safetensors.numpy import save_file
from starlette.applications import Starlette
from tokenizers import decoders, models, pre_tokenizers

from coordinator.api.app import create_app
from coordinator.api.health import DeploymentHealth, HealthReport
from coordinator.api.limits import ApiLimits
from coordinator.generation import ServedModel
from coordinator.text.chat_template import ChatTemplate
from coordinator.text.metadata import TextMetadata
from coordinator.text.pieces import Spelling, byte_alphabet
from coordinator.text.tokenizer import Tokenizer
from stagemesh.model_spec import ModelSpec, load_model_spec
from tests.api.scripted_engine import Script, ScriptedEngine, alphabet

BOS, END = 256, 257
VOCAB_SIZE = 260
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def byte_tokenizer() -> Tokenizer:
    """Token i is the byte i; then come <bos> and <end>. Prompts of completions get no BOS."""
    vocab = dict(byte_alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<bos>", "<end>"])
    metadata = TextMetadata(
        special_tokens={"bos_token": "<bos>", "eos_token": "<end>"},
        adds_bos=False,
        eos_token_ids=frozenset({END}),
        chat_template=TEMPLATE,
    )
    return Tokenizer(
        backend,
        spelling=Spelling(kind="byte_level"),
        metadata=metadata,
        model_vocab_size=VOCAB_SIZE,
    )


def write_model(folder: Path) -> Path:
    """A one-layer Llama folder with zero weights: enough for a `ModelSpec`."""
    width, vocab, mlp = 4, VOCAB_SIZE, 8
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "hidden_size": width,
        "intermediate_size": mlp,
        "vocab_size": vocab,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": width,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "eos_token_id": END,
        "bos_token_id": BOS,
    }
    layer = "model.layers.0"
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, width),
        "model.norm.weight": (width,),
        "lm_head.weight": (vocab, width),
        f"{layer}.input_layernorm.weight": (width,),
        f"{layer}.post_attention_layernorm.weight": (width,),
        **{f"{layer}.self_attn.{name}_proj.weight": (width, width) for name in "qkvo"},
        f"{layer}.mlp.gate_proj.weight": (mlp, width),
        f"{layer}.mlp.up_proj.weight": (mlp, width),
        f"{layer}.mlp.down_proj.weight": (width, mlp),
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@functools.cache
def model_spec() -> ModelSpec:
    """The spec of that model; its files are not needed any more."""
    with tempfile.TemporaryDirectory() as folder:
        return load_model_spec(write_model(Path(folder) / "m"), name="m")


def served_model(
    name: str = "m", *, max_context_tokens: int = 4096, is_ready: bool = True
) -> ServedModel:
    return ServedModel(
        name=name,
        spec=model_spec(),
        created=1_700_000_000,
        max_context_tokens=max_context_tokens,
        is_ready=is_ready,
        detail="" if is_ready else "1 of 2 nodes is missing",
    )


class OneText:
    """The same tokenizer and template for every model."""

    def __init__(self) -> None:
        self._tokenizer = byte_tokenizer()
        self._template = ChatTemplate(TEMPLATE, bos_token="<bos>", eos_token="<end>")

    def tokenizer(self, model_name: str) -> Tokenizer:
        return self._tokenizer

    def chat_template(self, model_name: str) -> ChatTemplate:
        return self._template


@dataclass
class Api:
    """An app, its engine and a client in the same process."""

    app: Starlette
    engine: ScriptedEngine
    client: httpx.AsyncClient

    async def post(self, path: str, **fields: Any) -> httpx.Response:
        """POST to model "m"; a chat gets one user message, a completion the prompt "C"."""
        base: dict[str, Any] = {"model": "m"}
        if path == CHAT:
            base["messages"] = [{"role": "user", "content": "Hi"}]
        else:
            base["prompt"] = "C"
        # Through json.dumps, because httpx refuses to write NaN.
        content = json.dumps(base | fields).encode()
        return await self.client.post(path, content=content)

    async def ask(self, path: str, **fields: Any) -> dict[str, Any]:
        """The JSON of a request that succeeds."""
        response = await self.post(path, **fields)
        assert response.status_code == 200, response.text
        return strict_json(response.text)

    async def refused(self, path: str, *, status: int = 400, **fields: Any) -> dict[str, Any]:
        """The error object of a request that fails."""
        return error_of(await self.post(path, **fields), status=status)

    async def stream(self, path: str, **fields: Any) -> list[dict[str, Any]]:
        """The chunks of a stream that ends well."""
        response = await self.post(path, stream=True, **fields)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        events = sse_events(response.text)
        assert events[-1] == "[DONE]"
        return [strict_json(event) for event in events[:-1]]


def error_of(response: httpx.Response, *, status: int) -> dict[str, Any]:
    """The error object, checked for OpenAI's shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = strict_json(response.text)
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert isinstance(error["type"], str)
    return error


def strict_json(text: str) -> dict[str, Any]:
    """Parse JSON; NaN and Infinity are errors, as for every parser but Python's."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    value: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return value


def sse_events(text: str) -> list[str]:
    """The data of server-sent events: one line each, separated by blank lines."""
    assert text.endswith("\n\n")
    events = text[:-2].split("\n\n")
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [event.removeprefix("data: ") for event in events]


def joined(chunks: list[dict[str, Any]], *, index: int = 0) -> str:
    """The text of one choice of a stream."""
    choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(c["delta"].get("content", "") if "delta" in c else c["text"] for c in choices)


def finish_reasons(chunks: list[dict[str, Any]], *, index: int = 0) -> list[str]:
    """All finish reasons of one choice that are not null."""
    choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return [c["finish_reason"] for c in choices if c["finish_reason"] is not None]


def text_of(choice: dict[str, Any]) -> str:
    """The text of a choice that is not streamed, of either endpoint."""
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    assert isinstance(text, str)
    return text


def ready_report() -> HealthReport:
    return HealthReport(deployments=(DeploymentHealth(model="m", is_ready=True, detail=""),))


@asynccontextmanager
async def open_api(
    script: Script | None = None,
    *,
    served: list[ServedModel] | None = None,
    health: Callable[[], HealthReport] = ready_report,
    metrics: Callable[[], str] | None = None,
    api_keys: frozenset[str] = frozenset(),
    limits: ApiLimits | None = None,
    **engine_settings: Any,
) -> AsyncIterator[Api]:
    """An app over a scripted engine, with a client that calls it in process."""
    engine = ScriptedEngine(
        served=served or [served_model()], script=script or alphabet(), **engine_settings
    )
    app = create_app(
        engine=engine,
        texts=OneText(),
        health=health,
        metrics=metrics,
        api_keys=api_keys,
        limits=limits,
    )
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:
        yield Api(app, engine, client)


@asynccontextmanager
async def listening(app: Starlette) -> AsyncIterator[str]:
    """Serve the app with uvicorn on a free port of this host; yields the base URL."""
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, log_config=None, lifespan="off", ws="none"
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.started, timeout_seconds=10)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, timeout=10)


async def until(condition: Callable[[], bool], *, timeout_seconds: float = 1.0) -> None:
    """Wait until the condition holds."""
    async with asyncio.timeout(timeout_seconds):
        while not condition():  # noqa: ASYNC110 -- what is waited for has no event
            await asyncio.sleep(0.005)
