"""What a driver asks of the daemon that is its rank: its stream of tensors, and any collective.

A driver's stream begins with the call; tensors follow each other. What each collective takes and
gives is said at CollectiveKind in comm.proto.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

import torch

from stagemesh.comm.async_group import AsyncGroup
from stagemesh.comm.frames import reduce_op_from_proto, spec_from_header
from stagemesh.comm.raw import empty_like, empty_tensor
from stagemesh.comm.reduce import ReduceOp
from stagemesh.errors import CapacityExceeded, CollectiveTimeout, PeerLost, ProtocolError
from stagemesh.rpc.codec import TensorAssembler
from stagemesh.rpc.v1 import comm_pb2

_Requests: TypeAlias = AsyncIterator[comm_pb2.CommTensor]
_Tensors: TypeAlias = Sequence[torch.Tensor]


async def first_call(requests: _Requests, *, seconds: float) -> tuple[comm_pb2.CommCall, _Requests]:
    """The call of a driver's stream, and the stream with its first message still in it.

    Raises:
        PeerLost: nothing comes in that time.
        ProtocolError: the first message has no call.
    """
    rest = aiter(requests)
    try:
        async with asyncio.timeout(seconds):
            first = await anext(rest, None)
    except TimeoutError:
        raise PeerLost(f"the driver sent nothing in {seconds:g} s") from None
    if first is None or not first.HasField("call"):
        raise ProtocolError("the first message of the stream must name the call")

    async def whole() -> _Requests:
        yield first
        async for request in rest:
            yield request

    return first.call, whole()


async def read_tensors(
    requests: _Requests, group: AsyncGroup, *, max_bytes: int, at_most: int
) -> list[torch.Tensor]:
    """The tensors of a driver's stream, within the group's timeout.

    Args:
        requests: the stream.
        group: of the driver's rank.
        max_bytes: limit of a tensor.
        at_most: how many may come.

    Raises:
        ProtocolError: a part is wrong, or more come.
        CapacityExceeded: a tensor is larger.
        CollectiveTimeout: they do not come in time.
    """
    assembler = TensorAssembler(max_bytes=max_bytes)
    tensors: list[torch.Tensor] = []
    try:
        async with asyncio.timeout(group.timeout_seconds):
            async for request in requests:
                if not request.HasField("part"):
                    continue
                if len(tensors) == at_most:
                    raise ProtocolError(f"more data came after {at_most} whole tensors")
                tensor = assembler.add(request.part)
                if tensor is not None:
                    tensors.append(tensor)
    except TimeoutError:
        raise CollectiveTimeout(
            f"the driver of rank {group.rank} did not send its tensors in "
            f"{group.timeout_seconds:g} s"
        ) from None
    assembler.finish()
    return tensors


async def read_tensor(requests: _Requests, group: AsyncGroup, *, max_bytes: int) -> torch.Tensor:
    """The one tensor of a driver's stream.

    Raises:
        ProtocolError, CapacityExceeded, CollectiveTimeout: as `read_tensors`.
    """
    tensors = await read_tensors(requests, group, max_bytes=max_bytes, at_most=1)
    if not tensors:
        raise ProtocolError("the stream ended without a tensor")
    return tensors[0]


async def run_collective(
    group: AsyncGroup, call: comm_pb2.CommCall, tensors: _Tensors, *, max_bytes: int
) -> _Tensors:
    """Take part in a collective for the driver.

    Args:
        group: of the driver's rank.
        call: which one.
        tensors: what the driver gives.
        max_bytes: limit of all that it expects together.

    Returns:
        What the driver gets.

    Raises:
        ProtocolError: no such collective, or another number of tensors than it takes.
        CapacityExceeded: it expects more.
        CommError, ConfigError: of the collective.
    """
    run = _COLLECTIVES.get(call.collective)
    if run is None:
        raise ProtocolError(
            f"unknown collective {call.collective}; known are 1 to {max(_COLLECTIVES)} "
            "(enum CollectiveKind of comm.proto)"
        )
    if len(call.expected) > group.size:
        raise ProtocolError(f"{len(call.expected)} tensors are expected of {group.size} ranks")
    return await run(_Call(group, call, tensors, max_bytes=max_bytes))


class _Call:
    """A driver's call, and its parts as a collective takes them."""

    def __init__(
        self, group: AsyncGroup, call: comm_pb2.CommCall, tensors: _Tensors, *, max_bytes: int
    ) -> None:
        self.group = group
        self.tensors = tensors
        self.root = call.root_rank
        self._call = call
        self._max_bytes = max_bytes
        self._name = comm_pb2.CollectiveKind.Name(call.collective)

    @property
    def is_root(self) -> bool:
        return self.group.rank == self.root

    @property
    def op(self) -> ReduceOp:
        return reduce_op_from_proto(self._call.reduce_op)

    def none(self) -> None:
        self._check(0, "tensors")

    def one(self) -> torch.Tensor:
        self._check(1, "tensors")
        return self.tensors[0]

    def all(self) -> _Tensors:
        self._check(self.group.size, "tensors")
        return self.tensors

    def expected(self, count: int) -> list[torch.Tensor]:
        """Memory for what this rank gets."""
        self._check(count, "expected")
        specs = [spec_from_header(header) for header in self._call.expected]
        num_bytes = sum(header.num_bytes for header in self._call.expected)
        if num_bytes > self._max_bytes:
            raise CapacityExceeded(
                f"{self._name} expects {num_bytes} bytes; the limit is {self._max_bytes}"
            )
        return [empty_tensor(spec.dtype, spec.shape) for spec in specs]

    def _check(self, count: int, what: str) -> None:
        told = len(self.tensors if what == "tensors" else self._call.expected)
        if told != count:
            raise ProtocolError(
                f"{self._name} on rank {self.group.rank} of {self.group.size} takes {count} {what},"
                f" got {told}"
            )


