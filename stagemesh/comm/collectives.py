"""How a collective begins, and how its tensors travel in chunks. R is the group's size.

Each begins with one round in which every rank tells every other what it called; who sees a
difference raises, and as all see the same calls, all raise. What is small travels in that round:

    agree        rank 0 <-> rank 1      one hop; each message: the call, and a payload for that peer
                     \\     /
                      rank 2

What is larger follows in chunks. On the way all tensors are flat bytes (see `raw`). The algorithms
on top: `movement` (broadcast, gathers, scatter, all_to_all) and `reductions`.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from stagemesh.comm.rank_names import RankNames
from stagemesh.comm.tasks import WaitingRanks, run_together
from stagemesh.comm.transport import MAX_USER_TAG, Envelope, Message, TensorSpec, Transport
from stagemesh.errors import CollectiveMismatch, ProtocolError

_PHASES_PER_CALL = 4
_AGREE = 0
"""The phase that a call begins with."""
FIRST, SECOND = 1, 2
"""Phases after the agreement."""

_NOTHING = torch.empty(0, dtype=torch.uint8)


def first_tag(sequence: int) -> int:
    """Tag of the agreement of a group's collective with that number."""
    return MAX_USER_TAG + 1 + sequence * _PHASES_PER_CALL


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """One call of a collective on this rank."""

    group_id: str
    transport: Transport
    names: RankNames
    envelope: Envelope
    """Says what was called. Its tag is that of the agreement; later phases have others."""
    waiting: WaitingRanks
    direct_bytes: int
    """Up to this size tensors travel in the agreement; see `is_direct`. Equal on all ranks."""
    chunk_bytes: int
    """Message size of what is larger. Equal on all ranks."""
    seconds: float
    """Its deadline, from its begin."""
    has_free_dim: bool = False
    """The first dim may differ between the ranks."""

    @property
    def rank(self) -> int:
        """This rank."""
        return self.transport.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.transport.size

    @property
    def peers(self) -> list[int]:
        """All other ranks."""
        return [rank for rank in range(self.size) if rank != self.rank]

    def tag(self, phase: int) -> int:
        """Tag of a phase of this call; no other call of the group has it."""
        return first_tag(self.envelope.sequence) + phase

    def is_direct(self, num_bytes: int, *, num_copies: int = 1) -> bool:
        """Whether so much travels in the agreement.

        Args:
            num_bytes: what a rank has for a peer.
            num_copies: to how many peers the same goes, where in pieces each rank would send less.
        """
        return num_bytes * num_copies <= self.direct_bytes

    async def send(self, peer: int, *, phase: int, tensor: torch.Tensor) -> None:
        """Send to a peer."""
        tag = self.tag(phase)
        envelope = self.envelope if self.envelope.tag == tag else self.envelope.with_tag(tag)
        with self.waiting.on(peer):
            await self.transport.send(peer, envelope=envelope, tensor=tensor)

    async def receive(self, peer: int, *, phase: int) -> Message:
        """The peer's next message of a phase."""
        with self.waiting.on(peer):
            return await self.transport.mailbox.get(peer, self.tag(phase))

    async def receive_chunk(self, peer: int, *, phase: int, num_bytes: int) -> torch.Tensor:
        """The peer's next chunk, of that size."""
        tensor = (await self.receive(peer, phase=phase)).tensor
        self.check_received(peer, tensor, num_bytes=num_bytes)
        return tensor

    def check_received(self, peer: int, tensor: torch.Tensor, *, num_bytes: int) -> None:
        """Refuse bytes that are not what a peer with the same settings sends.

        Raises:
            ProtocolError: another size or dtype.
        """
        if tensor.shape != (num_bytes,) or tensor.dtype not in (torch.uint8, torch.bool):
            raise ProtocolError(
                f"{self.names.of(peer)} sent {TensorSpec.of(tensor)} in "
                f"{self.envelope.operation}, expected {num_bytes} bytes; "
                "all ranks need the same direct_bytes and chunk_bytes"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """What the agreement tells of one rank."""

    called_with: TensorSpec | None
    payload: torch.Tensor
    """Flat bytes for this rank."""


async def agree(
    call: CollectiveCall, *, payloads: Mapping[int, torch.Tensor] | None = None
) -> list[Contribution]:
    """Tell each rank what this one called, with a payload for it; the others' in rank order.

    Args:
        call: this rank's call.
        payloads: flat bytes by rank; nothing for a rank that is not in it.

    Raises:
        CollectiveMismatch: a rank called something else. All messages of the round were taken, so
            the group stays in step.
    """
    payloads = payloads or {}
    messages = await _swap(call, {peer: payloads.get(peer, _NOTHING) for peer in call.peers})
    contributions = [
        Contribution(called_with=told.envelope.called_with, payload=told.tensor)
        for _, told in sorted(messages.items())
    ]
    own = call.envelope
    contributions.insert(
        call.rank,
        Contribution(called_with=own.called_with, payload=payloads.get(call.rank, _NOTHING)),
    )
    if not all(_is_same(told.envelope, own) for told in messages.values()):
        envelopes = {rank: told.envelope for rank, told in messages.items()} | {call.rank: own}
        compare(call, [envelopes[rank] for rank in range(call.size)])
    return contributions


async def agree_as_pair(call: CollectiveCall, payload: torch.Tensor) -> torch.Tensor:
    """As `agree` of two ranks that have as many bytes for each other; the other's.

    The smallest collectives are bound by what is done for each message: this does the least.

    Raises:
        CollectiveMismatch, ProtocolError: see `agree`, and `CollectiveCall.check_received`.
    """
    peer = 1 - call.rank
    told = (await _swap(call, {peer: payload}))[peer]
    own = call.envelope
    if told.envelope is not own and not _is_same(told.envelope, own):
        compare(call, [own, told.envelope] if peer else [told.envelope, own])
    call.check_received(peer, told.tensor, num_bytes=payload.numel())
    return told.tensor


async def _swap(call: CollectiveCall, outgoing: Mapping[int, torch.Tensor]) -> dict[int, Message]:
    """Send each peer its payload and receive theirs, by rank."""
    if len(outgoing) == 1:
        [(peer, payload)] = outgoing.items()
        if call.transport.can_send_now(peer, num_bytes=payload.numel()):
            # One after the other costs no tasks. It cannot lock up: the peer's loop takes what
            # arrives into its mailbox, whatever its own call waits for.
            await call.send(peer, phase=_AGREE, tensor=payload)
            return {peer: await call.receive(peer, phase=_AGREE)}
    sends = [call.send(peer, phase=_AGREE, tensor=raw) for peer, raw in outgoing.items()]
    receives = [call.receive(peer, phase=_AGREE) for peer in outgoing]
    results = (await run_together([*sends, *receives]))[len(sends) :]
    return {message.source_rank: message for message in results if message is not None}


def compare(call: CollectiveCall, in_order: Sequence[Envelope]) -> None:
    """Check that all ranks called the same.

    Raises:
        CollectiveMismatch: they did not; with each rank's call.
    """
    if len({_essence(envelope, call.has_free_dim) for envelope in in_order}) > 1:
        text = ", ".join(
            f"{call.names.of(r)} called {told.describe()}" for r, told in enumerate(in_order)
        )
        raise mismatch(call, text)


def mismatch(call: CollectiveCall, text: str) -> CollectiveMismatch:
    """The error that each rank raises."""
    return CollectiveMismatch(
        f"ranks disagree in collective {call.envelope.sequence} of group {call.group_id}: {text}"
    )


def _is_same(one: Envelope, other: Envelope) -> bool:
    """Whether two calls are equal in all but the tag: the usual case, told fast."""
    return (
        one.sequence == other.sequence
        and one.reduce_op is other.reduce_op
        and one.operation == other.operation
        and one.called_with == other.called_with
    )


def _essence(envelope: Envelope, has_free_dim: bool) -> tuple[object, ...]:
    """What must be equal on all ranks: all but the tag."""
    spec = envelope.called_with
    if has_free_dim and spec is not None:
        spec = replace(spec, shape=(-1, *spec.shape[1:]))
    return (envelope.operation, envelope.sequence, envelope.reduce_op, spec)


async def exchange(
    call: CollectiveCall,
    *,
    phase: int,
    outgoing: Mapping[int, torch.Tensor],
    incoming: Mapping[int, int],
) -> dict[int, list[torch.Tensor]]:
    """Send each peer its bytes in chunks, and receive the peers' for this rank; all at once.

    Args:
        call: this rank's call.
        phase: of the messages.
        outgoing: flat bytes by rank.
        incoming: number of bytes by rank.
    """
    received: dict[int, list[torch.Tensor]] = {peer: [] for peer in incoming}

    async def send(peer: int) -> None:
        raw = outgoing[peer]
        for span in spans(raw.numel(), call.chunk_bytes):
            await call.send(peer, phase=phase, tensor=raw[span])

    async def receive(peer: int) -> None:
        for span in spans(incoming[peer], call.chunk_bytes):
            chunk = await call.receive_chunk(peer, phase=phase, num_bytes=span.stop - span.start)
            received[peer].append(chunk)

    await run_together([*(send(peer) for peer in outgoing), *(receive(peer) for peer in incoming)])
    return received


def spans(num_bytes: int, chunk: int) -> Iterator[slice]:
    """The chunks of so many bytes; one by one, as a peer may name any size."""
    return (slice(at, min(at + chunk, num_bytes)) for at in range(0, num_bytes, chunk))


def split_evenly(raw: torch.Tensor, num_pieces: int, *, unit: int = 1) -> Sequence[torch.Tensor]:
    """Views of consecutive pieces: see `even_sizes`."""
    return torch.split(raw, even_sizes(raw.numel(), num_pieces, unit=unit))


def even_sizes(num_bytes: int, num_pieces: int, *, unit: int = 1) -> list[int]:
    """Sizes of pieces that differ by at most one `unit` of bytes, which divides `num_bytes`."""
    num_units = num_bytes // unit
    edges = [num_units * index // num_pieces * unit for index in range(num_pieces + 1)]
    return [end - start for start, end in itertools.pairwise(edges)]
