"""Errors travel as what they are: to a gRPC status with detail, and back to the class."""

import asyncio
import contextlib
import logging

import grpc
import grpc.aio
import pytest

from stagemesh import errors
from stagemesh.errors import StagemeshError
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.server import RpcServer, Service
from stagemesh.rpc.status import STATUS_OF_ERROR, error_classes, from_rpc_error, to_status
from stagemesh.rpc.v1 import comm_pb2, comm_pb2_grpc


def _all_errors(root: type[StagemeshError] = StagemeshError) -> list[type[StagemeshError]]:
    found = [root]
    for cls in root.__subclasses__():
        if cls.__module__ == errors.__name__:
            found += _all_errors(cls)
    return found


class RaisingServicer(comm_pb2_grpc.CommServiceServicer):
    """Raises `error` from each of the four kinds of handler, streams after one reply."""

    def __init__(self) -> None:
        self.error: BaseException = RuntimeError()

    async def JoinGroup(self, request, context):  # noqa: N802
        raise self.error

    async def LeaveGroup(self, request, context):  # noqa: N802
        await context.abort(grpc.StatusCode.OUT_OF_RANGE, "on purpose")

    async def Send(self, request_iterator, context):  # noqa: N802
        async for _ in request_iterator:
            raise self.error

    async def Recv(self, request, context):  # noqa: N802
        yield comm_pb2.CommTensor()
        raise self.error

    async def AllReduce(self, request_iterator, context):  # noqa: N802
        async for _ in request_iterator:
            yield comm_pb2.CommTensor()
            raise self.error

    async def Exchange(self, request_iterator, context):  # noqa: N802
        await context.write(comm_pb2.ExchangeAck())
        raise self.error


@contextlib.asynccontextmanager
async def raising():
    servicer = RaisingServicer()
    service = Service(
        name="stagemesh.rpc.v1.CommService",
        servicer=servicer,
        add=comm_pb2_grpc.add_CommServiceServicer_to_server,
    )
    async with (
        RpcServer("127.0.0.1:0", services=[service], node_id="n7") as server,
        open_channel(server.address, token=None, kind="control") as channel,
    ):
        yield servicer, comm_pb2_grpc.CommServiceStub(channel)


async def _count(replies) -> None:
    num_replies = 0
    try:
        async for _ in replies:
            num_replies += 1
    finally:
        assert num_replies == 1


async def _caught(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call, 5)
    return caught.value


KINDS = {
    "unary-unary": lambda stub: _caught(stub.JoinGroup(comm_pb2.JoinGroupRequest())),
    "stream-unary": lambda stub: _caught(stub.Send(iter([comm_pb2.CommTensor()]))),
    "unary-stream": lambda stub: _caught(_count(stub.Recv(comm_pb2.RecvRequest()))),
    "stream-stream": lambda stub: _caught(_count(stub.AllReduce(iter([comm_pb2.CommTensor()])))),
    "stream-stream by write": lambda stub: _caught(_count(stub.Exchange(iter([])))),
}


def test_each_error_has_a_status_of_its_own_line():
    assert set(_all_errors()) == set(STATUS_OF_ERROR)
    assert len(_all_errors()) > 15
    assert len(error_classes()) == len(STATUS_OF_ERROR)


def test_what_is_not_ours_is_internal_and_subclasses_follow_their_parent():
    class NewTimeout(errors.CollectiveTimeout):
        pass

    assert to_status(ZeroDivisionError()) is grpc.StatusCode.INTERNAL
    assert to_status(NewTimeout("x")) is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("kind", KINDS)
async def test_every_error_comes_back_as_its_class_from_every_kind_of_call(kind):
    async with raising() as (servicer, stub):
        for cls in _all_errors():
            servicer.error = cls(f"text of {cls.__name__}: gr\u00f6\u00dfer")
            caught = await KINDS[kind](stub)
            assert caught.code() is STATUS_OF_ERROR[cls]
            rebuilt = from_rpc_error(caught, operation="try", peer="10.0.0.1:1")
            assert type(rebuilt) is cls
            assert str(rebuilt) == str(servicer.error)
            assert "raised by n7 during try" in rebuilt.__notes__


