"""Everything around generation: health, models, metrics, keys, bounds."""

import httpx
import pytest

from coordinator.api.health import DeploymentHealth, HealthReport
from coordinator.api.limits import ApiLimits
from stagemesh.errors import ConfigError
from tests.api.support import CHAT, error_of, open_api, served_model


@pytest.mark.parametrize(
    ("deployments", "status", "missing"),
    [
        ([("a", True, "")], 200, []),
        ([("a", True, ""), ("b", True, "")], 200, []),
        (
            [("a", True, ""), ("b", False, "layers [3, 5) have no node")],
            503,
            ["b: layers [3, 5) have no node"],
        ),
        ([("a", False, "")], 503, ["a: not ready"]),
        ([], 503, ["no model is deployed"]),
    ],
)
async def test_health_is_200_only_when_every_deployment_is_ready(
    deployments: list[tuple[str, bool, str]], status: int, missing: list[str]
) -> None:
    report = HealthReport(
        deployments=tuple(
            DeploymentHealth(model=model, is_ready=is_ready, detail=detail)
            for model, is_ready, detail in deployments
        )
    )
    async with open_api(health=lambda: report) as api:
        response = await api.client.get("/health")
        assert response.status_code == status
        body = response.json()
        assert body["missing"] == missing
        assert body["status"] == ("ok" if status == 200 else "unavailable")
        assert [d["model"] for d in body["deployments"]] == [d[0] for d in deployments]


async def test_models_are_listed_and_found_by_name() -> None:
    served = [served_model("m"), served_model("org/other", is_ready=False)]
    async with open_api(served=served) as api:
        listed = (await api.client.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert [(m["id"], m["is_ready"]) for m in listed["data"]] == [
            ("m", True),
            ("org/other", False),
        ]
        for model in listed["data"]:
            assert (model["object"], model["owned_by"]) == ("model", "stagemesh")
            assert model["created"] == 1_700_000_000
            assert (await api.client.get(f"/v1/models/{model['id']}")).json() == model
        error = error_of(await api.client.get("/v1/models/none"), status=404)
        assert error["code"] == "model_not_found"


async def test_metrics_are_there_only_when_given() -> None:
    async with open_api(metrics=lambda: "stagemesh_up 1\n") as api:
        response = await api.client.get("/metrics")
        assert response.text == "stagemesh_up 1\n"
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    async with open_api() as api:
        error_of(await api.client.get("/metrics"), status=404)


@pytest.mark.parametrize(
    ("header", "is_accepted"),
    [
        ("Bearer one", True),
        ("bearer two", True),
        ("Bearer three", False),
        ("Bearer on", False),
        ("Bearer ", False),
        ("Basic one", False),
        ("Bearer \xe9", False),
        (None, False),
    ],
)
async def test_keys_guard_everything_but_health(header: str | None, is_accepted: bool) -> None:
    headers = httpx.Headers({} if header is None else {"authorization": header}, encoding="latin-1")
    async with open_api(api_keys=frozenset({"one", "two"})) as api:
        assert (await api.client.get("/health")).status_code == 200
        for method, path in (("GET", "/v1/models"), ("POST", CHAT), ("GET", "/v1/foo")):
            response = await api.client.request(method, path, headers=headers)
            assert (response.status_code != 401) == is_accepted
            if not is_accepted:
                error = error_of(response, status=401)
                assert error["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"


async def test_a_body_over_the_bound_is_refused() -> None:
    async with open_api(limits=ApiLimits(max_body_bytes=200)) as api:
        await api.ask(CHAT, max_tokens=1)
        response = await api.post(CHAT, user="x" * 200)
        error = error_of(response, status=413)
        assert error["code"] == "request_too_large"
        assert "200 bytes" in error["message"]


@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_limits_must_be_positive(value: float) -> None:
    with pytest.raises(ConfigError, match="send_timeout_seconds"):
        ApiLimits(send_timeout_seconds=value)
