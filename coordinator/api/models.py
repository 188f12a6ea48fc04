"""GET /v1/models and /v1/models/{id}."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from coordinator.api.sequences import find_model
from coordinator.generation import Engine, ServedModel


def model_routes(engine: Engine) -> list[Route]:
    """The two routes. Models that are not ready are listed too, and say so."""

    async def list_models(_request: Request) -> JSONResponse:
        data = [_model_object(served) for served in engine.models()]
        return JSONResponse({"object": "list", "data": data})

    async def get_model(request: Request) -> JSONResponse:
        return JSONResponse(_model_object(find_model(engine, request.path_params["name"])))

    return [
        Route("/v1/models", list_models, methods=["GET"]),
        # Names may have slashes.
        Route("/v1/models/{name:path}", get_model, methods=["GET"]),
    ]


def _model_object(served: ServedModel) -> dict[str, Any]:
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "stagemesh",
        # Beyond OpenAI's fields.
        "max_context_tokens": served.max_context_tokens,
        "is_ready": served.is_ready,
        "detail": served.detail,
    }
