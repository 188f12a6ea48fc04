"""Servers and channels: where they listen, who may call, and what stray bytes do."""

import asyncio
import subprocess
import sys
import textwrap
import time

import grpc
import grpc.aio
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from stagemesh.errors import ConfigError, PeerLost
from stagemesh.rpc.address import split_address
from stagemesh.rpc.channels import open_channel, wait_ready
from stagemesh.rpc.security import check_bind, is_loopback
from stagemesh.rpc.server import RpcServer, Service
from stagemesh.rpc.v1 import comm_pb2, comm_pb2_grpc
from tests.comm.daemons import daemons, join


async def _health(address: str, *, token: str | None = None) -> int:
    async with open_channel(address, token=token, kind="control") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)).status


async def test_port_0_takes_a_free_port_and_serves_health_and_reflection():
    async with RpcServer("127.0.0.1:0", services=[]) as server:
        assert server.address == f"127.0.0.1:{server.port}"
        assert server.port > 0
        assert await _health(server.address) == health_pb2.HealthCheckResponse.SERVING
        async with open_channel(server.address, token=None, kind="control") as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            replies = [reply async for reply in stub.ServerReflectionInfo(iter([request]))]
        names = {service.name for service in replies[0].list_services_response.service}
        assert "grpc.health.v1.Health" in names


async def test_a_port_in_use_is_named_and_not_shared():
    async with RpcServer("127.0.0.1:0", services=[]) as server:
        second = RpcServer(server.address, services=[])
        with pytest.raises(ConfigError, match=f"{server.address}: the port is in use"):
            await second.start()
    async with RpcServer(server.address, services=[]):
        pass


async def test_stopping_twice_is_fine_and_ends_calls_within_the_grace():
    async with daemons(1) as (daemon,):
        call = daemon.stub.Exchange()
        await call.write(comm_pb2.ExchangeFrame())
        start = time.monotonic()
        await daemon.server.stop(0.2)
        await daemon.server.stop(0.2)
        assert time.monotonic() - start < 3


async def test_a_stop_waits_until_cancelled_calls_have_unwound():
    has_unwound = asyncio.Event()

    class Slow(comm_pb2_grpc.CommServiceServicer):
        async def Exchange(self, request_iterator, context):  # noqa: N802
            yield comm_pb2.ExchangeFrame()
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.1)
                has_unwound.set()

    service = Service(
        name="Slow", servicer=Slow(), add=comm_pb2_grpc.add_CommServiceServicer_to_server
    )
    async with (
        RpcServer("127.0.0.1:0", services=[service]) as server,
        open_channel(server.address, token=None, kind="data") as channel,
    ):
        call = comm_pb2_grpc.CommServiceStub(channel).Exchange()
        assert await call.read() is not grpc.aio.EOF
        await server.stop(0)
        assert has_unwound.is_set()


@pytest.mark.parametrize("address", ["", "host", "host:", "host:x", "host:70000", "::1:5"])
def test_a_malformed_address_is_refused(address):
    with pytest.raises(ConfigError, match="host:port"):
        split_address(address)


@pytest.mark.parametrize(
    ("address", "parts"),
    [("127.0.0.1:0", ("127.0.0.1", 0)), ("[::1]:5", ("[::1]", 5)), (":5", ("", 5))],
)
def test_a_right_address_is_split(address, parts):
    assert split_address(address) == parts


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "[::1]", "::1"])
def test_loopback_needs_no_token(host):
    assert is_loopback(host)
    check_bind(host, token=None, insecure=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "", "[::]", "10.0.0.1", "example.org"])
def test_a_public_bind_needs_a_token_or_a_word(host):
    with pytest.raises(ConfigError, match="token"):
        check_bind(host, token=None, insecure=False)
    with pytest.raises(ConfigError, match="token"):
        RpcServer(f"{host}:0", services=[])
    check_bind(host, token="secret", insecure=False)
    check_bind(host, token=None, insecure=True)


@pytest.mark.parametrize("token", ["", "two words", "line\n", "\u00fc"])
def test_a_token_that_cannot_travel_is_refused(token):
    with pytest.raises(ConfigError, match="visible ASCII"):
        RpcServer("127.0.0.1:0", services=[], token=token)


