"""Which of gRPC's two ways to wait for sockets this process uses. Torch-free and grpc-free.

gRPC's event engine hands each message from its own threads to the completion queue: one wake-up
more than the older poller, in which the thread of the completion queue waits for the sockets
itself. For small messages wake-ups are most of the time: `python -m benchmarks.collectives`
with and without GRPC_EXPERIMENTS=event_engine_client in the environment shows 10 to 20 % less time
at 2.3 KB and 64 KB, and 15 to 20 % more bandwidth at 64 MB. Python used nothing else until the
releases that are named here; a later one will have only the engine (grpc/grpc pull request 42828).

gRPC reads the setting as it loads, so this runs when stagemesh.rpc is first imported.
"""

import sys
from collections.abc import Container, MutableMapping
from importlib import metadata

_SETTING = "GRPC_EXPERIMENTS"
_WITHOUT_ENGINE = "-event_engine_client,-event_engine_listener"
# An unknown name would make gRPC print a line in every process, so only where we have run it.
_FIRST, _LAST = (1, 80), (1, 85)


def prefer_older_poller(environ: MutableMapping[str, str], *, loaded: Container[str]) -> bool:
    """Choose the older poller, unless the environment has decided or gRPC is loaded already.

    Args:
        environ: of this process.
        loaded: the modules that are loaded.

    Returns:
        Whether it was chosen.
    """
    if _SETTING in environ or "grpc" in loaded or sys.platform != "linux":
        return False
    if not _FIRST <= _minor_version(metadata.version("grpcio")) <= _LAST:
        return False
    environ[_SETTING] = _WITHOUT_ENGINE
    return True


def _minor_version(text: str) -> tuple[int, int]:
    major, minor, *_ = text.split(".")
    return int(major), int(minor)
