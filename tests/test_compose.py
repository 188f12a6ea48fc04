"""The compose file and the images agree with the repository and with the command lines."""

import fnmatch
import importlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from stagemesh.telemetry.config import parse_mqtt_url

ROOT = Path(__file__).resolve().parent.parent
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
BUILT = sorted(name for name, service in SERVICES.items() if "build" in service)
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
COMMANDS = {"coordinator": "coordinator.cli", "node-daemon": "node.cli"}


def dockerfile_of(service: str) -> Path:
    build = SERVICES[service]["build"]
    path: Path = ROOT / build["context"] / build["dockerfile"]
    return path


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """(KEYWORD, rest) of each instruction, continued lines joined, comments left out."""
    kept = [line for line in dockerfile.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(kept).replace("\\\n", " ")
    pairs = (line.partition(" ") for line in joined.splitlines() if line.strip())
    return [(keyword, rest.strip()) for keyword, _, rest in pairs]


def entrypoint(dockerfile: Path) -> list[str]:
    (text,) = [rest for keyword, rest in instructions(dockerfile) if keyword == "ENTRYPOINT"]
    words: list[str] = json.loads(text)  # the exec form is JSON; the shell form is not
    return words


def unknown_flags(program: str, arguments: list[str]) -> list[str]:
    """What the command line of `program` would not take."""
    command: click.Command = importlib.import_module(COMMANDS[program]).main
    rest = list(arguments)
    while isinstance(command, click.Group):
        name = rest.pop(0)
        child = command.get_command(click.Context(command), name)
        if child is None:
            return [name]
        command = child
    options = {flag: p for p in command.params for flag in (*p.opts, *p.secondary_opts)}
    wrong = []
    for argument in rest:
        flag, _, value = argument.partition("=")
        option = options.get(flag)
        takes_value = isinstance(option, click.Option) and not option.is_flag
        if option is None or takes_value != bool(value):
            wrong.append(argument)
        elif not isinstance(option.type, click.Path):  # paths are those of the container
            option.type.convert(value, option, click.Context(command)) if takes_value else None
    return wrong


@pytest.mark.parametrize("service", BUILT)
def test_every_flag_exists(service: str) -> None:
    (program,) = entrypoint(dockerfile_of(service))
    assert unknown_flags(program, SERVICES[service]["command"]) == []


def test_a_wrong_flag_would_be_found() -> None:
    """Negative control."""
    wrong = ["--no-such-flag=1", "--bind"]
    assert unknown_flags("node-daemon", ["--node-id=x", *wrong]) == wrong
    assert unknown_flags("coordinator", ["no-such-command"]) == ["no-such-command"]


def test_the_services_are_those_of_the_documentation() -> None:
    assert sorted(SERVICES) == ["coordinator", "mosquitto", "node-1", "node-2", "node-3"]
    assert BUILT == ["coordinator", "node-1", "node-2", "node-3"]


@pytest.mark.parametrize("service", BUILT)
def test_build_files_exist(service: str) -> None:
    assert dockerfile_of(service).is_file()


def test_mounted_files_exist() -> None:
    sources = {v.split(":")[0] for s in SERVICES.values() for v in s.get("volumes", [])}
    assert set(COMPOSE["volumes"]) < sources
    mounts = sources - set(COMPOSE["volumes"])
    assert [m for m in mounts if not (ROOT / m).is_file()] == []


def flag(service: str, name: str) -> str:
    (value,) = [
        word.partition("=")[2]
        for word in SERVICES[service]["command"]
        if word.startswith(f"{name}=")
    ]
    return str(value)


@pytest.mark.parametrize("node", ["node-1", "node-2", "node-3"])
def test_addresses_meet(node: str) -> None:
    coordinator_port = flag("coordinator", "--rpc-bind").rpartition(":")[2]
    assert flag(node, "--coordinator") == f"coordinator:{coordinator_port}"
    assert flag(node, "--node-id") == node
    port = flag(node, "--bind").rpartition(":")[2]
    assert flag(node, "--advertise") == f"{node}:{port}"
    assert f"127.0.0.1:{port}" in " ".join(SERVICES[node]["healthcheck"]["test"])
    assert f"EXPOSE {port}" in dockerfile_of(node).read_text()
    for service in (node, "coordinator"):
        broker = parse_mqtt_url(flag(service, "--mqtt"))
        assert f"listener {broker.port}" in (ROOT / "docker/mosquitto.conf").read_text()
        assert broker.host == "mosquitto"


def test_only_the_api_is_published_and_only_here() -> None:
    published = {name: s["ports"] for name, s in SERVICES.items() if "ports" in s}
    port = flag("coordinator", "--port")
    assert published == {"coordinator": [f"127.0.0.1:{port}:{port}"]}
    assert flag("coordinator", "--min-nodes") == "3"


@pytest.mark.parametrize("service", BUILT)
def test_the_token_is_mounted_where_the_flag_looks(service: str) -> None:
    (config,) = SERVICES[service]["configs"]
    assert config["target"] == flag(service, "--token-file")
    content = COMPOSE["configs"][config["source"]]["content"]
    assert re.fullmatch(r"\$\{STAGEMESH_TOKEN:-INSECURE-[!-~]+\}", content)


@pytest.mark.parametrize("service", sorted(SERVICES))
def test_every_service_is_watched_bounded_and_restarted(service: str) -> None:
    settings = SERVICES[service]
    assert settings["restart"] == "unless-stopped"
    assert settings["healthcheck"]["test"][0] == "CMD"
    assert settings["deploy"]["resources"]["limits"]["memory"]


def test_the_start_order_cannot_wait_for_itself() -> None:
    """The coordinator is healthy only with its nodes, so they must not wait for its health."""
    waits = {
        (name, other): settings["condition"]
        for name, service in SERVICES.items()
        for other, settings in service.get("depends_on", {}).items()
    }
    assert {waits[f"node-{n}", "coordinator"] for n in (1, 2, 3)} == {"service_started"}
    assert {waits[name, "mosquitto"] for name in BUILT} == {"service_healthy"}
    assert len(waits) == 7


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_what_an_image_copies_is_there_and_not_ignored(dockerfile: Path) -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    allowed = [pattern[1:] for pattern in ignored if pattern.startswith("!")]
    copies = [rest.split()[:-1] for key, rest in instructions(dockerfile) if key == "COPY"]
    sources = [source for copy in copies for source in copy]
    assert {"stagemesh", "node", "coordinator", "constraints.txt"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(fnmatch.fnmatch(source, pattern) for pattern in allowed), source


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_an_image_is_pinned_and_runs_without_root(dockerfile: Path) -> None:
    parts = instructions(dockerfile)
    assert entrypoint(dockerfile)[0] in COMMANDS
    users = [rest for keyword, rest in parts if keyword == "USER"]
    assert users
    assert users[-1] not in ("root", "0")
    installs = re.findall(r"pip install [^&]+", " && ".join(rest for _, rest in parts))
    assert len(installs) >= 3
    assert [line for line in installs if "-c constraints.txt" not in line] == []


def test_only_the_node_has_torch() -> None:
    has_torch = {
        path.stem: bool(re.search(r"pip install.*(torch|\[node\])", path.read_text()))
        for path in DOCKERFILES
    }
    assert has_torch == {"coordinator": False, "node": True}


def test_compose_itself_accepts_the_file() -> None:
    docker = shutil.which("docker")
    probe = [docker, "compose", "version"] if docker else ["false"]
    if subprocess.run(probe, capture_output=True, timeout=20).returncode != 0:
        pytest.skip("no docker compose client here")
    command = [docker, "compose", "-f", str(ROOT / "docker-compose.yml"), "config", "-q"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("node", ["node-1", "node-2", "node-3"])
def test_fetched_weights_stay_in_a_volume_that_the_node_may_write(node: str) -> None:
    (volume,) = SERVICES[node]["volumes"]
    name, folder = volume.split(":")
    assert name in COMPOSE["volumes"]
    made = [rest for key, rest in instructions(dockerfile_of(node)) if key == "RUN"]
    assert any(folder in rest and "-o stagemesh" in rest for rest in made)