async def test_a_subclass_that_the_peer_does_not_know_comes_as_its_parent():
    class LocalOnly(errors.PeerLost):
        pass

    async with raising() as (servicer, stub):
        servicer.error = LocalOnly("gone", node_id="n3")
        rebuilt = from_rpc_error(await KINDS["unary-unary"](stub), operation="o", peer="p")
    assert type(rebuilt) is errors.PeerLost
    assert rebuilt.node_id == "n3"


async def test_a_failed_stage_keeps_its_remote_type_and_traceback():
    async with raising() as (servicer, stub):
        servicer.error = errors.StageFailed(
            "boom",
            node_id="n2",
            operation="forward",
            error_type="FloatingPointError",
            remote_traceback="x" * 50_000 + "\nthe last line",
        )
        rebuilt = from_rpc_error(await KINDS["unary-unary"](stub), operation="o", peer="p")
    assert isinstance(rebuilt, errors.StageFailed)
    assert (rebuilt.node_id, rebuilt.operation) == ("n2", "forward")
    assert rebuilt.error_type == "FloatingPointError"
    assert rebuilt.remote_traceback.endswith("the last line")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_foreign_exception_shows_its_name_but_not_its_text(kind, caplog):
    async with raising() as (servicer, stub):
        servicer.error = KeyError("secret")
        with caplog.at_level(logging.ERROR):
            caught = await KINDS[kind](stub)
    assert caught.code() is grpc.StatusCode.INTERNAL
    assert "KeyError" in caught.details()
    assert "secret" not in caught.details()
    assert "secret" not in repr(caught.trailing_metadata())
    assert "secret" in caplog.text
    rebuilt = from_rpc_error(caught, operation="o", peer="p")
    assert isinstance(rebuilt, errors.StageFailed)
    assert rebuilt.error_type == "KeyError"


async def test_a_very_long_text_is_cut_and_still_arrives():
    async with raising() as (servicer, stub):
        servicer.error = errors.ConfigError("\u00fc" * 100_000)
        caught = await KINDS["unary-unary"](stub)
    rebuilt = from_rpc_error(caught, operation="o", peer="p")
    assert type(rebuilt) is errors.ConfigError
    assert 500 < len(str(rebuilt)) < 3000


async def test_a_handler_that_aborts_itself_is_left_alone():
    async with raising() as (_, stub):
        caught = await _caught(stub.LeaveGroup(comm_pb2.LeaveGroupRequest()))
    assert (caught.code(), caught.details()) == (grpc.StatusCode.OUT_OF_RANGE, "on purpose")


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.PeerLost),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.PeerLost),
        (grpc.StatusCode.CANCELLED, errors.PeerLost),
        (grpc.StatusCode.UNAUTHENTICATED, errors.Unauthenticated),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.CapacityExceeded),
        (grpc.StatusCode.UNIMPLEMENTED, errors.ProtocolError),
        (grpc.StatusCode.UNKNOWN, errors.StageFailed),
    ],
)
@pytest.mark.parametrize("metadata", [None, [("stagemesh-error-bin", b"\xff\xff")]])
def test_a_status_without_detail_names_peer_operation_and_time(code, cls, metadata):
    bare = grpc.aio.AioRpcError(
        code, grpc.aio.Metadata(), grpc.aio.Metadata(*(metadata or [])), "why"
    )
    error = from_rpc_error(bare, operation="load stage 1", peer="n4", elapsed_seconds=2.5)
    assert type(error) is cls
    for word in ("load stage 1", "n4", "2.5 s", code.name, "why"):
        assert word in str(error)


async def test_a_peer_that_is_not_there_is_lost():
    async with open_channel("127.0.0.1:1", token=None, kind="control") as channel:
        call = comm_pb2_grpc.CommServiceStub(channel).LeaveGroup(comm_pb2.LeaveGroupRequest())
        error = from_rpc_error(await _caught(call), operation="leave", peer="127.0.0.1:1")
    assert isinstance(error, errors.PeerLost)
    assert error.node_id == "127.0.0.1:1"


async def test_an_unknown_method_is_a_protocol_error():
    async with (
        RpcServer("127.0.0.1:0", services=[]) as empty,
        open_channel(empty.address, token=None, kind="control") as channel,
    ):
        call = comm_pb2_grpc.CommServiceStub(channel).LeaveGroup(comm_pb2.LeaveGroupRequest())
        error = from_rpc_error(await _caught(call), operation="leave", peer="p")
    assert isinstance(error, errors.ProtocolError)
