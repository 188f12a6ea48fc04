"""TorchEngine: the operations of a group over a process group of torch.distributed.

The same calls, checks, results (bit for bit) and errors as those of the mesh. What differs:

- torch knows addresses only: of more than two ranks the loss of one names none, and a timeout of a
  collective names all others
- a send ends only when its receive has begun
- a receive from any rank does not see that all others are lost, and ends at its deadline; of ranks
  that have all sent something already the lowest comes first
- a send or receive that fails or times out ends the group: neither can be taken back
- collectives run one after the other, each on the group's one thread
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch
from torch.distributed import Work

from stagemesh.comm import torch_collectives as blocking
from stagemesh.comm.collectives import CollectiveCall
from stagemesh.comm.gloo_transport import GlooTransport
from stagemesh.comm.gloo_wire import MAX_TAG, GlooWire, Wire, source_of, wait_for
from stagemesh.comm.rank_names import RankNames
from stagemesh.comm.raw import flat_bytes, shaped, write
from stagemesh.comm.reduce import ReduceOp
from stagemesh.comm.scratch import Scratch
from stagemesh.comm.tasks import WaitingRanks
from stagemesh.comm.torch_calls import (
    BLOCK_BYTES,
    MAX_PAYLOAD_BYTES,
    encode_call,
    read_block,
    write_block,
)
from stagemesh.comm.torch_rounds import Means, Result, num_bytes
from stagemesh.comm.transport import Envelope, TensorSpec
from stagemesh.errors import CollectiveMismatch, ConfigError, PeerLost, ProtocolError

_MAX_MESSAGES = 64
"""Sends and receives that are waited for at once; more wait for a thread."""

_ResultT = TypeVar("_ResultT")


class TorchEngine:
    """One rank's operations over torch.distributed. Loop-bound."""

    messages_can_break = True

    def __init__(
        self,
        gloo: GlooWire,
        *,
        transport: GlooTransport,
        names: RankNames,
        wire: Wire | None = None,
        reduce_in_place: bool = False,
    ) -> None:
        """Wrap connected wires.

        Args:
            gloo: carries the agreements and the messages.
            transport: carries abort and incarnation.
            names: who the ranks are, for errors.
            wire: carries the collectives' tensors; without one, `gloo` does.
            reduce_in_place: let torch work in the caller's tensor where it does an all_reduce. A
                failure then leaves it undefined, and for as long again as the deadline torch may
                still write to it.
        """
        self._gloo = gloo
        self._transport = transport
        self._names = names
        tensors = gloo if wire is None else wire
        scratch = Scratch(device=tensors.device)
        self._means = Means(
            wire=tensors, calls=gloo, scratch=scratch, reduces_in_place=reduce_in_place
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="torch-group")
        self._waiters = ThreadPoolExecutor(_MAX_MESSAGES, thread_name_prefix="torch-message")
        self._num_sent: Counter[int] = Counter()

    async def send(
        self, tensor: torch.Tensor, *, peer: int, tag: int, waiting: WaitingRanks
    ) -> None:
        """As Engine. What is large follows its head under a tag that only the head knows."""
        _check_tag(tag)
        self._means.wire.synchronize()
        flat = flat_bytes(tensor).view(torch.uint8)
        is_small = flat.numel() <= MAX_PAYLOAD_BYTES
        number = self._num_sent[peer]
        self._num_sent[peer] += 1
        spec = TensorSpec.of(tensor)
        call = encode_call(Envelope(tag=0, operation="send", sequence=number, called_with=spec))
        head = torch.zeros(BLOCK_BYTES, dtype=torch.uint8)
        write_block(head, call, flat if is_small else None)
        operation = f"send to {self._names.of(peer)}"

        async def work() -> None:
            started = [self._gloo.send(head, peer=peer, tag=2 * tag)]
            if not is_small:
                started.append(self._gloo.send(flat, peer=peer, tag=_body_tag(number)))
            for each in started:
                await self._wait(each, operation)

        with waiting.on(peer):
            await self._guarded(work(), peer=peer)

    async def receive(
        self, *, peer: int | None, tag: int, waiting: WaitingRanks
    ) -> tuple[int, torch.Tensor]:
        """As Engine."""
        _check_tag(tag)
        operation = f"recv from {'any rank' if peer is None else self._names.of(peer)}"

        async def work() -> tuple[int, torch.Tensor]:
            head = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
            started = self._gloo.receive(head, peer=peer, tag=2 * tag)
            await self._wait(started, operation)
            source = source_of(started) if peer is None else peer
            told = read_block(head)
            spec, flat = told.envelope.called_with, told.payload
            if spec is None:
                raise ProtocolError(f"{operation}: its message has no tensor")
            if num_bytes(spec) > MAX_PAYLOAD_BYTES:
                flat = torch.empty(num_bytes(spec), dtype=torch.uint8)
                body = _body_tag(told.envelope.sequence)
                await self._wait(self._gloo.receive(flat, peer=source, tag=body), operation)
            elif flat.numel() != num_bytes(spec):
                raise ProtocolError(f"{operation}: {flat.numel()} bytes came as {spec}")
            return source, shaped([flat], dtype=spec.dtype, shape=spec.shape)

        with self._waiting_for(peer, waiting):
            return await self._guarded(work(), peer=peer)

    async def barrier(self, call: CollectiveCall) -> None:
        """As Engine."""
        await self._run(call, blocking.barrier)

    async def broadcast(self, call: CollectiveCall, tensor: torch.Tensor, *, src: int) -> None:
        """As Engine."""
        result = await self._run(call, partial(blocking.broadcast, tensor=tensor, src=src))
        if call.rank != src:
            self._write([tensor], result)

    async def all_reduce(self, call: CollectiveCall, tensor: torch.Tensor, *, op: ReduceOp) -> None:
        """As Engine."""
        receivers = range(call.size)
        work = partial(blocking.reduce_to, tensor=tensor, op=op, receivers=receivers)
        self._write_whole(tensor, await self._run(call, work))

    async def reduce(
        self, call: CollectiveCall, tensor: torch.Tensor, *, op: ReduceOp, dst: int
    ) -> None:
        """As Engine."""
        work = partial(blocking.reduce_to, tensor=tensor, op=op, receivers=[dst])
        result = await self._run(call, work)
        if call.rank == dst:
            self._write_whole(tensor, result)

    async def reduce_scatter(
        self,
        call: CollectiveCall,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        *,
        op: ReduceOp,
    ) -> None:
        """As Engine."""
        work = partial(blocking.reduce_scatter, inputs=inputs, op=op)
        self._write([output], await self._run(call, work))

    async def all_gather(
        self, call: CollectiveCall, outputs: Sequence[torch.Tensor], tensor: torch.Tensor
    ) -> None:
        """As Engine."""
        self._write(outputs, await self._run(call, partial(blocking.all_gather, tensor=tensor)))

    async def gather(
        self,
        call: CollectiveCall,
        outputs: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        *,
        dst: int,
    ) -> None:
        """As Engine."""
        work = partial(blocking.gather, tensor=tensor, dst=dst)
        self._write(outputs, await self._run(call, work))

    async def gather_variable(
        self, call: CollectiveCall, tensor: torch.Tensor, *, receivers: Sequence[int]
    ) -> list[torch.Tensor] | None:
        """As Engine."""
        work = partial(blocking.gather_variable, tensor=tensor, receivers=receivers)
        result = await self._run(call, work)
        if call.rank not in receivers:
            return None
        gathered = [
            shaped([chunk.clone()], dtype=spec.dtype, shape=spec.shape)
            for spec, chunk in zip(result.specs, result.chunks, strict=True)
        ]
        self._return(result)
        return gathered

    async def scatter(
        self,
        call: CollectiveCall,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        *,
        src: int,
    ) -> None:
        """As Engine."""
        work = partial(blocking.scatter, output=output, inputs=inputs, src=src)
        self._write([output], await self._run(call, work))

    async def all_to_all(
        self,
        call: CollectiveCall,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
    ) -> None:
        """As Engine."""
        work = partial(blocking.all_to_all, outputs=outputs, inputs=inputs)
        self._write(outputs, await self._run(call, work))

    async def find_abort(self) -> None:
        """As Engine."""
        await self._transport.find_abort()

    async def close(self) -> None:
        """As Engine."""
        for pool in (self._thread, self._waiters):
            pool.shutdown(wait=False)

    async def _run(
        self,
        call: CollectiveCall,
        work: Callable[[Means, CollectiveCall], Result],
    ) -> Result:
        """Run a function of `torch_collectives` on the group's thread, in the calls' order."""

        def run() -> Result:
            self._means.wire.synchronize()
            return work(self._means, call)

        async def on_thread() -> Result:
            return await asyncio.get_running_loop().run_in_executor(self._thread, run)

        with self._waiting_for(None, call.waiting):
            return await self._guarded(on_thread(), peer=None)

    def _write(self, outputs: Sequence[torch.Tensor], result: Result) -> None:
        """Put the chunk of each rank, or the only one, into its output."""
        pairs = list(zip(outputs, result.chunks, strict=bool(outputs)))
        if len(pairs) > 1:
            # The own chunk is still in the caller's input, which may lie in the other outputs.
            pairs.insert(0, pairs.pop(self._gloo.rank))
        for output, chunk in pairs:
            if output.untyped_storage().data_ptr() != chunk.untyped_storage().data_ptr():
                write(output, [chunk])
                continue
            is_plain = output.is_contiguous() and not output.is_conj() and not output.is_neg()
            if not is_plain or chunk.data_ptr() != output.data_ptr():
                write(output, [chunk.clone()])
        self._return(result)

    def _write_whole(self, tensor: torch.Tensor, result: Result) -> None:
        if result.chunks:
            write(tensor, result.chunks)
        self._return(result)

    def _return(self, result: Result) -> None:
        self._means.wire.synchronize()
        for memory in result.lent:
            self._means.scratch.give_back(memory)

    async def _guarded(self, work: Coroutine[Any, Any, _ResultT], *, peer: int | None) -> _ResultT:
        """Run; a failure that leaves torch with something under way cuts the connections.

        Args:
            work: to run.
            peer: with whom; None for all.
        """
        try:
            return await work
        except (CollectiveMismatch, ConfigError):
            raise
        except PeerLost as error:
            # Who aborts cuts its connections, too: perhaps that is what we have seen.
            await self._transport.find_abort()
            self._cut()
            self._transport.mailbox.raise_if_aborted()
            if peer is None and self._gloo.size == 2:
                peer = 1 - self._gloo.rank
            if peer is None:
                raise
            # torch does not say who, but there is only one.
            raise PeerLost(f"{self._names.of(peer)} is lost: {error}", rank=peer) from error
        except BaseException:
            self._cut()
            raise

    def _waiting_for(self, peer: int | None, waiting: WaitingRanks) -> contextlib.ExitStack:
        """Within the block a rank is waited for; without one all others are, as far as we know."""
        others = [rank for rank in range(self._gloo.size) if rank != self._gloo.rank]
        with contextlib.ExitStack() as stack:
            for each in others if peer is None else [peer]:
                stack.enter_context(waiting.on(each))
            return stack.pop_all()

    def _cut(self) -> None:
        """Free the threads that wait; the other ranks then need not wait for their deadline."""
        with contextlib.suppress(RuntimeError):  # closed: then it is done already
            self._waiters.submit(self._transport.cut)

    async def _wait(self, started: Work, operation: str) -> None:
        loop = asyncio.get_running_loop()
        wait = partial(wait_for, started, operation=operation)
        await loop.run_in_executor(self._waiters, wait)


def _check_tag(tag: int) -> None:
    if tag > MAX_TAG // 2:
        raise ConfigError(f"tag must be in [0, {MAX_TAG // 2}] over Gloo, got {tag}")


def _body_tag(number: int) -> int:
    """The odd tags; those of the heads are even."""
    return 2 * (number % (MAX_TAG // 2)) + 1
