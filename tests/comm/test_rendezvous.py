"""How ranks meet: by list, folder, store and coordinator; and what each says when it fails."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.config import CoordinatorConfig, DeploymentConfig
from coordinator.server import Coordinator
from stagemesh.comm.backends import GroupConfig, init_process_group
from stagemesh.comm.comm_loop import CommLoop
from stagemesh.comm.coordinator_meeting import CoordinatorMeeting
from stagemesh.comm.local_hub import LocalHub
from stagemesh.comm.peer_link import PeerAddress
from stagemesh.comm.process_group import ProcessGroup
from stagemesh.comm.rendezvous import AddressList, Arrival, Meeting, Rendezvous, SharedFolder
from stagemesh.comm.tcp_store import TcpStoreMeeting, torchrun_meeting
from stagemesh.errors import (
    CollectiveTimeout,
    ConfigError,
    PeerLost,
    ProtocolError,
    Unauthenticated,
)
from tests.support.checkpoints import write_byte_tokenizer, write_tiny_checkpoint


@pytest.fixture(scope="module")
def loop():
    with CommLoop() as running:
        yield running


def arrival(rank: int | None, world_size: int | None, **changes: Any) -> Arrival:
    settings: dict[str, Any] = {
        "group_id": "g",
        "address": f"127.0.0.1:{1000 + (rank or 0)}",
        "node_id": f"n{rank}",
        "unix_path": f"/run/{rank}",
        "host_id": "here",
        "rank": rank,
        "world_size": world_size,
        "timeout_seconds": 10.0,
    }
    return Arrival(**(settings | changes))


def everybody(world_size: int) -> tuple[PeerAddress, ...]:
    """What each rank must learn of all: whole records, not only addresses."""
    return tuple(
        PeerAddress(
            rank=rank,
            node_id=f"n{rank}",
            address=f"127.0.0.1:{1000 + rank}",
            unix_path=f"/run/{rank}",
            host_id="here",
        )
        for rank in range(world_size)
    )


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """What each call gives, run on threads of their own; an error in the place of its result."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.exception(30) or future.result() for future in futures]


def meet_all(
    rendezvous: Callable[[int], Rendezvous], world_size: int, loop: CommLoop, **changes: Any
) -> list[Any]:
    return together(
        [
            lambda rank=rank: rendezvous(rank).meet(arrival(rank, world_size, **changes), loop=loop)
            for rank in range(world_size)
        ]
    )


def sum_of_ranks(group: ProcessGroup) -> float:
    with group:
        return group.all_reduce(torch.tensor([group.rank + 1.0])).item()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def store_meeting(rank: int, world_size: int, port: int, **changes: Any) -> TcpStoreMeeting:
    return TcpStoreMeeting(
        host="127.0.0.1",
        port=port,
        rank=rank,
        world_size=world_size,
        is_server=rank == 0,
        **changes,
    )


# --- a list of addresses


def test_a_list_makes_a_group(loop: CommLoop):
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]

    def run(rank: int) -> float:
        config = GroupConfig(
            rendezvous=AddressList(addresses=addresses), rank=rank, timeout_seconds=10
        )
        return sum_of_ranks(init_process_group(config, loop=loop))

    assert together([lambda: run(0), lambda: run(1)]) == [3.0, 3.0]


@pytest.mark.parametrize(
    ("addresses", "rank", "world_size", "text"),
    [
        (["h:1", "h:2"], 2, None, r"\[0, 2\)"),
        (["h:1", "h:2"], None, None, "rank must be set"),
        (["h:1", "h:2"], 0, 3, "2 addresses are given"),
        (["h:1", "h"], 0, None, "must be host:port"),
    ],
)
def test_wrong_lists_are_refused(addresses, rank, world_size, text, loop: CommLoop):
    with pytest.raises(ConfigError, match=text):
        AddressList(addresses=addresses).meet(arrival(rank, world_size), loop=loop)


# --- a folder


def test_ranks_meet_in_a_folder_whose_group_has_any_name(tmp_path: Path, loop: CommLoop):
    folder = SharedFolder(path=tmp_path / "new" / "er")
    met = meet_all(lambda _: folder, 3, loop, group_id="../tp/0 x")
    assert [meeting.rank for meeting in met] == [0, 1, 2]
    assert {meeting.members for meeting in met} == {everybody(3)}
    assert [path.parent for path in tmp_path.rglob("*.json")] == [tmp_path / "new" / "er"] * 3
    assert not list(tmp_path.rglob("*.part"))


