"""The command lines as a user runs them: help, JSON, errors in one line, and clean ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.asking import assert_answers, endless_model, expected_text
from tests.process.children import Children, children
from tests.support.checkpoints import write_chain_model
from tests.support.cluster import start_cluster

BIN = Path(sys.executable).parent


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Children]:
    with children(tmp_path) as started:
        yield started


def run(*command: str, seconds: float = 50.0, **settings: Any) -> subprocess.CompletedProcess[str]:
    if command[0] in ("coordinator", "node"):
        command = (sys.executable, "-m", *command)
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, **settings)


HELP = [
    (["coordinator"], ["serve", "up", "generate", "plan", "status"]),
    (["coordinator", "serve"], ["--model", "--rpc-bind", "--token-file", "--mqtt", "--min-nodes"]),
    (["coordinator", "up"], ["--nodes", "--threads", "--memory", "--port", "--json"]),
    (["coordinator", "generate"], ["PROMPT", "--nodes", "--max-tokens", "--temperature", "--seed"]),
    (["coordinator", "status"], ["--coordinator", "--json", "--measure"]),
    (["coordinator", "plan"], ["--nodes", "--objective", "--pin", "--exclude", "--svg"]),
    (["node"], ["--coordinator", "--bind", "--device", "--memory", "--token-file", "--no-measure"]),
]


@pytest.mark.parametrize(("command", "words"), HELP, ids=[" ".join(c) for c, _ in HELP])
def test_help(command: list[str], words: list[str]) -> None:
    done = run(*command, "--help")
    assert done.returncode == 0, done.stderr
    assert [word for word in words if word not in done.stdout] == []
    assert done.stderr == ""


@pytest.mark.parametrize("program", ["coordinator", "node-daemon"])
def test_the_installed_programs_say_their_version(program: str) -> None:
    done = run(str(BIN / program), "--version")
    assert done.returncode == 0, done.stderr
    assert "0." in done.stdout


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


ERRORS: dict[str, tuple[list[str], str]] = {
    "no such model": (["coordinator", "serve", "--model", "/no/such/model"], "/no/such/model"),
    "a folder of something else": (["coordinator", "serve", "--model", "/etc"], "config.json"),
    "public without a token": (
        ["coordinator", "serve", "--model", "MODEL", "--rpc-bind", "0.0.0.0:0", "--port", "0"],
        "token",
    ),
    "a broker that is none": (
        ["coordinator", "serve", "--model", "MODEL", "--mqtt", "http://broker"],
        "mqtt://",
    ),
    "no nodes": (["coordinator", "generate", "hi", "--nodes", "0", "--model", "MODEL"], "0"),
    "no API": (["coordinator", "generate", "hi", "--api", "http://127.0.0.1:PORT"], "PORT"),
    "no coordinator": (["coordinator", "status", "--coordinator", "127.0.0.1:PORT"], "PORT"),
    "a token file that is not there": (
        ["coordinator", "status", "--token-file", "/no/such/file"],
        "/no/such/file",
    ),
    "an empty node id": (["node", "--node-id", "a b"], "a b"),
}
# These are found once torch is there, whose import takes seconds.
SLOW_ERRORS: dict[str, tuple[list[str], str]] = {
    "a device that is not there": (["node", "--device", "tpu"], "tpu"),
    "no public node without a token": (["node", "--bind", "0.0.0.0:0"], "token"),
}
ERROR_CASES = [
    *(pytest.param(*case, id=name) for name, case in ERRORS.items()),
    *(pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in SLOW_ERRORS.items()),
]


@pytest.mark.parametrize(("command", "word"), ERROR_CASES)
def test_an_error_is_one_line_and_status_1(tmp_path: Path, command: list[str], word: str) -> None:
    places = {"MODEL": str(endless_model(tmp_path)), "PORT": str(free_port())}
    for name, value in places.items():
        command = [part.replace(name, value) for part in command]
        word = word.replace(name, value)
    done = run(*command)
    assert done.returncode == 1, done.stderr
    assert word in done.stderr
    assert "Traceback" not in done.stdout
    assert "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert done.stderr.splitlines()[-1] == errors[0]


@pytest.mark.parametrize(
    "command",
    [
        ["coordinator", "no-such-command"],
        ["coordinator", "serve", "--no-such-option"],
        ["coordinator", "serve", "--dtype", "int3"],
        ["node", "--memory", "a lot"],
    ],
    ids=" ".join,
)
def test_a_wrong_word_is_a_usage_error(command: list[str]) -> None:
    done = run(*command)
    assert done.returncode == 2
    assert command[-1] in done.stderr
    assert "Traceback" not in done.stderr


async def test_a_port_in_use_is_one_line(tmp_path: Path, processes: Children) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        model = str(endless_model(tmp_path))
        for options in (["--rpc-bind", f"127.0.0.1:{port}", "--port", "0"], ["--port", port]):
            if options[0] == "--port":
                options += ["--rpc-bind", "127.0.0.1:0"]
            child = processes.start("coordinator", "serve", "--model", model, *options)
            assert await child.wait() == 1
            lines = [line for line in child.output().splitlines() if line.startswith("error: ")]
            assert len(lines) == 1
            assert port in lines[0]
            assert "Traceback" not in child.output()


async def test_status_of_a_running_cluster(tmp_path: Path, processes: Children) -> None:
    async with start_cluster(endless_model(tmp_path)) as cluster, cluster.http() as client:
        await assert_answers(client, 5)
        address = ("--coordinator", cluster.coordinator.rpc_address)
        shown = processes.start("coordinator", "status", *address, "--json")
        assert await shown.wait() == 0, shown.output()
        assert shown.process.stdout is not None
        status = json.loads(shown.process.stdout.read())
        assert [node["state"] for node in status["nodes"]] == ["ready", "ready"]
        (deployment,) = status["deployments"]
        assert deployment["model"] == "model"
        assert deployment["state"] == "ready"
        assert [s["node_id"] for s in deployment["stages"]] == ["node-1", "node-2"]
        assert int(deployment["generated_tokens"]) == 5

        table = processes.start("coordinator", "status", *address, env={"COLUMNS": "200"})
        assert await table.wait() == 0, table.output()
        assert table.process.stdout is not None
        text = table.process.stdout.read().decode()
        assert all(word in text for word in ("node-1", "node-2", "ready", "0-1", "2-3")), text


def own_children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_nodes", [1, 3])
def test_generate_on_a_passing_cluster_leaves_nothing(tmp_path: Path, num_nodes: int) -> None:
    # The prompt ends with the assistant's line break, from which the walk goes on.
    walk = {ord("\n"): ord("A"), ord("A"): ord("B"), ord("B"): ord("C")}
    model = write_chain_model(tmp_path / "model", successors=walk)
    before = own_children()
    known = {p.pid for p in psutil.process_iter()}
    done = run(
        *("coordinator", "generate", "hello", "--nodes", str(num_nodes), "--json"),
        *("--model", str(model), "--threads", "1", "--memory", "1GiB", "--device", "cpu"),
        seconds=100,
        env={**os.environ, "STAGEMESH_TOKEN": "of-another-cluster"},
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["text"] == "ABC"
    assert answer["finish_reason"] == "stop"
    assert len(answer["placement"]["stages"]) == num_nodes
    assert own_children() == before
    assert [p for p in psutil.process_iter() if p.pid not in known and is_node(p)] == []


def is_node(process: psutil.Process) -> bool:
    try:
        return process.cmdline()[1:3] == ["-m", "node"] and "generate" not in process.cmdline()
    except psutil.Error:
        return False


@pytest.mark.slow
async def test_a_node_daemon_ends_with_status_0_within_its_grace(
    tmp_path: Path, processes: Children
) -> None:
    model = endless_model(tmp_path)
    async with start_cluster(model, num_nodes=0, min_nodes=1) as cluster:
        node = processes.node("node-1", cluster.coordinator.rpc_address)
        await cluster.wait_ready(40)
        assert await cluster.generate([ord("A")], 4) == list(expected_text(4).encode())
        signalled_at = time.monotonic()
        node.signal(signal.SIGTERM)
        assert await node.wait(seconds=10) == 0, node.output()
        assert time.monotonic() - signalled_at < 6
        assert "Traceback" not in node.output()
        assert [m.state for m in cluster.coordinator.cluster.registry.members] == ["left"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_serve_ends_with_status_0_on_a_signal(
    tmp_path: Path, processes: Children, number: int
) -> None:
    child = processes.start(
        "coordinator",
        *("serve", "--model", str(endless_model(tmp_path)), "--json"),
        *("--port", "0", "--rpc-bind", "127.0.0.1:0"),
    )
    await child.next_event("listening")
    child.signal(number)
    signalled_at = time.monotonic()
    assert await child.wait(seconds=10) == 0, child.output()
    assert time.monotonic() - signalled_at < 6
    assert "Traceback" not in child.output()


def test_a_node_without_torch_says_what_to_install(tmp_path: Path) -> None:
    # A module of that name that is not there to be found, however the interpreter looks for it.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n"
        "            raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
        "sys.meta_path.insert(0, Missing())\n"
    )
    result = subprocess.run(
        [sys.executable, "-m", "node"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr.startswith("error: a node needs the package torch")
    assert "pip install 'stagemesh[node]'" in result.stderr
    assert "Traceback" not in result.stderr
