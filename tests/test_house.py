"""House rules that no linter knows: borders between packages, threads and formats."""

import ast
import functools
import importlib.metadata
import re
import statistics
import subprocess
import sys
import time
import tokenize
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
GENERATED = "stagemesh/rpc/v1/"
SOURCES = sorted(
    path.relative_to(ROOT).as_posix()
    for package in ("stagemesh", "node", "coordinator")
    for path in (ROOT / package).rglob("*.py")
    if GENERATED not in path.as_posix()
)

# Where the event loop and threads meet; everything else is on one side.
THREAD_BORDERS = {
    "node/executor.py": "loop to the device's compute thread",
    "coordinator/hub.py": "downloads at the same time, before there is a loop",
    "coordinator/planning_thread.py": "loop to the planner's arithmetic",
    "stagemesh/comm/comm_loop.py": "compute threads to the loop, and the loop's own thread",
    "stagemesh/comm/large_copies.py": "copies of large tensors off the loop",
    "stagemesh/comm/torch_engine.py": "torch's calls block: a thread for each group",
    "stagemesh/comm/gloo_opener.py": "and so does connecting",
    "stagemesh/comm/gloo_transport.py": "and its store",
    "stagemesh/rpc/codec.py": "packing large tensors off the loop",
    "stagemesh/torch_backend/backend.py": "callbacks of torch's futures, off the loop",
    "stagemesh/weight_transfer/disk_threads.py": "loop to disks: weights are read and hashed",
}
CROSSING = re.compile(
    r"\b(run_coroutine_threadsafe|run_in_executor|to_thread|ThreadPoolExecutor"
    r"|ProcessPoolExecutor|threading\.Thread|call_soon_threadsafe)\b"
)

# Nothing that arrives may become code.
FORBIDDEN_CODE = re.compile(
    r"(?<![\w.])(eval|exec|compile)\s*\(|\b(pickle|cPickle|dill|marshal|shelve|joblib)\b"
    r"|\btorch\.load\b|\byaml\.(unsafe_)?load\b"
)

# Who may name the generated messages; all else uses our own types.
STUB_USERS = {
    "stagemesh/rpc/codec.py": "tensors and their messages",
    "stagemesh/rpc/convert.py": "steps, results and versions and their messages",
    "stagemesh/comm/frames.py": "frames of the comm service and their messages",
    "stagemesh/comm/driver_calls.py": "what drivers ask of the comm service",
    "stagemesh/comm/grpc_transport.py": "speaks the comm service",
    "stagemesh/comm/member_record.py": "members of groups as messages",
    "stagemesh/comm/peer_link.py": "client of the comm service",
    "stagemesh/comm/service.py": "serves the comm service",
    "stagemesh/comm/coordinator_meeting.py": "client of the coordinator's service",
    "stagemesh/weight_transfer/manifest.py": "models and their messages",
    "stagemesh/weight_transfer/part_messages.py": "parts of tensors and their messages",
    "stagemesh/weight_transfer/service.py": "serves the weight service",
    "node/weight_source.py": "client of weight services",
    "node/service.py": "serves the node service",
    "node/stage_group.py": "the ranks of a stage and their messages",
    "node/status.py": "answers of the node service",
    "node/daemon.py": "registers what it serves",
    "node/profile_service.py": "serves the profile service",
    "stagemesh/rpc/probe.py": "client of a node's profile service",
    "node/next_stage.py": "client of the next node's service",
    "node/registration.py": "client of the coordinator's service",
    "coordinator/service.py": "serves the coordinator's service",
    "coordinator/server.py": "registers what it serves",
    "coordinator/node_link.py": "client of the node service",
    "coordinator/load_order.py": "its messages about loading",
    "coordinator/measuring.py": "client of the nodes' profile service",
    "coordinator/profile_messages.py": "measured nodes and links and their messages",
    "coordinator/commands/status.py": "client of the coordinator's service",
    "coordinator/commands/measured_tables.py": "prints its answers",
    "coordinator/commands/render.py": "prints its answers",
}


@functools.cache
def code_of(path: str) -> str:
    """The file's tokens without comments and texts: names that are only mentioned do not count."""
    with (ROOT / path).open("rb") as file:
        kept = [
            token.string
            for token in tokenize.tokenize(file.readline)
            if token.type in (tokenize.NAME, tokenize.OP, tokenize.NUMBER)
            or token.type in (tokenize.NEWLINE, tokenize.NL)
        ]
    return re.sub(r" ?([.(]) ?", r"\1", " ".join(kept))


def offenders(pattern: re.Pattern[str], *, allowed: set[str]) -> list[str]:
    return [
        f"{path}: {match.group()}"
        for path in SOURCES
        if path not in allowed
        for match in pattern.finditer(code_of(path))
    ]


def imported_names(source: str) -> set[str]:
    """All modules and names that a source imports, at any depth."""
    names: set[str] = set()
    for item in ast.walk(ast.parse(source)):
        if isinstance(item, ast.Import):
            names |= {alias.name for alias in item.names}
        elif isinstance(item, ast.ImportFrom):
            names |= {f"{item.module}.{alias.name}" for alias in item.names}
    return names


