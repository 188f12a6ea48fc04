"""Memory that ranks share: who can use it, when it is gone, and a peer that dies at it."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stagemesh.comm import direct_opener, direct_region
from stagemesh.comm.direct_group import DirectGroup
from stagemesh.comm.direct_memory import MemoryLinks
from stagemesh.comm.direct_region import SLOT_BYTES, make_region, open_region, remove_name
from stagemesh.comm.direct_sockets import SocketLinks
from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import PeerLost
from tests.comm.direct_rank import join
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    not direct_region.can_share(2), reason="no shared memory on this machine"
)


def test_a_region_is_found_by_its_secret_until_its_name_is_removed() -> None:
    made = make_region("secret", 3)
    assert made is not None
    try:
        assert make_region("secret", 3) is None, "made anew, never taken over"
        assert open_region("another", 3) is None
        assert open_region("secret", 2) is None, "of another size"
        opened = open_region("secret", 3)
    finally:
        remove_name("secret")
    assert open_region("secret", 3) is None
    assert opened is not None
    for source in range(3):
        for target in {0, 1, 2} - {source}:
            for turn in (0, 1):
                slot = made.slots(source, target)[turn]
                slot.number[0] = 100 * source + 10 * target + turn
                slot.payload[-1] = source + target
    for source in range(3):
        for target in {0, 1, 2} - {source}:
            for turn in (0, 1):
                slot = opened.slots(source, target)[turn]
                assert slot.number[0] == 100 * source + 10 * target + turn
                assert len(slot.payload) == SLOT_BYTES
                assert slot.payload[-1] == source + target


def test_another_file_of_the_name_is_no_region() -> None:
    made = make_region("secret of another", 2)
    assert made is not None
    try:
        made.memory[0] ^= 1
        assert open_region("secret of another", 2) is None
    finally:
        remove_name("secret of another")


def links_of_two(**settings: Any) -> set[type]:
    def on_rank(group: ProcessGroup) -> type:
        direct = DirectGroup(group)
        direct.connect(within_process=True, **settings)
        try:
            with torch.inference_mode():
                assert direct.all_reduce(torch.full((3,), group.rank + 1.0)).tolist() == [3] * 3
            return type(direct.links)
        finally:
            direct.close()

    return set(run_ranks(2, on_rank, backend="grpc"))


def _fails(*_: Any) -> None:
    raise OSError("no space left")


@pytest.mark.parametrize(
    ("target", "name", "replacement"),
    [
        (os, "posix_fallocate", _fails),
        (direct_opener, "open_region", lambda *_: None),
        (os, "sched_getaffinity", lambda _: {0}),
        (direct_region.platform, "machine", lambda: "aarch64"),
    ],
    ids=["it is full", "one rank cannot see it", "one core", "stores may overtake"],
)
def test_where_memory_cannot_be_shared_all_use_sockets(
    monkeypatch: pytest.MonkeyPatch, target: Any, name: str, replacement: Callable[..., Any]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    before = set(Path("/dev/shm").iterdir())
    assert links_of_two() == {MemoryLinks}
    monkeypatch.setattr(target, name, replacement)
    assert links_of_two() == {SocketLinks}
    left = set(Path("/dev/shm").iterdir()) - before
    assert not [path for path in left if path.name.startswith("stagemesh-")]


@pytest.mark.parametrize(
    ("cores", "is_enough"),
    [
        ([[0], [1]], True),
        ([[0, 1], [0]], True),
        ([[0, 1], [1], [0, 2]], True),
        ([[0], [0]], False),
        ([[0], [0], [1, 2]], False),
        ([[0, 1]] * 3, False),
    ],
)
def test_ranks_share_memory_where_each_can_have_a_core(
    cores: list[list[int]], *, is_enough: bool
) -> None:
    """Also ranks that are bound to one."""
    told = [
        direct_opener._Told(
            process=str(rank), host="here", cores=own, address="", secret="", can_share=True
        )
        for rank, own in enumerate(cores)
    ]
    assert direct_opener._has_cores(0, told) == is_enough


@pytest.mark.slow
@pytest.mark.parametrize("waits", [True, False], ids=["while one waits", "before the call"])
def test_a_killed_rank_is_named_long_before_the_deadline(tmp_path: Path, *, waits: bool) -> None:
    command = [sys.executable, "-m", "tests.comm.direct_rank", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        try:
            with join(str(tmp_path), 0) as group:
                direct = DirectGroup(group)
                direct.connect()
                with torch.inference_mode():
                    assert direct.all_reduce(torch.ones(3)).tolist() == [2, 2, 2]
                    assert other.stdout is not None
                    told = other.stdout.readline()
                    kind = type(direct.links)
                    assert told == f"{kind.__name__} [2.0, 2.0, 2.0]\n"
                    assert kind is (
                        MemoryLinks if len(os.sched_getaffinity(0)) > 1 else SocketLinks
                    )
                    if waits:
                        threading.Timer(0.1, other.kill).start()
                    else:
                        other.kill()
                        other.wait()
                    started = time.monotonic()
                    with pytest.raises(PeerLost, match="rank 1 is lost"):
                        direct.all_reduce(torch.ones(3))
                    assert time.monotonic() - started < 10
        finally:
            other.kill()
