"""Payload: what one stage hands to another for one micro-batch, and its messages.

An activation is a tuple of tensors of any number, dtypes and shapes; so is the gradient that comes
back, where a tensor may be None. Each message says what it is by its first dim; nothing about a
micro-batch is taken from the one before it:

    [1, ...]     the only tensor, which wants a gradient: the usual case is one message
    [2, n] int64 a header: n tensors follow; row 0 whether it is there, row 1 whether it wants a
                 gradient; then the tensors as they are, those that are there
    [0] int64    the micro-batch has no samples: stages pass it on and compute nothing
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from stagemesh.errors import ProtocolError


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """The tensors of one micro-batch between two stages."""

    tensors: tuple[torch.Tensor | None, ...]
    wants_grad: tuple[bool, ...]
    """Of each tensor: whether its sender can use a gradient for it."""
    is_empty: bool = False
    """Whether the micro-batch has no samples; then there are no tensors."""

    def messages(self) -> list[torch.Tensor]:
        """What is sent, in order; nothing is copied."""
        if self.is_empty:
            return [torch.empty(0, dtype=torch.int64)]
        there = [tensor.detach() for tensor in self.tensors if tensor is not None]
        if len(there) == len(self.tensors) == 1 and self.wants_grad[0]:
            return [there[0].unsqueeze(0)]
        flags = [[tensor is not None for tensor in self.tensors], list(self.wants_grad)]
        return [torch.tensor(flags, dtype=torch.int64), *there]


NO_SAMPLES = Payload(tensors=(), wants_grad=(), is_empty=True)


def payload_of(tensors: Sequence[torch.Tensor | None]) -> Payload:
    """A payload whose tensors want a gradient if they require one."""
    return Payload(
        tensors=tuple(tensors),
        wants_grad=tuple(tensor is not None and tensor.requires_grad for tensor in tensors),
    )


def read_payload(
    first: torch.Tensor, *, read_next: Callable[[int], Sequence[torch.Tensor]]
) -> Payload:
    """The payload of its messages.

    Args:
        first: the first message.
        read_next: gives the next messages, as many as it is asked for.

    Raises:
        ProtocolError: it is no message of a payload.
    """
    kind = first.shape[0] if first.dim() else -1
    if kind == 1:
        return Payload(tensors=(first.squeeze(0),), wants_grad=(True,))
    if kind == 0:
        return NO_SAMPLES
    if kind != 2 or first.dim() != 2 or first.dtype != torch.int64:
        raise ProtocolError(
            f"a message between stages begins with [1, ...], [2, n] int64 or [0], got "
            f"{list(first.shape)} {first.dtype}: something else uses the pipeline's group"
        )
    is_there, wants_grad = first.tolist()
    following = iter(read_next(sum(is_there)))
    tensors = tuple(next(following) if there else None for there in is_there)
    return Payload(tensors=tensors, wants_grad=tuple(map(bool, wants_grad)))
