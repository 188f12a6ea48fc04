"""The hello of a long-lived stream: accepted, refused, unanswered, ended."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from stagemesh.errors import NotReady, PeerLost, ProtocolError, StagemeshError
from stagemesh.rpc import handshake
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.handshake import PeerStatus, shake_hands, why_ended
from stagemesh.rpc.server import RpcServer, Service
from stagemesh.rpc.v1 import node_pb2, node_pb2_grpc

HELLO = node_pb2.StepFrame(hello=node_pb2.StepHello(deployment_id="d"))

Answer = Callable[[Any], AsyncIterator[node_pb2.StepAck]]


class Answering(node_pb2_grpc.NodeServiceServicer):
    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    async def RunSteps(self, request_iterator, context):  # noqa: N802
        async for ack in self._answer(request_iterator):
            yield ack


@contextlib.asynccontextmanager
async def call_to(answer: Answer) -> AsyncIterator[Any]:
    service = Service(
        name="stagemesh.rpc.v1.NodeService",
        servicer=Answering(answer),
        add=node_pb2_grpc.add_NodeServiceServicer_to_server,
    )
    async with (
        RpcServer("127.0.0.1:0", services=[service]) as server,
        open_channel(server.address, token=None, kind="data") as channel,
    ):
        yield node_pb2_grpc.NodeServiceStub(channel).RunSteps()


def shake(call: Any, *, timeout_seconds: float = 5.0) -> Awaitable[None]:
    return shake_hands(
        call,
        HELLO,
        operation="open steps",
        peer="node b (host:1)",
        node_id="b",
        timeout_seconds=timeout_seconds,
    )


async def accept(requests: Any) -> AsyncIterator[node_pb2.StepAck]:
    assert (await anext(aiter(requests))).hello.deployment_id == "d"
    yield node_pb2.StepAck(accepted=True)
    async for _ in requests:
        return


async def refuse(requests: Any) -> AsyncIterator[node_pb2.StepAck]:
    await anext(aiter(requests))
    raise NotReady("no such deployment")
    yield


async def shrug(requests: Any) -> AsyncIterator[node_pb2.StepAck]:
    await anext(aiter(requests))
    yield node_pb2.StepAck(accepted=False)
    await asyncio.sleep(20)


async def end(requests: Any) -> AsyncIterator[node_pb2.StepAck]:
    await anext(aiter(requests))
    return
    yield


async def hang(requests: Any) -> AsyncIterator[node_pb2.StepAck]:
    await asyncio.sleep(20)
    yield node_pb2.StepAck()


async def test_an_accepted_stream_is_open_and_says_later_why_it_ended():
    async with call_to(accept) as call:
        await shake(call)
        await call.write(HELLO)
        assert await call.read() is grpc.aio.EOF
        with pytest.raises(asyncio.InvalidStateError) as caught:
            await call.write(HELLO)
        why = await why_ended(
            call, caught.value, operation="send step 3", peer="node b (host:1)", node_id="b"
        )
    assert isinstance(why, PeerLost)
    assert str(why) == "send step 3: node b (host:1) ended the stream"
    assert why.node_id == "b"


async def refuse_later(requests: Any) -> AsyncIterator[node_pb2.StepAck]:
    await anext(aiter(requests))
    yield node_pb2.StepAck(accepted=True)
    raise NotReady("the stage is gone")


async def test_who_writes_to_a_refused_stream_learns_why(monkeypatch):
    """Whatever the write meets: the end that was seen, or one that comes in its middle."""
    monkeypatch.setattr(handshake, "_STATUS_SECONDS", 0.05)
    async with call_to(refuse_later) as call:
        status = PeerStatus(call)
        await shake(call)
        await asyncio.wait_for(call.code(), 5)
        with pytest.raises(asyncio.InvalidStateError) as caught:
            await call.write(HELLO)
        seen = await why_ended(call, caught.value, operation="send", peer="node b", node_id="b")
        # What such a write leaves behind until the status of the peer is here.
        internal = grpc.aio.AioRpcError(
            grpc.StatusCode.INTERNAL,
            grpc.aio.Metadata(),
            grpc.aio.Metadata(),
            details="Internal error from Core",
        )
        middle = await why_ended(call, internal, operation="send", peer="node b", node_id="b")
        # Such a write may also come second.
        call._cython_call.set_internal_error("a batch failed")
        settings = {"operation": "send", "peer": "node b", "node_id": "b"}
        kept = await why_ended(call, internal, **settings, status=status)
        # Control: then nobody else knows any more.
        lost = await why_ended(call, internal, **settings)
    for why in (seen, middle, kept):
        assert isinstance(why, NotReady)
        assert str(why) == "send on node b: the stage is gone"
    assert "INTERNAL Internal error from Core" in str(lost)


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (refuse, NotReady, "open steps on node b (host:1): no such deployment"),
        (shrug, ProtocolError, "open steps: node b (host:1) answered the hello without accepting"),
        (end, PeerLost, "open steps: node b (host:1) ended the stream"),
        (hang, PeerLost, "open steps: node b (host:1) did not accept the stream within 0.3 s"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_without_acceptance_the_error_names_operation_and_peer(
    answer: Answer, error: type[StagemeshError], text: str
):
    async with call_to(answer) as call:
        with pytest.raises(error) as caught:
            await shake(call, timeout_seconds=0.3 if answer is hang else 5.0)
        assert text in str(caught.value)
        # Nothing is left open: a refused stream has ended on both sides.
        await asyncio.wait_for(call.code(), 5)


async def test_a_peer_that_is_not_there_is_lost():
    async with open_channel("127.0.0.1:1", token=None, kind="data") as channel:
        with pytest.raises(PeerLost, match="node b"):
            await shake(node_pb2_grpc.NodeServiceStub(channel).RunSteps())