def test_a_folder_names_the_ranks_that_did_not_come(tmp_path: Path, loop: CommLoop):
    folder = SharedFolder(path=tmp_path)
    start = time.monotonic()
    with pytest.raises(CollectiveTimeout, match=r"rank 0, 2 of 3 did not come to"):
        folder.meet(arrival(1, 3, timeout_seconds=0.3), loop=loop)
    assert time.monotonic() - start < 2


def test_after_a_failure_a_folder_can_be_used_again(tmp_path: Path, loop: CommLoop):
    folder = SharedFolder(path=tmp_path)
    with pytest.raises(CollectiveTimeout):
        folder.meet(arrival(0, 2, timeout_seconds=0.1), loop=loop)
    assert all(isinstance(met, Meeting) for met in meet_all(lambda _: folder, 2, loop))


def test_a_folder_that_was_used_needs_a_higher_incarnation(tmp_path: Path, loop: CommLoop):
    meet_all(lambda _: SharedFolder(path=tmp_path), 2, loop)
    with pytest.raises(ConfigError, match="used before"):
        SharedFolder(path=tmp_path).meet(arrival(0, 2), loop=loop)
    again = meet_all(lambda _: SharedFolder(path=tmp_path, incarnation=2), 2, loop)
    assert [meeting.incarnation for meeting in again] == [2, 2]


def test_a_folder_refuses_another_world_size(tmp_path: Path, loop: CommLoop):
    folder = SharedFolder(path=tmp_path)
    results = together(
        [
            lambda: folder.meet(arrival(0, 2, timeout_seconds=0.5), loop=loop),
            lambda: folder.meet(arrival(1, 3, timeout_seconds=0.5), loop=loop),
        ]
    )
    assert any(
        isinstance(result, ConfigError) and "disagree about world_size" in str(result)
        for result in results
    )
    assert not any(isinstance(result, Meeting) for result in results)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"address": 5, "node_id": "n", "world_size": 2}',
        '{"address": "h:1", "world_size": 2}',
        '{"address": "h:1", "node_id": "n", "unix_path": 5, "world_size": 2}',
        '{"address": "h:1", "node_id": "n", "host_id": "%s", "world_size": 2}' % ("x" * 2000),
    ],
)
def test_a_folder_refuses_a_file_that_is_no_ranks(content: str, tmp_path: Path, loop: CommLoop):
    (tmp_path / "g.1.rank1.json").write_text(content)
    with pytest.raises(ProtocolError, match=r"rank1\.json is not the file of a rank"):
        SharedFolder(path=tmp_path).meet(arrival(0, 2, timeout_seconds=1), loop=loop)


def test_of_two_processes_with_one_rank_one_is_refused(tmp_path: Path, loop: CommLoop):
    """The other had looked before the first one's file was there."""
    folder = SharedFolder(path=tmp_path)
    other = {"address": "127.0.0.1:7", "node_id": "n", "world_size": 2, "nonce": "theirs"}

    def replace() -> None:
        own = tmp_path / "g.1.rank0.json"
        while not own.exists():
            time.sleep(0.01)
        own.write_text(json.dumps(other))
        (tmp_path / "g.1.rank1.json").write_text(json.dumps(other))

    thread = threading.Thread(target=replace)
    thread.start()
    with pytest.raises(ConfigError, match=r"two processes have rank 0: 127\.0\.0\.1:7"):
        folder.meet(arrival(0, 2), loop=loop)
    thread.join(10)


# --- torch's store


def test_ranks_meet_at_a_store(loop: CommLoop):
    port = free_port()
    met = meet_all(lambda rank: store_meeting(rank, 3, port, incarnation=4), 3, loop)
    assert [meeting.rank for meeting in met] == [0, 1, 2]
    assert {(m.members, m.incarnation) for m in met} == {(everybody(3), 4)}


def test_a_store_refuses_what_is_no_record(loop: CommLoop):
    port = free_port()
    meeting = store_meeting(0, 2, port)
    store = meeting._connect(5.0)
    store.set("stagemesh/g/1/1", "127.0.0.1:7")
    with pytest.raises(ProtocolError, match=r"g/1/1 in the store at .* no record"):
        replace(meeting, is_server=False).meet(arrival(0, 2), loop=loop)


def test_a_store_names_the_ranks_that_did_not_come(loop: CommLoop):
    meeting = store_meeting(0, 3, free_port())
    with pytest.raises(CollectiveTimeout, match="rank 1, 2 of 3"):
        meeting.meet(arrival(0, 3, timeout_seconds=0.5), loop=loop)


