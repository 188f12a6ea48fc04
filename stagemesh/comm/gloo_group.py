"""GlooGroup: the operations of AsyncGroup over a Gloo group of torch.distributed.

The same calls, checks, results (bit for bit) and errors. What differs, as Gloo cannot do it:

- the loss of a rank, or a timeout of a collective, names no rank: Gloo knows addresses only
- a send ends only when its receive has begun
- a send or receive that fails or times out ends the group: neither can be taken back
- collectives run one after the other, each on the group's one thread
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch
from torch.distributed import Work

from stagemesh.comm import gloo_collectives as gloo
from stagemesh.comm.arguments import (
    check_absent,
    check_list,
    check_one_dtype,
    check_root,
    check_tensor,
)
from stagemesh.comm.async_group import AsyncGroup
from stagemesh.comm.collectives import CollectiveCall
from stagemesh.comm.gloo_transport import GlooTransport
from stagemesh.comm.gloo_wire import MAX_TAG, GlooWire, wait
from stagemesh.comm.raw import empty_like, flat_bytes, shaped, write
from stagemesh.comm.reduce import ReduceOp
from stagemesh.comm.tasks import WaitingRanks
from stagemesh.comm.transport import Envelope, TensorSpec
from stagemesh.errors import CollectiveMismatch, ConfigError, PeerLost, ProtocolError

_MAX_MESSAGES = 64
"""Sends and receives that are waited for at once; more wait for a thread."""
_GLOO_MARGIN_SECONDS = 1.0
"""Gloo's own deadlines come after ours, whose errors say more."""

_ResultT = TypeVar("_ResultT")


