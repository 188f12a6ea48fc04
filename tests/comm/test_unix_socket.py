"""Ranks of one host over unix sockets."""

import asyncio
import contextlib
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest
import torch

from stagemesh.comm.backends import GroupConfig, init_process_group
from stagemesh.comm.comm_loop import CommLoop
from stagemesh.comm.endpoint import CommEndpoint
from stagemesh.comm.peer_link import PeerAddress
from stagemesh.comm.process_group import ProcessGroup
from stagemesh.comm.rendezvous import Rendezvous, SharedFolder
from stagemesh.errors import CollectiveTimeout, ConfigError, PeerLost, Unauthenticated
from stagemesh.private_folder import remove_stale
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.server import RpcServer
from stagemesh.rpc.unix_socket import SocketFolder, host_id, is_reachable, target_of
from stagemesh.rpc.v1 import comm_pb2, comm_pb2_grpc
from tests.comm.test_rendezvous import free_port, running_coordinator, store_meeting, together

NOWHERE = "127.0.0.1:1"

pytestmark = pytest.mark.skipif(not host_id(), reason="this system tells no boot id")


@contextlib.asynccontextmanager
async def _groups(change: Callable[[PeerAddress], PeerAddress], **settings: Any):
    async with contextlib.AsyncExitStack() as stack:
        endpoints = [
            await stack.enter_async_context(
                CommEndpoint(node_id=f"n{rank}", **({"unix_socket": True} | settings))
            )
            for rank in range(2)
        ]
        members = [change(endpoint.member(rank)) for rank, endpoint in enumerate(endpoints)]
        yield [
            await endpoint.open_group(
                group_id="g", rank=rank, members=members, incarnation=1, timeout_seconds=3.0
            )
            for rank, endpoint in enumerate(endpoints)
        ]


async def _sums(groups, num_elements: int = 3) -> list[list[float]]:
    tensors = [torch.full((num_elements,), float(rank + 1)) for rank in range(2)]
    await asyncio.gather(
        *(group.all_reduce(tensor) for group, tensor in zip(groups, tensors, strict=True))
    )
    return [tensor.unique().tolist() for tensor in tensors]


def _connections_to(port: int) -> int:
    connections = psutil.Process().net_connections(kind="tcp")
    return sum(1 for each in connections if each.raddr and each.raddr.port == port)


@pytest.mark.parametrize("num_elements", [3, 400_000], ids=["one hop", "chunked"])
async def test_ranks_of_one_host_need_no_address(num_elements):
    async with _groups(lambda member: replace(member, address=NOWHERE)) as groups:
        assert await _sums(groups, num_elements) == [[3.0]] * 2


@pytest.mark.parametrize(
    "lost",
    [
        {"host_id": "another host"},
        {"host_id": ""},
        {"unix_path": ""},
        {"unix_path": "/nowhere/rpc.sock"},
        {"unix_path": __file__},
    ],
    ids=str,
)
async def test_without_a_socket_of_this_host_tcp_is_used(lost):
    async with _groups(lambda member: replace(member, **lost)) as groups:
        assert await _sums(groups) == [[3.0]] * 2
    # Control: it was the address that worked.
    async with _groups(lambda member: replace(member, address=NOWHERE, **lost)) as groups:
        with pytest.raises(CollectiveTimeout, match="rank 1"):
            await groups[0].send(torch.ones(1), dst=1, timeout=0.3)


async def test_the_socket_carries_the_tensors_and_no_connection_goes_to_the_port():
    for use_socket in (True, False):
        ports = []

        def change(member: PeerAddress, *, ports=ports, use_socket=use_socket) -> PeerAddress:
            ports.append(int(member.address.rpartition(":")[2]))
            return member if use_socket else replace(member, unix_path="")

        async with _groups(change) as groups:
            await _sums(groups)
            assert sum(map(_connections_to, ports)) == (0 if use_socket else 2)


@pytest.mark.parametrize("uses", [(True, True), (True, False), (False, True)])
async def test_both_ends_must_want_it(uses: tuple[bool, bool]):
    """A rank without the option neither offers a socket nor uses that of the other."""
    async with contextlib.AsyncExitStack() as stack:
        endpoints = [await stack.enter_async_context(CommEndpoint(unix_socket=use)) for use in uses]
        members = [endpoint.member(rank) for rank, endpoint in enumerate(endpoints)]
        assert [bool(member.unix_path) for member in members] == list(uses)
        groups = [
            await endpoint.open_group(
                group_id="g", rank=rank, members=members, incarnation=1, timeout_seconds=3.0
            )
            for rank, endpoint in enumerate(endpoints)
        ]
        assert await _sums(groups) == [[3.0]] * 2
        ports = [int(member.address.rpartition(":")[2]) for member in members]
        assert sum(map(_connections_to, ports)) == (0 if all(uses) else 2)


def _connections_of(group: ProcessGroup) -> tuple[int, float]:
    """How many TCP connections this process has to the group's ports, and a sum that worked."""
    total = group.all_reduce(torch.tensor([group.rank + 1.0])).item()
    group.barrier()
    count = sum(_connections_to(int(m.address.rpartition(":")[2])) for m in group._members)
    group.barrier()
    return count, total


