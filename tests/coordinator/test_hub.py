"""Models by their names on the hub: what is fetched, what is refused, and without a hub."""

import functools
import io
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from coordinator.config import DeploymentConfig
from coordinator.hub import fetch_model
from coordinator.hub_name import HubName, choose_weights, parse_hub_name
from coordinator.models import locate_model
from stagemesh.errors import CheckpointError, ModelNotFound, UnsupportedModel
from stagemesh.model_spec import load_model_spec
from tests.support.checkpoints import write_byte_tokenizer, write_tiny_checkpoint, write_tiny_gguf
from tests.support.fake_hub import COMMIT, FakeHub, fake_hub


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    root = tmp_path_factory.mktemp("models")
    sharded = contents(write_byte_tokenizer(write_tiny_checkpoint(root / "s", sharded=True)))
    single = contents(write_tiny_checkpoint(root / "single"))
    file = write_tiny_gguf(root / "gguf", "qwen2").read_bytes()
    other = write_tiny_gguf(root / "other", "llama").read_bytes()
    junk = {"pytorch_model.bin": b"pickle", "README.md": b"#", "consolidated.safetensors": b"!"}
    return {
        "org/sharded": sharded | junk,
        "org/single": single | junk,
        "org/one-gguf": {"m.Q8_0.gguf": file, "README.md": b"#"},
        "org/many-gguf": {"a.gguf": file, "sub/b.gguf": other},
        "org/pickled": {"config.json": b"{}", "pytorch_model.bin": b"pickle"},
        "org/gated": single,
        "org/stray": {"model.safetensors.index.json": b'{"weight_map": {"x": "../../x"}}'},
    }


@pytest.fixture
def hub(repositories: dict[str, dict[str, bytes]]) -> Iterator[FakeHub]:
    with fake_hub(FakeHub(files=repositories, gated=frozenset({"org/gated"}))) as served:
        yield served


def fetch(reference: str, hub: FakeHub, cache: Path) -> Path:
    name = parse_hub_name(reference)
    assert name is not None
    return fetch_model(name, cache=cache, endpoint=hub.endpoint, answer_seconds=5.0)


def test_an_index_and_its_shards_and_nothing_else(
    hub: FakeHub, tmp_path: Path, repositories: dict[str, dict[str, bytes]]
) -> None:
    arrived: list[int] = []
    name = HubName(repo="org/sharded")
    folder = fetch_model(name, cache=tmp_path, endpoint=hub.endpoint, on_bytes=arrived.append)
    wanted = {
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
        *("model.safetensors.index.json", "model-00001-of-00002.safetensors"),
        "model-00002-of-00002.safetensors",
    } & repositories["org/sharded"].keys()
    assert {path.name for path in folder.iterdir()} == wanted
    assert all((folder / n).read_bytes() == repositories["org/sharded"][n] for n in wanted)
    assert sum(arrived) == sum(len(repositories["org/sharded"][n]) for n in wanted)
    assert not any("consolidated" in asked or ".bin" in asked for asked in _fetched(hub))
    assert load_model_spec(folder).num_layers == 4
    # A second time nothing is fetched.
    hub.asked.clear()
    assert fetch("org/sharded", hub, tmp_path) == folder
    assert _fetched(hub) == []


def _fetched(hub: FakeHub) -> list[str]:
    return [asked for asked in hub.asked if asked.startswith("GET") and "/resolve/" in asked]


@pytest.mark.parametrize(
    ("reference", "end"),
    [
        ("org/single", COMMIT),
        (f"hf:org/single@{COMMIT}", COMMIT),
        ("org/single@main", COMMIT),
        ("org/one-gguf", "m.Q8_0.gguf"),
        ("org/many-gguf:a.gguf", "a.gguf"),
        ("org/many-gguf@main:sub/b.gguf", "sub/b.gguf"),
    ],
)
def test_one_file(hub: FakeHub, tmp_path: Path, reference: str, end: str) -> None:
    path = fetch(reference, hub, tmp_path)
    assert str(path).endswith(end)
    assert load_model_spec(path).num_layers == 4
    assert len([asked for asked in _fetched(hub) if "safetensors" in asked or "gguf" in asked]) == 1


