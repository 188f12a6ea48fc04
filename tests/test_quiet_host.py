"""Whether other processes compute on this host, with processes that do."""

import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from node import quiet_host
from node.quiet_host import until_quiet


@pytest.fixture
def busy_process() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield
    process.kill()
    process.wait()


def young(monkeypatch: pytest.MonkeyPatch, *, age: float) -> None:
    monkeypatch.setattr(psutil.Process, "create_time", lambda _: time.time() - age)


@pytest.mark.usefixtures("busy_process")
async def test_a_young_daemon_waits_for_others_and_not_forever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    young(monkeypatch, age=1.0)
    monkeypatch.setattr(quiet_host, "_MOST_SECONDS", 1.0)
    started = time.monotonic()
    assert not await until_quiet()
    assert 0.8 < time.monotonic() - started < 3


@pytest.mark.usefixtures("busy_process")
async def test_an_older_one_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    young(monkeypatch, age=60.0)
    started = time.monotonic()
    assert not await until_quiet()
    assert time.monotonic() - started < 0.2


async def test_it_ends_once_the_host_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else runs where this test does is taken for idle; this process never counts."""
    young(monkeypatch, age=1.0)
    monkeypatch.setattr(quiet_host, "_BUSY_CORES", psutil.cpu_count())
    started = time.monotonic()
    assert await until_quiet()
    assert time.monotonic() - started < 1
