"""A member of a group as a record: what ranks leave for each other where they meet."""

from dataclasses import asdict
from typing import Any

from stagemesh.comm.peer_link import PeerAddress
from stagemesh.errors import ProtocolError
from stagemesh.rpc.v1 import comm_pb2

_OPTIONAL = ("unix_path", "host_id")
# Far above what an address or a socket's path can have.
_MAX_CHARS = 1024


def record_of(member: PeerAddress) -> dict[str, str]:
    """All of it but the ranks, which the place of the record says."""
    record = asdict(member)
    del record["rank"], record["world_rank"]
    return record


def member_from(record: Any, *, rank: int, source: str) -> PeerAddress:
    """The member of a record.

    Args:
        record: what was read; nothing about it is trusted.
        rank: whose it is.
        source: where it was read, for the error.

    Raises:
        ProtocolError: it is no such record.
    """
    if not isinstance(record, dict):
        raise ProtocolError(f"{source}: it is no record")
    texts = {}
    for name in ("address", "node_id", *_OPTIONAL):
        text = record.get(name, "")
        if not isinstance(text, str) or len(text) > _MAX_CHARS:
            raise ProtocolError(f"{source}: {name} is no text of at most {_MAX_CHARS} characters")
        if not text and name not in _OPTIONAL:
            raise ProtocolError(f"{source}: it has no {name}")
        texts[name] = text
    return PeerAddress(
        rank=rank,
        node_id=texts["node_id"],
        address=texts["address"],
        unix_path=texts["unix_path"],
        host_id=texts["host_id"],
    )


def member_to_proto(member: PeerAddress) -> comm_pb2.GroupMember:
    """The same as a message."""
    return comm_pb2.GroupMember(**record_of(member))


def member_from_proto(member: comm_pb2.GroupMember, *, rank: int) -> PeerAddress:
    """A member from a message; who opens the group checks it."""
    return PeerAddress(
        rank=rank,
        node_id=member.node_id,
        address=member.address,
        unix_path=member.unix_path,
        host_id=member.host_id,
    )
