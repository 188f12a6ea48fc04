"""One rank of the collectives benchmark: a process that measures what its standard input asks for.

One JSON object per line, in and out. The first output is where this rank listens; the first input
is who the members are. After that each input is a `Request`, answered with seconds per operation.
"""

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from stagemesh.comm.async_group import AsyncGroup
from stagemesh.comm.endpoint import CommEndpoint
from stagemesh.comm.peer_link import PeerAddress

_TIMEOUT_SECONDS = 60.0
_WARM_UP = 3
_NOWHERE = "127.0.0.1:1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One measurement; all ranks below `size` get the same one."""

    backend: str
    """tcp, unix or gloo."""
    operation: str
    """all_reduce, or send: there and back between rank 0 and rank 1, of which half is reported."""
    size: int
    num_bytes: int
    iterations: int


Operation = Callable[[torch.Tensor], Awaitable[None]]


class Rank:
    """The groups of this process."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._gloo: dict[int, Any] = {}
        self._groups: dict[tuple[str, int], AsyncGroup] = {}

    async def join(
        self, members: list[PeerAddress], *, endpoint: CommEndpoint, store_path: str
    ) -> None:
        """Make the groups of 2 and of all ranks, over each backend."""
        for size in sorted({2, len(members)}):
            if self._rank >= size:
                continue
            store = dist.FileStore(  # type: ignore[attr-defined]
                f"{store_path}-{size}", size
            )
            self._gloo[size] = dist.ProcessGroupGloo(
                store, self._rank, size, timedelta(seconds=_TIMEOUT_SECONDS)
            )
            for backend in ("tcp", "unix"):
                self._groups[backend, size] = await endpoint.open_group(
                    group_id=f"{backend}-{size}",
                    rank=self._rank,
                    members=[_over(backend, member) for member in members[:size]],
                    incarnation=1,
                    timeout_seconds=_TIMEOUT_SECONDS,
                )

    async def measure(self, request: Request) -> float:
        """Median seconds of one operation."""
        tensor = torch.zeros(request.num_bytes // 4)
        operation = self._operation(request)
        for _ in range(_WARM_UP):
            await operation(tensor)
        seconds = []
        for _ in range(request.iterations):
            started = time.perf_counter()
            await operation(tensor)
            seconds.append(time.perf_counter() - started)
        trips = 2 if request.operation == "send" else 1
        return statistics.median(seconds) / trips

    async def check(self, size: int) -> None:
        """Let every backend add the ranks up, so that what is measured is known to work."""
        for num_bytes in (64, 2**21):
            for backend in ("tcp", "unix", "gloo"):
                request = Request(
                    backend=backend,
                    operation="all_reduce",
                    size=size,
                    num_bytes=num_bytes,
                    iterations=1,
                )
                tensor = torch.full((num_bytes // 4,), float(self._rank + 1))
                await self._operation(request)(tensor)
                if not bool((tensor == size * (size + 1) / 2).all()):
                    raise RuntimeError(f"{request}: wrong sum")

    def _operation(self, request: Request) -> Operation:
        if request.backend == "gloo":
            return self._gloo_operation(request)
        group = self._groups[request.backend, request.size]
        peer = 1 - self._rank

        async def all_reduce(tensor: torch.Tensor) -> None:
            await group.all_reduce(tensor)

        async def there_and_back(tensor: torch.Tensor) -> None:
            if self._rank == 0:
                await group.send(tensor, dst=peer)
            await group.recv(tensor, src=peer)
            if self._rank == 1:
                await group.send(tensor, dst=peer)

        return all_reduce if request.operation == "all_reduce" else there_and_back

    def _gloo_operation(self, request: Request) -> Operation:
        # Blocks the loop, on purpose: that is how Gloo is used, and nothing else runs here.
        group = self._gloo[request.size]
        peer = 1 - self._rank

        async def all_reduce(tensor: torch.Tensor) -> None:
            group.allreduce([tensor]).wait()

        async def there_and_back(tensor: torch.Tensor) -> None:
            if self._rank == 0:
                group.send([tensor], peer, 0).wait()
            group.recv([tensor], peer, 0).wait()
            if self._rank == 1:
                group.send([tensor], peer, 0).wait()

        return all_reduce if request.operation == "all_reduce" else there_and_back


def _over(backend: str, member: PeerAddress) -> PeerAddress:
    """A member that can only be reached by one kind of socket."""
    if backend == "tcp":
        return replace(member, unix_path="")
    return replace(member, address=_NOWHERE)


def _say(answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


async def _listen() -> Any:
    line = await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    return json.loads(line) if line else None


async def run(rank: int) -> None:
    """Serve until standard input ends."""
    torch.set_num_threads(1)
    async with CommEndpoint("127.0.0.1:0", node_id=f"n{rank}", unix_socket=True) as endpoint:
        _say(asdict(endpoint.member(rank)))
        hello = await _listen()
        here = Rank(rank)
        members = [PeerAddress(**member) for member in hello["members"]]
        await here.join(members, endpoint=endpoint, store_path=hello["store"])
        for size in sorted({2, len(members)}):
            if rank < size:
                await here.check(size)
        _say("ready")
        while (request := await _listen()) is not None:
            _say(await here.measure(Request(**request)))


if __name__ == "__main__":
    asyncio.run(run(int(sys.argv[1])))
