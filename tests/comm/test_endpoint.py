"""Groups of plain processes: an endpoint serves them without a node daemon."""

import asyncio
import contextlib
import sys
from pathlib import Path

import pytest
import torch

from stagemesh.comm.endpoint import CommEndpoint
from stagemesh.comm.peer_link import PeerAddress
from stagemesh.errors import ConfigError, GroupAborted, PeerLost, Unauthenticated

SCRIPT = """
import asyncio, sys, torch
from stagemesh.comm.endpoint import CommEndpoint
from stagemesh.comm.peer_link import PeerAddress

async def main():
    async with CommEndpoint() as endpoint:
        print(endpoint.address, flush=True)
        other = await asyncio.to_thread(sys.stdin.readline)
        members = [
            PeerAddress(rank=0, node_id="a", address=other.strip()),
            PeerAddress(rank=1, node_id="b", address=endpoint.address),
        ]
        group = await endpoint.open_group(
            group_id="g", rank=1, members=members, incarnation=1, timeout_seconds=20
        )
        total = await group.all_reduce(torch.tensor([1.5, 2.0]))
        print(total.tolist(), "node" in sys.modules, flush=True)

asyncio.run(main())
"""


def members_of(endpoints: list[CommEndpoint]) -> list[PeerAddress]:
    return [
        PeerAddress(rank=rank, node_id=f"p{rank}", address=endpoint.address)
        for rank, endpoint in enumerate(endpoints)
    ]


async def open_pair(endpoints: list[CommEndpoint], *, incarnation: int = 1, timeout: float = 5.0):
    return [
        await endpoint.open_group(
            group_id="g",
            rank=rank,
            members=members_of(endpoints),
            incarnation=incarnation,
            timeout_seconds=timeout,
        )
        for rank, endpoint in enumerate(endpoints)
    ]


@contextlib.asynccontextmanager
async def endpoints(*tokens: str | None):
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(CommEndpoint(token=token)) for token in tokens]


async def test_two_scripts_reduce_without_a_daemon(tmp_path: Path):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SCRIPT),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(50), CommEndpoint() as endpoint:
            other = (await process.stdout.readline()).decode().strip()
            process.stdin.write(f"{endpoint.address}\n".encode())
            members = [
                PeerAddress(rank=0, node_id="a", address=endpoint.address),
                PeerAddress(rank=1, node_id="b", address=other),
            ]
            group = await endpoint.open_group(
                group_id="g", rank=0, members=members, incarnation=1, timeout_seconds=20
            )
            total = await group.all_reduce(torch.tensor([1.0, 2.0]))
            assert total.tolist() == [2.5, 4.0]
            assert await process.stdout.readline() == b"[2.5, 4.0] False\n"
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        process._transport.close()


async def test_a_later_incarnation_replaces_a_group_and_an_old_one_cannot_end_it():
    async with endpoints(None, None) as pair:
        before = await open_pair(pair)
        after = await open_pair(pair, incarnation=2)
        for endpoint, group in zip(pair, before, strict=True):
            await endpoint.leave_group(group)
        with pytest.raises(GroupAborted):
            await before[0].all_reduce(torch.ones(1))
        results = await asyncio.gather(*(group.all_reduce(torch.ones(1)) for group in after))
        assert [result.item() for result in results] == [2.0, 2.0]
        with pytest.raises(ConfigError, match="needs a higher one, got 2"):
            await open_pair(pair, incarnation=2)


async def test_a_group_that_was_left_may_be_opened_again():
    async with endpoints(None, None) as pair:
        for endpoint, group in zip(pair, await open_pair(pair), strict=True):
            await endpoint.leave_group(group)
        groups = await open_pair(pair)
        results = await asyncio.gather(*(group.all_reduce(torch.ones(1)) for group in groups))
        assert [result.item() for result in results] == [2.0, 2.0]


async def test_a_rank_that_refuses_a_tensor_in_its_middle_says_why():
    async with contextlib.AsyncExitStack() as stack:
        pair = [
            await stack.enter_async_context(CommEndpoint(max_tensor_bytes=limit))
            for limit in (2**30, 1000)
        ]
        groups = await open_pair(pair)
        with pytest.raises(
            PeerLost, match=rf"^send to rank 1.* has {2**26} bytes; the limit is 1000"
        ):
            await groups[0].send(torch.zeros(2**24), dst=1)


async def test_closing_an_endpoint_tells_the_other_rank():
    async with endpoints(None, None) as pair:
        groups = await open_pair(pair)
        await asyncio.gather(*(group.all_reduce(torch.ones(1)) for group in groups))
        await pair[1].close()
        await pair[1].close()
        with pytest.raises(PeerLost) as caught:
            await groups[0].all_reduce(torch.ones(1))
        assert caught.value.rank == 1


@pytest.mark.parametrize("tokens", [("one", "two"), (None, "two")])
async def test_a_rank_with_another_token_is_refused(tokens: tuple[str | None, ...]):
    async with endpoints(*tokens) as pair:
        groups = await open_pair(pair, timeout=2.0)
        with pytest.raises(Unauthenticated):
            await groups[0].all_reduce(torch.ones(1))


async def test_ranks_with_one_token_meet():
    async with endpoints("same", "same") as pair:
        groups = await open_pair(pair)
        results = await asyncio.gather(*(group.all_reduce(torch.ones(1)) for group in groups))
        assert [result.item() for result in results] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"bind": "0.0.0.0:0", "token": "t"}, "set advertise"),
        ({"bind": "127.0.0.1"}, "must be host:port"),
        ({"bind": "0.0.0.0:0", "advertise": "host.example"}, "without a token"),
        ({"advertise": "host:99999"}, "must be host:port"),
    ],
)
def test_wrong_addresses_are_refused(settings: dict[str, str], text: str):
    with pytest.raises(ConfigError, match=text):
        CommEndpoint(**settings)


async def test_what_is_advertised():
    async with CommEndpoint(advertise="localhost") as endpoint:
        assert endpoint.address.startswith("localhost:")
        assert int(endpoint.address.partition(":")[2]) > 0