class GlooGroup(AsyncGroup):
    """One rank's view of a group over Gloo. Loop-bound."""

    def __init__(
        self, wire: GlooWire, *, transport: GlooTransport, group_id: str, timeout_seconds: float
    ) -> None:
        """Wrap a connected wire.

        Args:
            wire: carries the bytes.
            transport: carries abort and incarnation.
            group_id: the name in errors.
            timeout_seconds: deadline of every operation that sets none of its own.
        """
        super().__init__(transport, group_id=group_id, timeout_seconds=timeout_seconds)
        self._wire = wire
        self._gloo_transport = transport
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gloo")
        self._waiters = ThreadPoolExecutor(_MAX_MESSAGES, thread_name_prefix="gloo-message")
        # Messages of one peer and tag go one after the other, each as its head and its bytes.
        self._lanes: defaultdict[tuple[str, int, int], asyncio.Lock] = defaultdict(asyncio.Lock)

    async def send(
        self, tensor: torch.Tensor, *, peer: int, tag: int = 0, timeout: float | None = None
    ) -> None:
        """As AsyncGroup; a failure ends the group."""
        self._check_message(peer, tag)
        check_tensor(tensor)
        spec = TensorSpec.of(tensor)
        head = gloo.encode_call(Envelope(tag=tag, operation="send", called_with=spec))
        flat = flat_bytes(tensor)

        async def work() -> None:
            async with self._lanes["send", peer, tag]:
                works = [self._wire.send(head, peer=peer, tag=2 * tag)]
                if flat.numel():
                    works.append(self._wire.send(flat, peer=peer, tag=2 * tag + 1))
                for started in works:
                    await self._wait(started, f"send to rank {peer}")

        await self._message(f"send to rank {peer}", work, peer=peer, timeout=timeout)

    async def recv_tensor(
        self,
        *,
        peer: int,
        tag: int = 0,
        expected: TensorSpec | None = None,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """As AsyncGroup; a failure other than a mismatch ends the group."""
        self._check_message(peer, tag)
        operation = f"recv from rank {peer}"

        async def work() -> torch.Tensor:
            async with self._lanes["recv", peer, tag]:
                head = gloo.empty_call()
                await self._wait(self._wire.receive(head, peer=peer, tag=2 * tag), operation)
                spec = gloo.decode_call(head).called_with
                if spec is None:
                    raise ProtocolError(f"{operation}: its message has no tensor")
                flat = torch.empty(gloo.num_bytes(spec), dtype=torch.uint8)
                if flat.numel():
                    started = self._wire.receive(flat, peer=peer, tag=2 * tag + 1)
                    await self._wait(started, operation)
                return shaped([flat], dtype=spec.dtype, shape=spec.shape)

        tensor = await self._message(operation, work, peer=peer, timeout=timeout)
        if expected is not None and TensorSpec.of(tensor) != expected:
            raise CollectiveMismatch(
                f"{operation} (tag {tag}) in group {self.group_id}: rank {self.rank} expects "
                f"{expected}, rank {peer} sent {TensorSpec.of(tensor)}"
            )
        return tensor

    async def barrier(self, *, timeout: float | None = None) -> None:
        """As AsyncGroup."""
        call = self._begin("barrier", None)
        await self._collective(call, gloo.agree, timeout)

    async def broadcast(
        self, tensor: torch.Tensor, *, src: int, timeout: float | None = None
    ) -> torch.Tensor:
        """As AsyncGroup."""
        check_root(src, name="src", size=self.size)
        check_tensor(tensor, is_written=self.rank != src)
        call = self._begin(f"broadcast[src={src}]", tensor)
        work = partial(gloo.broadcast, tensor=tensor, src=src)
        flat = await self._collective(call, work, timeout)
        if self.rank != src:
            write(tensor, [flat])
        return tensor

    async def all_reduce(
        self,
        tensor: torch.Tensor,
        *,
        op: ReduceOp = ReduceOp.SUM,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """As AsyncGroup."""
        check_tensor(tensor, is_written=True)
        call = self._begin("all_reduce", tensor, op=op)
        work = partial(gloo.reduce_to, tensor=tensor, op=op, receivers=range(self.size))
        write(tensor, await self._collective(call, work, timeout))
        return tensor

    async def reduce(
        self,
        tensor: torch.Tensor,
        *,
        dst: int,
        op: ReduceOp = ReduceOp.SUM,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """As AsyncGroup."""
        check_root(dst, name="dst", size=self.size)
        check_tensor(tensor, is_written=self.rank == dst)
        call = self._begin(f"reduce[dst={dst}]", tensor, op=op)
        work = partial(gloo.reduce_to, tensor=tensor, op=op, receivers=[dst])
        chunks = await self._collective(call, work, timeout)
        if self.rank == dst:
            write(tensor, chunks)
        return tensor

    async def gather(
        self,
        tensor: torch.Tensor,
        *,
        dst: int,
        outputs: Sequence[torch.Tensor] | None = None,
        timeout: float | None = None,
    ) -> Sequence[torch.Tensor] | None:
        """As AsyncGroup."""
        check_root(dst, name="dst", size=self.size)
        check_tensor(tensor)
        if self.rank != dst:
            check_absent(outputs, name="outputs", root=dst)
            outputs = None
        else:
            if outputs is None:
                outputs = [empty_like(tensor) for _ in range(self.size)]
            check_list(outputs, name="outputs", like=tensor, size=self.size, is_written=True)
        raw = flat_bytes(tensor)
        incoming = dict.fromkeys(range(self.size), raw.numel()) if self.rank == dst else {}
        call = self._begin(f"gather[dst={dst}]", tensor)
        work = partial(gloo.move, outgoing={dst: raw}, incoming=incoming)
        chunks = await self._collective(call, work, timeout)
        for output, chunk in zip(outputs or (), chunks, strict=False):
            write(output, [chunk])
        return outputs

    async def scatter(
        self,
        tensor: torch.Tensor,
        *,
        src: int,
        inputs: Sequence[torch.Tensor] | None = None,
        timeout: float | None = None,
    ) -> torch.Tensor:
        """As AsyncGroup."""
        check_root(src, name="src", size=self.size)
        check_tensor(tensor, is_written=True)
        if self.rank == src:
            check_list(inputs or (), name="inputs", like=tensor, size=self.size)
        else:
            check_absent(inputs, name="inputs", root=src)
        outgoing = {rank: flat_bytes(item) for rank, item in enumerate(inputs or ())}
        incoming = {src: tensor.numel() * tensor.element_size()}
        call = self._begin(f"scatter[src={src}]", tensor)
        work = partial(gloo.move, outgoing=outgoing, incoming=incoming)
        write(tensor, [(await self._collective(call, work, timeout))[src]])
        return tensor

    async def close(self) -> None:
        """As AsyncGroup."""
        await super().close()
        for pool in (self._thread, self._waiters):
            pool.shutdown(wait=False)

    async def _reduce_scatter(
        self,
        operation: str,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        op: ReduceOp,
        timeout: float | None,
    ) -> torch.Tensor:
        check_tensor(output, name="output", is_written=True)
        check_list(inputs, name="inputs", like=output, size=self.size)
        call = self._begin(operation, output, op=op)
        work = partial(gloo.reduce_scatter, inputs=inputs, op=op)
        write(output, [await self._collective(call, work, timeout)])
        return output

    async def _all_gather(
        self,
        operation: str,
        outputs: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        timeout: float | None,
    ) -> Sequence[torch.Tensor]:
        check_tensor(tensor)
        call = self._begin(operation, tensor)
        chunks = await self._collective(call, partial(gloo.all_gather, tensor=tensor), timeout)
        for output, chunk in zip(outputs, chunks, strict=True):
            write(output, [chunk])
        return outputs

    async def _gather_variable(
        self, operation: str, tensor: torch.Tensor, receivers: Sequence[int], timeout: float | None
    ) -> list[torch.Tensor] | None:
        check_tensor(tensor)
        if not tensor.dim():
            raise ConfigError("a variable gather needs at least one dim, got a 0-d tensor")
        call = self._begin(operation, tensor, has_free_dim=True)
        work = partial(gloo.gather_variable, tensor=tensor, receivers=receivers)
        gathered = await self._collective(call, work, timeout)
        if self.rank not in receivers:
            return None
        return [gloo.as_tensor(spec, flat) for spec, flat in gathered]

    async def _all_to_all(
        self,
        operation: str,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        timeout: float | None,
    ) -> None:
        check_one_dtype(outputs, inputs, size=self.size)
        total = TensorSpec(dtype=inputs[0].dtype, shape=(sum(t.numel() for t in inputs),))
        call = self._begin(operation, total, has_free_dim=True)
        work = partial(gloo.all_to_all, outputs=outputs, inputs=inputs)
        chunks = await self._collective(call, work, timeout)
        for output, chunk in zip(outputs, chunks, strict=True):
            write(output, [chunk])

    async def _collective(
        self,
        call: CollectiveCall,
        work: Callable[..., _ResultT],
        timeout: float | None,
    ) -> _ResultT:
        """Run a function of `gloo_collectives` on the group's thread, in the order of the calls."""
        seconds = self.timeout_seconds if timeout is None else timeout
        run = partial(work, self._wire, call, seconds=seconds + _GLOO_MARGIN_SECONDS)

        async def on_thread() -> _ResultT:
            return await asyncio.get_running_loop().run_in_executor(self._thread, run)

        return await self._ending(lambda: self._finish(call, on_thread(), timeout))

    async def _message(
        self,
        operation: str,
        work: Callable[[], Coroutine[Any, Any, _ResultT]],
        *,
        peer: int,
        timeout: float | None,
    ) -> _ResultT:
        waiting = WaitingRanks()

        async def run() -> _ResultT:
            with waiting.on(peer):
                return await self._runner.run_collective(
                    operation, work(), waiting=waiting, timeout=timeout
                )

        return await self._ending(run)

    async def _ending(self, run: Callable[[], Coroutine[Any, Any, _ResultT]]) -> _ResultT:
        """Run; a failure that leaves Gloo with something under way ends the group."""
        try:
            return await run()
        except (CollectiveMismatch, ConfigError):
            raise
        except PeerLost:
            # Who aborts cuts its connections, too: perhaps that is what we have seen.
            await self._gloo_transport.find_abort()
            self._cut()
            self._transport.mailbox.raise_if_aborted()
            raise
        except BaseException:
            self._cut()
            raise

    def _cut(self) -> None:
        """Free the threads that wait; the other ranks then need not wait for their deadline."""
        with contextlib.suppress(RuntimeError):  # closed: then it is done already
            self._waiters.submit(self._wire.abort)

    async def _wait(self, started: Work, operation: str) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._waiters, partial(wait, started, operation=operation))

    def _check_message(self, peer: int, tag: int) -> None:
        self._check_peer(peer, tag)
        if tag > MAX_TAG // 2:
            raise ConfigError(f"tag must be in [0, {MAX_TAG // 2}] over Gloo, got {tag}")
