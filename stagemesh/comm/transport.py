"""What carries tensors between the ranks of a group: the values, and the Transport protocol.

A transport delivers each message into the mailbox of the target rank. Messages of one source with
one tag arrive in the order of their sends; nothing is promised between tags or sources. Two
implementations: `local` (ranks of one process) and `grpc_transport` (ranks on hosts).
"""

from dataclasses import dataclass
from typing import Protocol, Self

import torch

from stagemesh.comm.mailbox import Mailbox
from stagemesh.comm.reduce import ReduceOp

MAX_USER_TAG = 2**62 - 1
"""Largest tag of send and recv; the tags above carry collectives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Dtype and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        """Those of a tensor."""
        return cls(dtype=tensor.dtype, shape=tuple(tensor.shape))

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What a message is, beside its tensor."""

    tag: int
    """Mailbox key, with the source rank."""
    operation: str
    """What the sender is doing: "send", "all_reduce", ..."""
    sequence: int = 0
    """Collectives: how many the sender had called before."""
    reduce_op: ReduceOp | None = None
    """Collectives that reduce."""
    called_with: TensorSpec | None = None
    """Collectives: the whole tensor, of which the message may carry a chunk."""

    def with_tag(self, tag: int) -> "Envelope":
        """The same with another tag. (dataclasses.replace takes 1.6 times as long.)"""
        return Envelope(
            tag=tag,
            operation=self.operation,
            sequence=self.sequence,
            reduce_op=self.reduce_op,
            called_with=self.called_with,
        )

    def describe(self) -> str:
        """The call as words: "all_reduce(sum) on float32[8]"."""
        reduce_op = f"({self.reduce_op.value})" if self.reduce_op else ""
        called_with = f" on {self.called_with}" if self.called_with else ""
        return f"{self.operation}{reduce_op}{called_with}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One tensor that arrived, or is about to."""

    source_rank: int
    incarnation: int
    envelope: Envelope
    tensor: torch.Tensor

    @property
    def tag(self) -> int:
        """Tag of the envelope."""
        return self.envelope.tag

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return self.tensor.numel() * self.tensor.element_size()


class Transport(Protocol):
    """Carries tensors from this rank to the mailboxes of the others."""

    @property
    def rank(self) -> int:
        """This rank in the group."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def mailbox(self) -> Mailbox[Message]:
        """Where messages to this rank wait."""

    async def send(self, peer_rank: int, *, envelope: Envelope, tensor: torch.Tensor) -> None:
        """Bring a tensor on its way; its memory may be reused when this returns.

        The caller sets the deadline by cancelling.

        Raises:
            PeerLost: the peer is gone.
        """

    def can_send_now(self, peer_rank: int, *, num_bytes: int) -> bool:
        """Whether a send would wait neither for credit, nor for a connection or another send."""

    async def notify_abort(self, cause: str) -> None:
        """Tell all peers that this rank aborts the group; bounded, and silent where it fails."""

    async def close(self) -> None:
        """Leave: wake what waits here, let go of all links. May be called again."""