@pytest.mark.parametrize("shown", [None, "wrong", "sesam", "sesame2"])
async def test_without_the_token_no_call_gets_in(shown):
    async with daemons(1, token="sesame") as (daemon,):
        async with open_channel(daemon.server.address, token=shown, kind="data") as channel:
            stub = comm_pb2_grpc.CommServiceStub(channel)

            async def stream():
                await asyncio.sleep(30)
                yield comm_pb2.CommTensor()

            async def read(replies):
                async for _ in replies:
                    pass

            # A stream is refused without waiting for its first message.
            for call in (
                stub.JoinGroup(comm_pb2.JoinGroupRequest()),
                stub.Send(stream()),
                read(stub.Recv(comm_pb2.RecvRequest())),
                read(stub.Exchange(stream())),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await asyncio.wait_for(call, 5)
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        # Health tells nothing but "serving", and is open.
        status = await _health(daemon.server.address, token=shown)
        assert status == health_pb2.HealthCheckResponse.SERVING
        await join([daemon])


def _num_connections() -> int:
    connections = psutil.Process().net_connections("tcp")
    return sum(connection.status == psutil.CONN_ESTABLISHED for connection in connections)


async def test_a_browser_on_the_port_does_no_harm():
    async with daemons(1) as (daemon,):
        await join([daemon])
        before = _num_connections()
        host, port = split_address(daemon.server.address)
        for _ in range(20):
            _, writer = await asyncio.open_connection(host, port)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(1024))
            await asyncio.wait_for(writer.drain(), 5)
            writer.close()
        await daemon.stub.LeaveGroup(comm_pb2.LeaveGroupRequest(group_id="g"), timeout=5)
        assert await _health(daemon.server.address) == health_pb2.HealthCheckResponse.SERVING
        for _ in range(100):
            if _num_connections() <= before:
                break
            await asyncio.sleep(0.05)
        assert _num_connections() <= before


async def test_a_peer_that_is_not_there_is_lost_at_the_deadline():
    async with open_channel("127.0.0.1:1", token="t", kind="control") as channel:
        start = time.monotonic()
        with pytest.raises(PeerLost, match=r"127\.0\.0\.1:1 could not be reached in 0\.\d s"):
            await wait_ready(channel, address="127.0.0.1:1", timeout_seconds=0.3)
        assert time.monotonic() - start < 2


async def test_a_restarted_peer_is_reached_within_5_seconds():
    async with RpcServer("127.0.0.1:0", services=[]) as server:
        address = server.address
        channel = open_channel(address, token=None, kind="control")
        stub = health_pb2_grpc.HealthStub(channel)

        async def is_reached() -> bool:
            start = time.monotonic()
            try:
                await stub.Check(health_pb2.HealthCheckRequest(), timeout=1)
            except grpc.aio.AioRpcError:
                assert time.monotonic() - start < 2
                return False
            return True

        assert await is_reached()
    # Long enough for the back-off to reach its limit.
    for _ in range(12):
        assert not await is_reached()
        await asyncio.sleep(0.25)
    async with RpcServer(address, services=[]):
        start = time.monotonic()
        reached = False
        while not reached and time.monotonic() - start < 5:
            await asyncio.sleep(0.1)
            reached = await is_reached()
        assert reached
        await channel.close()


async def test_control_and_data_have_connections_of_their_own():
    async with RpcServer("127.0.0.1:0", services=[]) as server:
        before = _num_connections()
        async with (
            open_channel(server.address, token=None, kind="control") as control,
            open_channel(server.address, token=None, kind="data") as data,
        ):
            for channel in (control, data):
                await wait_ready(channel, address=server.address, timeout_seconds=5)
            # Both ends of both connections are in this process.
            assert _num_connections() - before == 4


FORK_SCRIPT = """
    import asyncio, multiprocessing, sys
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from stagemesh.rpc.channels import open_channel

    async def ping(address):
        async with open_channel(address, token=None, kind="control") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)

    def child(address):
        asyncio.run(ping(address))

    def fork(address):
        process = multiprocessing.get_context("fork").Process(target=child, args=(address,))
        process.start()
        return process

    async def parent(address, early):
        async with open_channel(address, token=None, kind="control") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
            process = early or fork(address)
            await asyncio.to_thread(process.join, 10)
            if process.is_alive():
                process.kill()
                sys.exit("the child hangs")
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
            print("child", process.exitcode)

    asyncio.run(parent(sys.argv[1], fork(sys.argv[1]) if sys.argv[2] == "before" else None))
"""


@pytest.mark.parametrize(("when", "exit_code"), [("after", 1), ("before", 0)])
async def test_a_child_forked_after_a_call_gets_an_error_and_never_hangs(when, exit_code):
    """The parent's channel works on either way; a child forked before the first call works too."""
    async with RpcServer("127.0.0.1:0", services=[]) as server:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            textwrap.dedent(FORK_SCRIPT),
            server.address,
            when,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 0, err.decode()
    assert out.decode().split() == ["child", str(exit_code)]
    assert (b"fork after connect is unsupported" in err) == (exit_code == 1)
