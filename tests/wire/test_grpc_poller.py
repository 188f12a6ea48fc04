"""Which poller gRPC is told to use, and that it then still does all it did."""

import os
import subprocess
import sys
import textwrap
from importlib import metadata

import pytest

from stagemesh.rpc.grpc_poller import prefer_older_poller

SETTING = "GRPC_EXPERIMENTS"


@pytest.mark.parametrize(
    ("version", "environ", "loaded", "is_chosen"),
    [
        ("1.80.0", {}, (), True),
        ("1.85.3", {}, (), True),
        ("1.85.3", {SETTING: ""}, (), False),
        ("1.85.3", {SETTING: "event_engine_client"}, (), False),
        ("1.85.3", {}, ("grpc",), False),
        ("1.79.9", {}, (), False),
        ("1.86.0rc1", {}, (), False),
        ("2.0.0", {}, (), False),
    ],
)
def test_only_what_was_tried_is_set(monkeypatch, version, environ, loaded, is_chosen):
    monkeypatch.setattr(metadata, "version", lambda _: version)
    monkeypatch.setattr(sys, "platform", "linux")
    before = dict(environ)
    assert prefer_older_poller(environ, loaded=loaded) is is_chosen
    assert (environ != before) is is_chosen


def test_other_systems_keep_their_default(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not prefer_older_poller({}, loaded=())


CALL = """
import asyncio, os
import stagemesh.rpc.channels as channels
import grpc.aio

async def main():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with channels.open_channel(f"127.0.0.1:{port}", token=None, kind="data") as channel:
        await asyncio.wait_for(channel.channel_ready(), 10)
    await server.stop(0)

asyncio.run(main())
print(os.environ["GRPC_EXPERIMENTS"])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is set")
@pytest.mark.parametrize(
    ("environ", "setting"),
    [
        ({}, "-event_engine_client,-event_engine_listener"),
        ({SETTING: "event_engine_client"}, "event_engine_client"),
        # Negative control: gRPC reports a name that it does not know.
        ({SETTING: "-no_such_thing"}, "-no_such_thing"),
    ],
)
def test_grpc_knows_the_names_that_we_set(environ, setting):
    clean = {name: value for name, value in os.environ.items() if name != SETTING}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CALL)],
        env=clean | environ,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout.strip() == setting
    assert ("Unknown experiment" in done.stderr) is (setting == "-no_such_thing")
