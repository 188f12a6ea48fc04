"""Unix sockets between processes of one host: who may use one, and where it lies. Torch-free.

A host is known by its boot id, its network namespace and its name together. Containers of one
machine that differ in one of these count as different hosts and stay on TCP; so do all processes
where the kernel tells no boot id. Equal ids do not promise a common file system, so a socket is
only used when it is there and may be written to.
"""

import os
import socket
import sys
from pathlib import Path
from typing import Self

from stagemesh.private_folder import PrivateFolder

_SOCKET = "rpc.sock"

# Of sun_path, with its closing zero; the system refuses longer ones.
_MAX_PATH_BYTES = 107

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


def host_id() -> str:
    """The host of this process; empty where it cannot be told."""
    try:
        boot = _BOOT_ID.read_text().strip()
        network = _NETWORK.stat().st_ino
    except OSError:
        return ""
    return f"{boot}/{network}/{socket.gethostname()}"


def is_reachable(path: str, *, host: str) -> bool:
    """Whether a socket that a process on `host` made can be used from here."""
    if not path or not host or host != host_id():
        return False
    # access first: a folder of another user would make is_socket raise.
    return os.access(path, os.R_OK | os.W_OK) and Path(path).is_socket()


def target_of(path: str) -> str:
    """A socket's path as gRPC spells it."""
    return f"unix:{path}"


class SocketFolder:
    """A private folder for one socket, removed with it."""

    def __init__(self, folder: PrivateFolder) -> None:
        self._folder = folder

    @classmethod
    def make(cls) -> Self | None:
        """A new one in the folder for temporary files; None when paths there are too long.

        Raises:
            ConfigError: none can be made there.
        """
        if sys.platform == "win32":
            return None
        made = cls(PrivateFolder.make())
        if len(os.fsencode(made.path)) <= _MAX_PATH_BYTES:
            return made
        made.remove()
        return None

    @property
    def path(self) -> str:
        """Path of the socket."""
        return str(self._folder.path / _SOCKET)

    def remove(self) -> None:
        """Remove socket and folder. May be called again."""
        self._folder.remove()
