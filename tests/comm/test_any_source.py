"""Receives from any rank: what came first, whose it is, and when nobody is left."""

import asyncio
import random
from typing import Any

import pytest
import torch

from stagemesh.comm.async_group import AsyncGroup
from stagemesh.comm.local import LocalNetwork
from stagemesh.comm.process_group import ProcessGroup
from stagemesh.errors import CollectiveMismatch, CollectiveTimeout, ConfigError, PeerLost
from tests.comm.groups import groups, on_ranks
from tests.comm.tables import each_transport
from tests.support.ranks import BACKENDS, run_ranks

SIZE = 4
PER_RANK = 5

each_backend = pytest.mark.parametrize("backend", BACKENDS)


def letter(rank: int, number: int) -> torch.Tensor:
    # The odd ones are too large to ride with their envelope.
    return torch.full((2 + 3000 * (number % 2),), float(10 * rank + number))


def collect(group: ProcessGroup) -> Any:
    if group.rank:
        for number in range(PER_RANK):
            group.send(letter(group.rank, number), dst=0, tag=7)
        return None
    return [group.recv_any(tag=7) for _ in range(PER_RANK * (SIZE - 1))]


@each_backend
def test_all_that_was_sent_arrives_once_and_in_order_per_source(backend: str) -> None:
    check(run_ranks(SIZE, collect, backend=backend)[0])


@pytest.mark.parametrize("seed", range(8))
def test_the_same_when_messages_overtake_each_other(seed: int) -> None:
    check(run_ranks(SIZE, collect, order=random.Random(seed))[0])


def check(received: list[tuple[int, torch.Tensor]]) -> None:
    by_source: dict[int, list[torch.Tensor]] = {}
    for source, tensor in received:
        by_source.setdefault(source, []).append(tensor)
    assert sorted(by_source) == list(range(1, SIZE))
    for source, tensors in by_source.items():
        wanted = [letter(source, number) for number in range(PER_RANK)]
        assert all(torch.equal(*pair) for pair in zip(tensors, wanted, strict=True))


@each_backend
def test_receive_into_a_tensor_gives_the_source(backend: str) -> None:
    def run(group: ProcessGroup) -> Any:
        if group.rank:
            group.send(torch.full((3,), float(group.rank)), dst=0)
            return None
        target, other = torch.zeros(3), torch.zeros(3)
        named = group.irecv(other, src=2)
        source = group.recv(target)
        return source, target.tolist(), named.wait(), other.tolist()

    assert run_ranks(3, run, backend=backend)[0] == (1, [1.0] * 3, 2, [2.0] * 3)


@each_backend
def test_what_does_not_fit_names_its_source_and_is_dropped(backend: str) -> None:
    def run(group: ProcessGroup) -> Any:
        if group.rank:
            group.send(torch.ones(3), dst=0)
            group.send(torch.full((2,), 7.0), dst=0)
            return None
        target = torch.zeros(2)
        with pytest.raises(CollectiveMismatch, match=r"from any rank .* rank 1 sent float32\[3\]"):
            group.recv(target)
        group.recv(target)
        return target.tolist()

    assert run_ranks(2, run, backend=backend)[0] == [7.0, 7.0]


@each_backend
def test_a_deadline_names_all_that_could_have_sent(backend: str) -> None:
    def run(group: ProcessGroup) -> str:
        with pytest.raises(CollectiveTimeout) as caught:
            group.recv_any(timeout=0.3)
        return str(caught.value)

    texts = run_ranks(3, run, backend=backend)
    for rank, text in enumerate(texts):
        assert "recv from any rank" in text
        others = text.partition("waiting for ")[2]
        assert [str(other) in others for other in range(3) if other != rank] == [True, True]


@each_transport
async def test_the_order_is_that_of_arrival(transport: str) -> None:
    async with groups(transport, 3) as ranks:
        for sender in (2, 1, 2, 1, 1):
            # Each has arrived before the next is sent: the mailbox has it, or its receive does.
            before = ranks[0]._transport.mailbox._num_arrived
            await ranks[sender].send(torch.tensor([sender]), dst=0)
            while ranks[0]._transport.mailbox._num_arrived == before:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        sources = [(await ranks[0].recv_any())[0] for _ in range(5)]
    assert sources == [2, 1, 2, 1, 1]


@each_transport
async def test_only_the_loss_of_all_others_ends_it(transport: str) -> None:
    async with groups(transport, 3) as ranks:
        waiting = asyncio.ensure_future(ranks[0].recv_any())
        for rank in (1, 2):
            # A loss shows on an open connection.
            await ranks[rank].send(torch.ones(1), dst=0, tag=9)
        await ranks[1].close()
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await ranks[2].send(torch.ones(1), dst=0)
        assert (await waiting)[0] == 2
        waiting = asyncio.ensure_future(ranks[0].recv_any())
        await asyncio.sleep(0)
        await ranks[2].close()
        with pytest.raises(PeerLost):
            await waiting
        # What they sent before is still there.
        left = [(await ranks[0].recv_any(tag=9))[0] for _ in range(2)]
    assert sorted(left) == [1, 2]


@each_transport
async def test_a_cancelled_receive_loses_nothing(transport: str) -> None:
    async with groups(transport, 2) as ranks:

        async def give_up(group: AsyncGroup) -> None:
            for _ in range(20):
                with pytest.raises(CollectiveTimeout):
                    await group.recv_any(timeout=0.001)

        async def run(group: AsyncGroup) -> Any:
            if group.rank:
                for number in range(30):
                    await group.send(torch.tensor([number]), dst=0)
                return None
            received = []
            while len(received) < 30:
                waiting = asyncio.ensure_future(group.recv_any())
                for _ in range(random.Random(len(received)).randrange(4)):
                    await asyncio.sleep(0)
                if len(received) % 3 and waiting.cancel():
                    await asyncio.wait([waiting])
                if not waiting.cancelled():
                    received.append(int((await waiting)[1]))
                else:
                    received.append(int(await group.recv_tensor()))
            return received

        await give_up(ranks[0])
        assert (await on_ranks(ranks, run))[0] == list(range(30))


async def test_a_group_of_one_has_nobody_to_receive_from() -> None:
    group = AsyncGroup(LocalNetwork(size=1).join(0), group_id="g", timeout_seconds=1)
    for call in (group.recv(torch.zeros(1)), group.recv_any(), group.recv_tensor()):
        with pytest.raises(ConfigError, match="nobody to receive from"):
            await call