def names_stubs(source: str) -> bool:
    return any(
        part.endswith(("_pb2", "_pb2_grpc"))
        for name in imported_names(source)
        for part in name.split(".")
        if name.startswith("stagemesh.rpc")
    )


def test_threads_meet_the_loop_only_at_the_borders() -> None:
    assert offenders(CROSSING, allowed=set(THREAD_BORDERS)) == []


def test_nothing_that_arrives_becomes_code() -> None:
    assert offenders(FORBIDDEN_CODE, allowed=set()) == []


def test_stubs_are_named_only_at_the_edge() -> None:
    naming = {path for path in SOURCES if names_stubs((ROOT / path).read_text())}
    assert sorted(naming - STUB_USERS.keys()) == []


@pytest.mark.parametrize(
    ("pattern", "line", "is_caught"),
    [
        (CROSSING, "await asyncio.to_thread(work)", True),
        (CROSSING, "threading.Thread(target=work)", True),
        (CROSSING, "text = 'asyncio.to_thread'  # threading.Thread", False),
        (FORBIDDEN_CODE, "import pickle", True),
        (FORBIDDEN_CODE, "torch.load(path)", True),
        (FORBIDDEN_CODE, "value = eval (text)", True),
        (FORBIDDEN_CODE, "model.eval()", False),
        (FORBIDDEN_CODE, "re.compile(text)", False),
        (FORBIDDEN_CODE, "yaml.safe_load(text)", False),
    ],
)
def test_the_guards_see_what_they_should(
    tmp_path: Path, pattern: re.Pattern[str], line: str, is_caught: bool
) -> None:
    """Negative controls, through the same tokenizing."""
    path = tmp_path / "sample.py"
    path.write_text(f"{line}\n")
    assert bool(pattern.search(code_of(str(path)))) is is_caught


def test_the_stub_guard_sees_each_form_of_import() -> None:
    assert names_stubs("from stagemesh.rpc.v1 import node_pb2")
    assert names_stubs("from stagemesh.rpc.v1.node_pb2_grpc import NodeStub")
    assert names_stubs("def f():\n    import stagemesh.rpc.v1.node_pb2")
    assert not names_stubs("from grpc_health.v1 import health_pb2")


def modules_of(*parts: str) -> list[str]:
    """Dotted names of the modules below these packages or files."""
    return [
        path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in SOURCES
        if path.startswith(parts) and not path.endswith("__main__.py")
    ]


def heavy_after_importing(modules: list[str]) -> str:
    heavy = ("torch", "transformers", "safetensors")
    code = (
        f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
        f"print(' '.join(name for name in {heavy!r} if name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.parametrize(
    "modules",
    [
        ["coordinator.cli", *modules_of("coordinator/")],
        ["node.cli"],  # --help must be quick there too; torch comes when the daemon starts
        modules_of(
            "stagemesh/checkpoint/",
            "stagemesh/telemetry/",
            "stagemesh/errors.py",
            "stagemesh/layout.py",
            "stagemesh/log.py",
            "stagemesh/model_spec.py",
            "stagemesh/steps.py",
            "stagemesh/version.py",
        ),
    ],
    ids=["coordinator", "node.cli", "ground floor"],
)
def test_no_torch_where_none_is_needed(modules: list[str]) -> None:
    assert len(modules) == 1 or len(modules) > 10
    assert heavy_after_importing(modules) == ""


def test_torch_would_be_noticed() -> None:
    """Negative control, with the smallest of the three."""
    assert heavy_after_importing(["safetensors"]) == "safetensors"


@pytest.mark.parametrize("module", ["coordinator", "node"])
def test_help_is_quick(module: str) -> None:
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, timeout=20
        )
        seconds.append(time.perf_counter() - started)
        assert done.returncode == 0, done.stderr.decode()[-2000:]
        assert b"Usage:" in done.stdout
    assert statistics.median(seconds) < 0.5


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def declared() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    texts = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *project["project"]["optional-dependencies"]["node"],
        *project["dependency-groups"]["dev"],
    ]
    return [Requirement(text) for text in texts]


def test_every_declared_dependency_is_pinned_within_its_range() -> None:
    known = pins()
    wrong = [str(r) for r in declared() if known.get(canonicalize_name(r.name)) not in r.specifier]
    assert wrong == []


def test_what_the_dependencies_need_is_pinned_too() -> None:
    """Walks what is installed here, markers and extras included, and asks for a pin of each."""
    known, missing = pins(), set()
    waiting = [(canonicalize_name(r.name), frozenset(r.extras)) for r in declared()]
    seen = set(waiting)
    while waiting:
        name, extras = waiting.pop()
        if name not in known:
            missing.add(name)
        for text in installed_requirements(name):
            need = Requirement(text)
            marker = need.marker
            if marker and not any(marker.evaluate({"extra": e}) for e in (extras or {""})):
                continue
            entry = (canonicalize_name(need.name), frozenset(need.extras))
            if entry not in seen:
                seen.add(entry)
                waiting.append(entry)
    assert len(seen) > 60
    assert missing == set()


def installed_requirements(name: str) -> list[str]:
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []  # the build backend: pip installs it apart