@pytest.mark.parametrize(
    ("reference", "error", "message"),
    [
        ("org/none", ModelNotFound, "no such repository on the hub .*HF_TOKEN"),
        ("org/gated", ModelNotFound, "access is gated: .*HF_TOKEN"),
        ("org/single@v9", ModelNotFound, "no such revision"),
        ("org/many-gguf", ModelNotFound, r"say which.*org/many-gguf:a\.gguf.*sub/b\.gguf"),
        ("org/many-gguf:c.gguf", ModelNotFound, r"no such file; it has a\.gguf, sub/b\.gguf"),
        ("org/pickled", UnsupportedModel, r"pytorch_model\.bin holds pickled weights.*convert"),
        ("org/stray", CheckpointError, r"'\.\./\.\./x' is not the plain name"),
    ],
)
def test_what_is_not_fetched(
    hub: FakeHub, tmp_path: Path, reference: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        fetch(reference, hub, tmp_path)
    assert not any(path.suffix in (".bin", ".safetensors") for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("how", ["closed", "silent", "broken"])
def test_without_a_hub_the_cache_serves(
    hub: FakeHub, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    names = ("org/sharded", "org/one-gguf", "org/many-gguf:a.gguf")
    paths = [fetch(name, hub, tmp_path) for name in names]
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        away = FakeHub(files={}, endpoint=f"http://127.0.0.1:{deaf.getsockname()[1]}")
        if how == "closed":
            deaf.close()
        if how == "broken":
            hub.broken = True
            away = hub
        with caplog.at_level(logging.WARNING):
            for name, path in zip(names[: 3 if how == "closed" else 1], paths, strict=False):
                parsed = parse_hub_name(name)
                assert parsed is not None
                found = fetch_model(
                    parsed, cache=tmp_path, endpoint=away.endpoint, answer_seconds=0.3
                )
                assert found == path
        assert "taken from the cache" in caplog.text
        assert away.endpoint in caplog.text
        with pytest.raises(ModelNotFound, match=r"cannot be asked .* the cache .* lacks it"):
            fetch_model(
                HubName(repo="org/single"),
                cache=tmp_path,
                endpoint=away.endpoint,
                answer_seconds=0.3,
            )


@pytest.mark.parametrize("answers", [0, 1])
def test_a_hub_that_falls_silent_is_noticed(hub: FakeHub, tmp_path: Path, answers: int) -> None:
    """Between two questions, too; each has a deadline, and none is left to the library."""
    kept = fetch("org/sharded", hub, tmp_path)
    assert not any("/tree/" in asked for asked in hub.asked)
    hub.asked.clear()
    hub.silent_after = answers
    for name, found in (("org/sharded", kept), ("org/single", None)):
        start = time.monotonic()
        arguments = {"cache": tmp_path, "endpoint": hub.endpoint, "answer_seconds": 0.3}
        if found is not None:
            assert fetch_model(HubName(repo=name), **arguments) == found
        else:
            with pytest.raises(ModelNotFound, match=r"cannot be asked .*Timeout"):
                fetch_model(HubName(repo=name), **arguments)
        assert time.monotonic() - start < 5.0
        hub.asked.clear()


def test_shards_that_are_nowhere_are_named(
    hub: FakeHub, tmp_path: Path, repositories: dict[str, dict[str, bytes]]
) -> None:
    shard = "model-00002-of-00002.safetensors"
    whole = repositories["org/sharded"]
    hub.files = {**repositories, "org/cut": {n: d for n, d in whole.items() if n != shard}}
    with pytest.raises(CheckpointError, match=rf"org/cut: the repository lacks {shard}, which"):
        fetch("org/cut", hub, tmp_path)
    # A download that was cut, and no hub since.
    folder = fetch("org/sharded", hub, tmp_path)
    (folder / shard).unlink()
    hub.broken = True
    with pytest.raises(ModelNotFound, match=rf"the cache .* lacks it: .* lacks {shard}, which"):
        fetch("org/sharded", hub, tmp_path)


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("org/name", HubName(repo="org/name")),
        ("hf:gpt2", HubName(repo="gpt2")),
        ("hf:org/n.a-m_e@refs/pr/1", HubName(repo="org/n.a-m_e", revision="refs/pr/1")),
        ("o/n@v1:d/f.gguf", HubName(repo="o/n", revision="v1", file="d/f.gguf")),
        *[(bad, None) for bad in ("../../etc", "..", "/etc/passwd", "a/b/c", "a/..")],
        *[(bad, None) for bad in ("a/b@..", "a/b@../x", "a/b:../x.gguf", "a/b:x.bin", "a--b/c")],
        *[(bad, None) for bad in ("a/b@x/../y", "./model", "a/b/", "a\\b", "a/b\n", "\u00e4/b")],
        ("a/" + "b" * 200, None),
    ],
)
def test_names(reference: str, expected: HubName | None) -> None:
    assert parse_hub_name(reference) == expected
    if expected is None:
        with pytest.raises(ModelNotFound, match="not a name on the hub"):
            parse_hub_name(f"hf:{reference}")


def test_a_name_without_an_organisation_needs_the_prefix() -> None:
    assert parse_hub_name("gpt2") is None


def test_what_is_here_wins(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here = functools.partial(fetch_model, endpoint=hub.endpoint, cache=tmp_path / "cache")
    monkeypatch.setattr("coordinator.hub.fetch_model", here)
    console = Console(file=io.StringIO())
    found = locate_model(DeploymentConfig(model="org/single"), console=console)
    assert found.model.startswith(str(tmp_path / "cache"))
    assert found.name == "single"
    assert "org/single: downloaded" in console.file.getvalue()  # type: ignore[attr-defined]
    named = locate_model(DeploymentConfig(model="hf:org/single", name="mine"), console=console)
    assert (named.model, named.name) == (found.model, "mine")
    write_tiny_checkpoint(tmp_path / "org" / "single")
    local = DeploymentConfig(model="org/single")
    assert locate_model(local, console=console) is local
    assert locate_model(DeploymentConfig(model="hf:org/single"), console=console) == found
    with pytest.raises(ModelNotFound, match="no such folder"):
        locate_model(DeploymentConfig(model="../../etc/nothing"), console=console)


def test_the_command_line_asks_the_hub_of_the_environment(hub: FakeHub, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "coordinator", "plan", "--model", "org/many-gguf"]
    environment = os.environ | {"HF_ENDPOINT": hub.endpoint, "HF_HUB_CACHE": str(tmp_path)}
    done = subprocess.run(
        [*command, "--nodes", "none.toml"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 1
    assert "say which" in done.stderr


def test_a_pickle_is_no_gguf() -> None:
    with pytest.raises(UnsupportedModel, match=r"weights\.pt holds pickled"):
        choose_weights({"weights.pt", "config.json"}, HubName(repo="a/b"))
