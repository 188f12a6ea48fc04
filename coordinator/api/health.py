"""GET /health: whether every deployment can answer, and what is missing where one cannot."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentHealth:
    """One deployment's state."""

    model: str
    """Name of the served model."""
    is_ready: bool
    """Whether it answers requests now."""
    detail: str
    """What is missing, for a person; empty when ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthReport:
    """The state of everything that this coordinator serves."""

    deployments: tuple[DeploymentHealth, ...]
    """All deployments, ready or not."""

    @property
    def missing(self) -> tuple[str, ...]:
        """One sentence for each reason not to be ready; empty when all is well."""
        if not self.deployments:
            return ("no model is deployed",)
        return tuple(
            f"{deployment.model}: {deployment.detail or 'not ready'}"
            for deployment in self.deployments
            if not deployment.is_ready
        )


def health_route(health: Callable[[], HealthReport]) -> Route:
    """The route; it answers 503 until every deployment is ready."""

    async def answer(_request: Request) -> JSONResponse:
        report = health()
        missing = report.missing
        body: dict[str, Any] = {
            "status": "unavailable" if missing else "ok",
            "missing": list(missing),
            "deployments": [
                {"model": d.model, "is_ready": d.is_ready, "detail": d.detail}
                for d in report.deployments
            ],
        }
        return JSONResponse(body, status_code=503 if missing else 200)

    return Route("/health", answer, methods=["GET"])