@pytest.mark.filterwarnings("ignore")
def test_a_store_that_nobody_serves(loop: CommLoop):
    with pytest.raises(PeerLost, match=r"check that the process that serves it \(rank 0"):
        store_meeting(1, 2, free_port()).meet(arrival(1, 2, timeout_seconds=1.0), loop=loop)


def test_a_port_that_is_taken(loop: CommLoop):
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        meeting = store_meeting(0, 2, taken.getsockname()[1])
        with pytest.raises(ConfigError, match="choose another MASTER_PORT"):
            meeting.meet(arrival(0, 2), loop=loop)


TORCHRUN = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "RANK": "0", "WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("changes", "is_server", "incarnation"),
    [
        ({}, True, 1),
        ({"RANK": "3"}, False, 1),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True"}, False, 1),
        ({"TORCHELASTIC_RESTART_COUNT": "2"}, True, 3),
    ],
)
def test_what_torchrun_says(changes: dict[str, str], is_server: bool, incarnation: int):
    meeting = torchrun_meeting(TORCHRUN | changes)
    assert (meeting.host, meeting.port, meeting.world_size) == ("10.0.0.1", 29500, 4)
    assert (meeting.is_server, meeting.incarnation) == (is_server, incarnation)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"RANK": ""}, "RANK not set"),
        ({"MASTER_ADDR": "", "WORLD_SIZE": ""}, "MASTER_ADDR, WORLD_SIZE not set"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT must be a number"),
        ({"RANK": "4"}, "got 4 of 4"),
    ],
)
def test_what_torchrun_would_not_say(changes: dict[str, str], text: str):
    with pytest.raises(ConfigError, match=text):
        torchrun_meeting(TORCHRUN | changes)


@pytest.mark.parametrize(("rank", "world_size"), [(1, None), (None, 3)])
def test_what_the_environment_says_otherwise_is_refused(rank, world_size, loop: CommLoop):
    with pytest.raises(ConfigError, match="but the environment says"):
        store_meeting(0, 2, 1).meet(arrival(rank, world_size), loop=loop)