async def _barrier(call: _Call) -> _Tensors:
    call.none()
    await call.group.barrier()
    return ()


async def _broadcast(call: _Call) -> _Tensors:
    if call.is_root:
        tensor = call.one()
    else:
        call.none()
        [tensor] = call.expected(1)
    return [await call.group.broadcast(tensor, src=call.root)]


async def _all_reduce(call: _Call) -> _Tensors:
    return [await call.group.all_reduce(call.one(), op=call.op)]


async def _reduce(call: _Call) -> _Tensors:
    tensor = await call.group.reduce(call.one(), dst=call.root, op=call.op)
    return [tensor] if call.is_root else ()


async def _reduce_scatter(call: _Call) -> _Tensors:
    inputs = call.all()
    output = empty_like(inputs[0])
    return [await call.group.reduce_scatter(output, inputs, op=call.op)]


async def _all_gather(call: _Call) -> _Tensors:
    tensor = call.one()
    outputs = [empty_like(tensor) for _ in range(call.group.size)]
    return await call.group.all_gather(outputs, tensor)


async def _gather(call: _Call) -> _Tensors:
    return await call.group.gather(call.one(), dst=call.root) or ()


async def _scatter(call: _Call) -> _Tensors:
    if call.is_root:
        inputs = call.all()
        output = empty_like(inputs[0])
        return [await call.group.scatter(output, src=call.root, inputs=inputs)]
    call.none()
    [output] = call.expected(1)
    return [await call.group.scatter(output, src=call.root)]


async def _all_to_all(call: _Call) -> _Tensors:
    outputs = call.expected(call.group.size)
    return await call.group.all_to_all(outputs, call.all())


async def _all_gather_variable(call: _Call) -> _Tensors:
    return await call.group.all_gather_variable(call.one())


async def _gather_variable(call: _Call) -> _Tensors:
    return await call.group.gather_variable(call.one(), dst=call.root) or ()


_COLLECTIVES: Mapping[
    "comm_pb2.CollectiveKind.ValueType", Callable[[_Call], Awaitable[_Tensors]]
] = MappingProxyType(
    {
        comm_pb2.COLLECTIVE_KIND_BARRIER: _barrier,
        comm_pb2.COLLECTIVE_KIND_BROADCAST: _broadcast,
        comm_pb2.COLLECTIVE_KIND_ALL_REDUCE: _all_reduce,
        comm_pb2.COLLECTIVE_KIND_REDUCE: _reduce,
        comm_pb2.COLLECTIVE_KIND_REDUCE_SCATTER: _reduce_scatter,
        comm_pb2.COLLECTIVE_KIND_ALL_GATHER: _all_gather,
        comm_pb2.COLLECTIVE_KIND_GATHER: _gather,
        comm_pb2.COLLECTIVE_KIND_SCATTER: _scatter,
        comm_pb2.COLLECTIVE_KIND_ALL_TO_ALL: _all_to_all,
        comm_pb2.COLLECTIVE_KIND_ALL_GATHER_VARIABLE: _all_gather_variable,
        comm_pb2.COLLECTIVE_KIND_GATHER_VARIABLE: _gather_variable,
    }
)
"""Each kind but UNSPECIFIED."""