@pytest.mark.parametrize("use", [True, False])
@pytest.mark.parametrize("meeting", ["folder", "store", "coordinator"])
def test_the_factory_and_subgroups_use_it_wherever_ranks_meet(
    meeting: str, use: bool, tmp_path: Path
):
    with contextlib.ExitStack() as stack:
        loop = stack.enter_context(CommLoop())
        port = free_port()
        head = (
            stack.enter_context(running_coordinator(loop, tmp_path))
            if meeting == "coordinator"
            else None
        )

        def rendezvous(rank: int) -> Rendezvous:
            if head is not None:
                return head
            if meeting == "store":
                return store_meeting(rank, 2, port)
            return SharedFolder(path=tmp_path)

        def run(rank: int) -> list[tuple[int, float]]:
            config = GroupConfig(
                rendezvous=rendezvous(rank),
                rank=rank,
                world_size=2,
                timeout_seconds=10,
                unix_socket=use,
            )
            with init_process_group(config, loop=loop) as group:
                whole = _connections_of(group)
                turned = group.subgroup([1, 0])
                assert turned is not None
                return [whole, _connections_of(turned)]

        results = together([lambda: run(0), lambda: run(1)])
        # Of each group one connection per direction, all of this process.
        expected = [(0, 3.0), (0, 3.0)] if use else [(2, 3.0), (4, 3.0)]
        assert results == [expected, expected]


async def test_the_folder_is_private_and_goes_with_the_server():
    async with RpcServer("127.0.0.1:0", services=[], unix_socket=True) as server:
        path = Path(server.unix_path)
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert is_reachable(server.unix_path, host=host_id())
    assert not path.parent.exists()
    assert server.unix_path == ""
    # Control: none is made unless it is asked for.
    async with RpcServer("127.0.0.1:0", services=[]) as server:
        assert server.unix_path == ""


ENDPOINT = """
import asyncio, sys
from stagemesh.comm.endpoint import CommEndpoint

async def main():
    async with CommEndpoint(unix_socket=True) as endpoint:
        print(endpoint.member(0).unix_path, flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""


@contextlib.contextmanager
def endpoint_process(folder: Path):
    """A process that serves a unix socket below the folder until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", ENDPOINT],
        env={**os.environ, "TMPDIR": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, Path(process.stdout.readline().strip())
        process.stdin.close()
        process.wait(timeout=20)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_what_a_killed_process_leaves_goes_when_the_next_one_starts(tmp_path):
    others = [tmp_path / "stagemesh-of-a-user", tmp_path / "stagemesh-file"]
    others[0].mkdir()
    (others[0] / "lock").symlink_to(__file__)
    others[1].write_text("not a folder")
    with (
        endpoint_process(tmp_path) as (_, alive),
        endpoint_process(tmp_path) as (process, killed),
    ):
        process.kill()
        process.wait()
        # Control: it does leave its socket behind.
        assert killed.is_socket()
        with endpoint_process(tmp_path) as (_, third):
            assert {path.parent for path in tmp_path.glob("*/*.sock")} == {
                alive.parent,
                third.parent,
            }
            for path in (alive, third):
                with socket.socket(socket.AF_UNIX) as probe:
                    probe.connect(str(path))
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_folders_that_are_being_made_are_not_taken_for_stale_ones(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def make_and_remove(_: int) -> None:
        for _ in range(50):
            folder = SocketFolder.make()
            assert folder is not None
            Path(folder.path).touch(exist_ok=False)
            remove_stale(tmp_path)
            assert Path(folder.path).exists()
            folder.remove()
            folder.remove()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(make_and_remove, range(8)))
    assert list(tmp_path.iterdir()) == []


async def test_a_server_that_cannot_listen_leaves_no_folder(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    async with RpcServer("127.0.0.1:0", services=[]) as first:
        with pytest.raises(ConfigError, match="cannot listen"):
            await RpcServer(first.address, services=[], unix_socket=True).start()
    assert list(tmp_path.iterdir()) == []


async def test_where_paths_are_too_long_the_server_goes_without(monkeypatch, tmp_path):
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    assert SocketFolder.make() is None
    async with RpcServer("127.0.0.1:0", services=[], unix_socket=True) as server:
        assert server.unix_path == ""
    assert list(deep.iterdir()) == []


async def test_the_token_is_asked_for_on_the_socket_too():
    async with _groups(lambda m: replace(m, address=NOWHERE), token="secret") as groups:
        assert await _sums(groups) == [[3.0]] * 2
    async with CommEndpoint(token="secret", unix_socket=True) as endpoint:
        target = target_of(endpoint.member(0).unix_path)
        channel = open_channel(target, token="guess", kind="control")
        stub = comm_pb2_grpc.CommServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.LeaveGroup(comm_pb2.LeaveGroupRequest(group_id="g"), timeout=5)
        await channel.close()
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_a_rank_with_another_token_is_refused_over_the_socket():
    async with (
        CommEndpoint(token="a", unix_socket=True) as first,
        CommEndpoint(token="b", unix_socket=True) as second,
    ):
        members = [replace(e.member(r), address=NOWHERE) for r, e in enumerate((first, second))]
        groups = [
            await endpoint.open_group(
                group_id="g", rank=rank, members=members, incarnation=1, timeout_seconds=3.0
            )
            for rank, endpoint in enumerate((first, second))
        ]
        with pytest.raises(Unauthenticated):
            await groups[0].send(torch.ones(1), dst=1)


async def test_a_peer_that_stops_is_found_lost_over_the_socket():
    async with _groups(lambda member: replace(member, address=NOWHERE)) as groups:
        assert await _sums(groups) == [[3.0]] * 2
        waiting = asyncio.ensure_future(groups[0].all_reduce(torch.ones(2)))
        await asyncio.sleep(0.05)
        await groups[1].close()
        with pytest.raises(PeerLost, match="rank 1"):
            await waiting