SCRIPT = """
import os, torch
from stagemesh.comm.backends import GroupConfig, init_process_group
from stagemesh.comm.tcp_store import torchrun_meeting

config = GroupConfig(rendezvous=torchrun_meeting(os.environ), timeout_seconds=30)
with init_process_group(config) as group:
    total = group.all_reduce(torch.tensor([group.rank + 1.0])).item()
    with open(os.environ["OUT"] + str(group.rank), "w") as out:
        out.write(f"{total} {group.size}")
"""


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--standalone", "--nproc-per-node=2", str(script)),
        ],
        env={**os.environ, "OUT": str(tmp_path / "out"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=55,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [(tmp_path / f"out{rank}").read_text() for rank in (0, 1)] == ["3.0 2"] * 2


# --- a coordinator


@contextlib.contextmanager
def running_coordinator(loop: CommLoop, tmp_path: Path) -> Iterator[CoordinatorMeeting]:
    """On the loop of the groups."""
    model = write_tiny_checkpoint(tmp_path / "model", vocab_size=260, num_layers=1)
    write_byte_tokenizer(model)
    config = CoordinatorConfig(
        deployments=(DeploymentConfig(model=str(model)),), http_port=None, token="t"
    )

    async def start() -> Coordinator:
        return await Coordinator(replace(config, rpc_bind="127.0.0.1:0")).__aenter__()

    server = loop.run(start(), timeout=20)
    yield CoordinatorMeeting(address=server.rpc_address, token="t")
    loop.run(server.__aexit__(None, None, None), timeout=20)


@pytest.fixture
def coordinator(loop: CommLoop, tmp_path: Path) -> Iterator[CoordinatorMeeting]:
    with running_coordinator(loop, tmp_path) as meeting:
        yield meeting


def test_a_coordinator_assigns_ranks_and_a_group_works(coordinator, loop: CommLoop):
    def run(rank: int | None) -> tuple[int, int, float]:
        config = GroupConfig(
            rendezvous=coordinator, rank=rank, world_size=3, group_id="t", timeout_seconds=10
        )
        group = init_process_group(config, loop=loop)
        return group.rank, group.incarnation, sum_of_ranks(group)

    for incarnation in (1, 2):
        results = together([lambda: run(1), lambda: run(None), lambda: run(None)])
        assert results[0] == (1, incarnation, 6.0)
        assert {result[0] for result in results} == {0, 1, 2}
        assert {result[1:] for result in results} == {(incarnation, 6.0)}


def test_a_coordinator_names_the_ranks_that_did_not_come(coordinator, loop: CommLoop):
    with pytest.raises(CollectiveTimeout, match="1 of 3 are there; rank 0, 2 did not come"):
        coordinator.meet(arrival(1, 3, timeout_seconds=0.3), loop=loop)
    # Who has given up is not counted later.
    met = meet_all(lambda _: coordinator, 2, loop)
    assert [meeting.members for meeting in met] == [everybody(2)] * 2


def test_who_hangs_up_is_not_counted(coordinator, loop: CommLoop):
    async def hang_up() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await coordinator._ask(arrival(0, 2, address="gone:1"))

    loop.run(hang_up(), timeout=5)
    time.sleep(0.2)
    met = meet_all(lambda _: coordinator, 2, loop)
    assert {meeting.members for meeting in met} == {everybody(2)}


def test_a_coordinator_names_a_world_size_that_differs(coordinator, loop: CommLoop):
    results = together(
        [
            lambda: coordinator.meet(arrival(0, 2, timeout_seconds=1), loop=loop),
            lambda: coordinator.meet(arrival(1, 3, timeout_seconds=1), loop=loop),
        ]
    )
    assert any(isinstance(r, ConfigError) and "all ranks must say" in str(r) for r in results)


def test_a_coordinator_bounds_the_wait(coordinator, loop: CommLoop):
    with pytest.raises(ConfigError, match="timeout_seconds must be in"):
        loop.run(coordinator._ask(arrival(0, 2, timeout_seconds=1e9)), timeout=5)


def test_a_coordinator_wants_its_token(coordinator, loop: CommLoop):
    stranger = CoordinatorMeeting(address=coordinator.address, token="other")
    with pytest.raises(Unauthenticated):
        stranger.meet(arrival(0, 1), loop=loop)
    assert "other" not in repr(stranger)


def test_a_coordinator_that_is_not_there(loop: CommLoop):
    nobody = CoordinatorMeeting(address=f"127.0.0.1:{free_port()}")
    with pytest.raises(PeerLost, match="could not be reached"):
        nobody.meet(arrival(0, 1, timeout_seconds=0.3), loop=loop)
    with pytest.raises(ConfigError, match="world_size must be set"):
        nobody.meet(arrival(0, None), loop=loop)


@pytest.mark.slow
def test_the_example_runs_with_two_addresses():
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    script = Path(__file__).parents[2] / "examples" / "all_reduce.py"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), *addresses],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ended = [process.communicate(timeout=50) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [out for out, _ in ended] == [
        f"rank {rank} of 2: [3.0, 3.0, 3.0, 3.0]\n" for rank in range(2)
    ], ended


# --- the configuration


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"backend": "mpi"}, "backend must be one of local, grpc"),
        ({"backend": "local"}, "belong together"),
        ({"group_id": ""}, "group_id"),
        ({"timeout_seconds": 0}, "timeout_seconds"),
    ],
)
def test_wrong_configurations_are_refused(changes: dict[str, Any], text: str):
    settings: dict[str, Any] = {"rendezvous": AddressList(addresses=["127.0.0.1:1"])}
    with pytest.raises(ConfigError, match=text):
        GroupConfig(**(settings | changes))


def test_a_hub_needs_backend_local():
    with LocalHub() as hub:
        with pytest.raises(ConfigError, match="belong together"):
            GroupConfig(backend="grpc", rendezvous=hub)
        with pytest.raises(ConfigError, match="a LocalHub assigns none"):
            init_process_group(GroupConfig(backend="local", rendezvous=hub, rank=0))


def test_a_token_does_not_show():
    config = GroupConfig(rendezvous=AddressList(addresses=[]), token="secret")
    assert "secret" not in repr(config)


def test_what_fails_to_meet_leaves_no_thread_and_no_port(tmp_path: Path):
    before = {thread.name for thread in threading.enumerate()}
    port = free_port()
    config = GroupConfig(
        rendezvous=SharedFolder(path=tmp_path),
        rank=0,
        world_size=2,
        timeout_seconds=0.2,
        bind=f"127.0.0.1:{port}",
    )
    with pytest.raises(CollectiveTimeout, match="rank 1"):
        init_process_group(config)
    assert {thread.name for thread in threading.enumerate()} <= before
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


def test_a_group_without_a_loop_ends_its_own(tmp_path: Path):
    before = threading.active_count()

    def run(rank: int) -> float:
        config = GroupConfig(
            rendezvous=SharedFolder(path=tmp_path), rank=rank, world_size=1, timeout_seconds=10
        )
        return sum_of_ranks(init_process_group(config))

    assert run(0) == 1.0
    assert threading.active_count() == before
