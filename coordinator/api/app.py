"""The OpenAI-compatible HTTP API of the coordinator.

The path of a request: `auth` (key) -> `body` (bounds, JSON, `schemas`) -> `chat` or `completions`
(text to token ids, `sequences`) -> `response` (client gone?) -> `runner` (all choices side by side,
`choice_text`) -> `collect` or `streaming` (JSON). What generates is behind `Engine`, what knows the
tokenizers behind `TextProvider`; nothing here knows of nodes.
"""

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from coordinator.api.auth import ApiKeyGate
from coordinator.api.body import read_request
from coordinator.api.chat import ChatFormat, chat_answer
from coordinator.api.completions import CompletionFormat, completion_answer
from coordinator.api.errors import RequestError, answer_error, answer_http_exception
from coordinator.api.health import HealthReport, health_route
from coordinator.api.limits import ApiLimits
from coordinator.api.models import model_routes
from coordinator.api.response import GenerationResponse
from coordinator.api.schemas import ChatRequest, CompletionRequest
from coordinator.api.text import TextProvider
from coordinator.generation import Engine
from stagemesh.errors import StagemeshError


def create_app(
    *,
    engine: Engine,
    texts: TextProvider,
    health: Callable[[], HealthReport],
    metrics: Callable[[], str] | None = None,
    api_keys: frozenset[str] = frozenset(),
    limits: ApiLimits | None = None,
) -> Starlette:
    """Build the ASGI application.

    Args:
        engine: runs token sequences.
        texts: finds tokenizers and chat templates.
        health: the state of all deployments, asked for by each GET /health.
        metrics: writes GET /metrics in Prometheus' text format; no such route without it.
        api_keys: when not empty, all routes but /health want one of them.
        limits: bounds; the default ones where not given.
    """
    routes = [
        health_route(health),
        *model_routes(engine),
        *_generation_routes(engine=engine, texts=texts, limits=limits or ApiLimits()),
    ]
    if metrics is not None:
        routes.append(_metrics_route(metrics))
    return Starlette(
        routes=routes,
        middleware=[Middleware(ApiKeyGate, api_keys=api_keys)],
        exception_handlers={
            HTTPException: answer_http_exception,
            RequestError: answer_error,
            StagemeshError: answer_error,
            Exception: answer_error,
        },
    )


def _generation_routes(*, engine: Engine, texts: TextProvider, limits: ApiLimits) -> list[Route]:
    async def chat(request: Request) -> Response:
        body = await read_request(request, ChatRequest, limits=limits)
        answer = await chat_answer(body, engine=engine, texts=texts, limits=limits)
        form = ChatFormat(has_logprobs=bool(body.logprobs))
        return GenerationResponse(answer, engine=engine, form=form, limits=limits)

    async def completions(request: Request) -> Response:
        body = await read_request(request, CompletionRequest, limits=limits)
        answer = await completion_answer(body, engine=engine, texts=texts, limits=limits)
        form = CompletionFormat(has_logprobs=body.logprobs is not None)
        return GenerationResponse(answer, engine=engine, form=form, limits=limits)

    return [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
    ]


def _metrics_route(metrics: Callable[[], str]) -> Route:
    async def answer(_request: Request) -> Response:
        return PlainTextResponse(metrics(), media_type="text/plain; version=0.0.4")

    return Route("/metrics", answer, methods=["GET"])
